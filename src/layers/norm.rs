//! Batch and layer normalisation.
use super::{Example, Init, Layer, ParamSpec, StateSpec, single};
use crate::{
    Error, Result,
    autograd::{Cx, Mode, Outputs, Var},
};

/// Normalises each channel of x[…,c] over all other axes, with the statistics of the micro-batch in training and running
/// averages in evaluation (Ioffe and Szegedy 2015).
///
/// The statistics are those of a *micro-batch*: with m micro-batches of b samples it trains as with batches of b.
#[derive(Clone, Copy, Debug)]
pub struct BatchNorm {
    channels: usize,
    eps: f64,
    momentum: f64,
}

impl BatchNorm {
    /// For `channels` channels, with eps 1e-5 and momentum 0.1.
    pub fn new(channels: usize) -> BatchNorm {
        BatchNorm { channels, eps: 1e-5, momentum: 0.1 }
    }

    /// Added to the variance.
    pub fn eps(self, eps: f64) -> BatchNorm {
        BatchNorm { eps, ..self }
    }

    /// The weight of a micro-batch in the running averages.
    pub fn momentum(self, momentum: f64) -> BatchNorm {
        BatchNorm { momentum, ..self }
    }
}

impl Layer for BatchNorm {
    fn kind(&self) -> &'static str {
        "batch_norm"
    }

    fn params(&self) -> Vec<ParamSpec> {
        let shape = [self.channels];
        vec![ParamSpec::new("gamma", &shape, Init::Constant(1.0)), ParamSpec::new("beta", &shape, Init::Constant(0.0))]
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
        let (gamma, beta) = (cx.param(0)?, cx.param(1)?);
        if cx.mode() == Mode::Eval {
            let (mean, var) = (cx.state(0)?, cx.state(1)?);
            return Ok(cx.fixed_norm(self.eps, x, [mean, var], &gamma, &beta)?.into());
        }
        let count = x.value().len() / self.channels.max(1);
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
        ]
    }
}

/// Normalises each row of x[…,d] (Ba et al. 2016).
#[derive(Clone, Copy, Debug)]
pub struct LayerNorm {
    features: usize,
    eps: f64,
}

impl LayerNorm {
    /// For rows of `features` values, with eps 1e-5.
    pub fn new(features: usize) -> LayerNorm {
        LayerNorm { features, eps: 1e-5 }
    }

    /// Added to the variance.
    pub fn eps(self, eps: f64) -> LayerNorm {
        LayerNorm { eps, ..self }
    }
}

impl Layer for LayerNorm {
    fn kind(&self) -> &'static str {
        "layer_norm"
    }

    fn params(&self) -> Vec<ParamSpec> {
        let shape = [self.features];
        vec![ParamSpec::new("gamma", &shape, Init::Constant(1.0)), ParamSpec::new("beta", &shape, Init::Constant(0.0))]
    }

    fn forward(&self, cx: &mut Cx, x: &[Var]) -> Result<Outputs> {
        let (gamma, beta) = (cx.param(0)?, cx.param(1)?);
        Ok(cx.layer_norm(self.eps, single(x)?, &gamma, &beta)?.into())
    }

    fn examples() -> Vec<Example> {
        vec![Example::new("three axes", LayerNorm::new(5), &[&[2, 3, 5]])]
    }
}
