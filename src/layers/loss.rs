//! Losses: what is minimised.
use super::{Example, Layer, Loss};
use crate::{
    Error, Result,
    autograd::{Cx, Outputs, Var},
    tensor::Tensor,
};

/// The cross-entropy of logits[…,v] and classes[…], and the number of right answers.
#[derive(Clone, Copy, Debug, Default)]
pub struct CrossEntropy {
    smoothing: f64,
    ignore: Option<i64>,
}

impl CrossEntropy {
    /// Plain.
    pub fn new() -> CrossEntropy {
        CrossEntropy::default()
    }

    /// With the weight 0 ≤ smoothing < 1 of the uniform distribution in the target (Szegedy et al. 2016).
    pub fn smoothing(self, smoothing: f64) -> CrossEntropy {
        CrossEntropy { smoothing, ..self }
    }

    /// Rows of this class do not count.
    pub fn ignore(self, class: i64) -> CrossEntropy {
        CrossEntropy { ignore: Some(class), ..self }
    }
}

fn two<'a>(x: &'a [Var], kind: &str) -> Result<[&'a Var; 2]> {
    match x {
        [x, target] => Ok([x, target]),
        _ => Err(Error::graph(format!("{kind}: a value and a target expected, got {} inputs", x.len()))),
    }
}

impl Layer for CrossEntropy {
    fn kind(&self) -> &'static str {
        "cross_entropy"
    }

    fn forward(&self, cx: &mut Cx, x: &[Var]) -> Result<Outputs> {
        let [logits, classes] = two(x, self.kind())?;
        if !(0.0..1.0).contains(&self.smoothing) {
            return Err(Error::config(format!("cross_entropy: 0 ≤ smoothing < 1 expected, got {}", self.smoothing)));
        }
        cx.cross_entropy(self.smoothing, self.ignore, logits, classes)
    }

    fn loss(&self) -> Option<&dyn Loss> {
        Some(self)
    }

    fn examples() -> Vec<Example> {
        vec![
            Example::new("plain", CrossEntropy::new(), &[&[3, 4]]).ids(&[3], 4),
            Example::new("smoothed", CrossEntropy::new().smoothing(0.1), &[&[3, 4]]).ids(&[3], 4),
            Example::new("smoothed, one class ignored", CrossEntropy::new().smoothing(0.2).ignore(0), &[&[5, 3]])
                .ids(&[5], 3),
            Example::new("sequence, one class ignored", CrossEntropy::new().ignore(2), &[&[2, 5, 3]]).ids(&[2, 5], 3),
        ]
    }
}

impl Loss for CrossEntropy {
    fn weight(&self, classes: &Tensor) -> Result<f64> {
        let ignore = self.ignore.map(|i| i as f64);
        Ok(classes.to_f64()?.into_iter().filter(|&c| Some(c) != ignore).count() as f64)
    }
}

/// The squared error: the sum of (x − target)² over elements, divided by their number.
#[derive(Clone, Copy, Debug, Default)]
pub struct Mse;

impl Layer for Mse {
    fn kind(&self) -> &'static str {
        "mse"
    }

    fn forward(&self, cx: &mut Cx, x: &[Var]) -> Result<Outputs> {
        let [x, target] = two(x, self.kind())?;
        Ok(cx.squared_error(x, target)?.into())
    }

    fn loss(&self) -> Option<&dyn Loss> {
        Some(self)
    }

    fn examples() -> Vec<Example> {
        vec![Example::new("plain", Mse, &[&[3, 4], &[3, 4]])]
    }
}

impl Loss for Mse {
    fn weight(&self, target: &Tensor) -> Result<f64> {
        Ok(target.len() as f64)
    }
}
