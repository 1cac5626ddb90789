//! Dropout.
use super::{Example, Layer, single};
use crate::{
    Error, Result,
    autograd::{Cx, Mode, Outputs, Var},
};

/// In training zeroes each element with probability `rate` and divides the others by 1 − rate; in evaluation does nothing
/// (Srivastava et al. 2014). The mask depends on seed, step, sample and node name only.
#[derive(Clone, Copy, Debug)]
pub struct Dropout {
    rate: f64,
}

impl Dropout {
    /// 0 ≤ rate < 1.
    pub fn new(rate: f64) -> Dropout {
        Dropout { rate }
    }
}

impl Layer for Dropout {
    fn kind(&self) -> &'static str {
        "dropout"
    }

    fn forward(&self, cx: &mut Cx, x: &[Var]) -> Result<Outputs> {
        let x = single(x)?;
        if !(0.0..1.0).contains(&self.rate) {
            return Err(Error::config(format!("dropout: 0 ≤ rate < 1 expected, got {}", self.rate)));
        }
        Ok(if cx.mode() == Mode::Train && self.rate > 0.0 { cx.dropout(self.rate, x)? } else { x.clone() }.into())
    }

    fn examples() -> Vec<Example> {
        vec![Example::new("half", Dropout::new(0.5), &[&[4, 6]]), Example::new("none", Dropout::new(0.0), &[&[2, 3]])]
    }
}
