//! Batch and layer normalisation.
use super::{Example, Init, Layer, ParamSpec, StateSpec, positive, single};
use crate::{
    Error, Result,
    autograd::{Cx, Mode, Outputs, Var},
};

/// gamma and beta for `n` channels or features.
fn scale_and_shift(n: usize, frozen: bool) -> Vec<ParamSpec> {
    let param = |name, start| ParamSpec::new(name, &[n], Init::Constant(start)).frozen(frozen);
    vec![param("gamma", 1.0), param("beta", 0.0)]
}

/// An error unless `x[…,n]` has the `n` channels or features that the layer is for, and eps is a number that can be added to a
/// variance.
fn settings(kind: &str, x: &Var, n: usize, eps: f64) -> Result<()> {
    positive(kind, &[("the length of the last axis", n)])?;
    if !(eps >= 0.0 && eps.is_finite()) {
        return Err(Error::config(format!("{kind}: eps must be 0 or more, got {eps}")));
    }
    if x.shape().last() != Some(&n) {
        return Err(Error::shape(format!("{kind}: a last axis of length {n} expected, got x{:?}", x.shape())));
    }
    Ok(())
}

/// Normalises each channel of x[…,c] over all other axes, with the statistics of the micro-batch in training and running
/// averages in evaluation (Ioffe and Szegedy 2015).
///
/// The statistics are those of a *micro-batch*: with m micro-batches of b samples it trains as with batches of b.
#[derive(Clone, Copy, Debug)]
pub struct BatchNorm {
    channels: usize,
    eps: f64,
    momentum: f64,
    frozen: bool,
}

impl BatchNorm {
    /// For `channels` channels, with eps 1e-5 and momentum 0.1.
    pub fn new(channels: usize) -> BatchNorm {
        BatchNorm { channels, eps: 1e-5, momentum: 0.1, frozen: false }
    }

    /// Added to the variance.
    pub fn eps(self, eps: f64) -> BatchNorm {
        BatchNorm { eps, ..self }
    }

    /// The weight of a micro-batch in the running averages, 0 ≤ momentum ≤ 1.
    pub fn momentum(self, momentum: f64) -> BatchNorm {
        BatchNorm { momentum, ..self }
    }

    /// Its scale and shift are not learned.
    pub fn frozen(self) -> BatchNorm {
        BatchNorm { frozen: true, ..self }
    }
}

impl Layer for BatchNorm {
    fn kind(&self) -> &'static str {
        "batch_norm"
    }

    fn params(&self) -> Vec<ParamSpec> {
        scale_and_shift(self.channels, self.frozen)
    }

    fn state(&self) -> Vec<StateSpec> {
        let state = |name: &str, start| StateSpec {
            name: name.into(),
            shape: vec![self.channels],
            start,
            momentum: self.momentum,
        };
        vec![state("running_mean", 0.0), state("running_var", 1.0)]
    }

    fn forward(&self, cx: &mut Cx, x: &[Var]) -> Result<Outputs> {
        let x = single(x)?;
        settings("batch_norm", x, self.channels, self.eps)?;
        if !(0.0..=1.0).contains(&self.momentum) {
            return Err(Error::config(format!("batch_norm: 0 ≤ momentum ≤ 1 expected, got {}", self.momentum)));
        }
        let (gamma, beta) = (cx.param(0)?, cx.param(1)?);
        if cx.mode() == Mode::Eval {
            let (mean, var) = (cx.state(0)?, cx.state(1)?);
            return Ok(cx.fixed_norm(self.eps, x, [mean, var], &gamma, &beta)?.into());
        }
        let count = x.value().len() / self.channels;
        if count < 2 {
            return Err(Error::shape(format!(
                "batch_norm: training needs two values a channel or more, got x{:?}",
                x.shape()
            )));
        }
        let (y, mean, var) = cx.batch_norm(self.eps, x, &gamma, &beta)?;
        cx.emit_stat(0, mean);
        // The running variance is the unbiased estimate.
        cx.emit_stat(1, var.affine(count as f64 / (count - 1) as f64, 0.0)?);
        Ok(y.into())
    }

    fn examples() -> Vec<Example> {
        vec![
            Example::new("images", BatchNorm::new(3), &[&[2, 3, 2, 3]]),
            Example::new("rows", BatchNorm::new(4), &[&[5, 4]]),
            Example::new("frozen", BatchNorm::new(2).eps(1e-3).frozen(), &[&[3, 2, 2]]),
        ]
    }
}

/// Normalises each row of x[…,d] (Ba et al. 2016).
#[derive(Clone, Copy, Debug)]
pub struct LayerNorm {
    features: usize,
    eps: f64,
    frozen: bool,
}

impl LayerNorm {
    /// For rows of `features` values, with eps 1e-5.
    pub fn new(features: usize) -> LayerNorm {
        LayerNorm { features, eps: 1e-5, frozen: false }
    }

    /// Added to the variance.
    pub fn eps(self, eps: f64) -> LayerNorm {
        LayerNorm { eps, ..self }
    }

    /// Its scale and shift are not learned.
    pub fn frozen(self) -> LayerNorm {
        LayerNorm { frozen: true, ..self }
    }
}

impl Layer for LayerNorm {
    fn kind(&self) -> &'static str {
        "layer_norm"
    }

    fn params(&self) -> Vec<ParamSpec> {
        scale_and_shift(self.features, self.frozen)
    }

    fn forward(&self, cx: &mut Cx, x: &[Var]) -> Result<Outputs> {
        let x = single(x)?;
        settings("layer_norm", x, self.features, self.eps)?;
        let (gamma, beta) = (cx.param(0)?, cx.param(1)?);
        Ok(cx.layer_norm(self.eps, x, &gamma, &beta)?.into())
    }

    fn examples() -> Vec<Example> {
        vec![
            Example::new("three axes", LayerNorm::new(5), &[&[2, 3, 5]]),
            Example::new("frozen", LayerNorm::new(3).eps(1e-3).frozen(), &[&[4, 3]]),
        ]
    }
}
