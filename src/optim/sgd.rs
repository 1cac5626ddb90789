//! Stochastic gradient descent.
use super::{Optimizer, Rate};
use crate::{
    Result,
    tensor::{Tensor, backend::SgdStep},
};

/// SGD with momentum, Nesterov's variant and weight decay (L2): g ← g + decay·w; v ← momentum·v + g; w ← w − lr·v, or
/// w − lr·(g + momentum·v) with Nesterov.
#[derive(Clone, Debug)]
pub struct Sgd {
    rate: Rate,
    momentum: f64,
    decay: f64,
    nesterov: bool,
}

impl Sgd {
    /// With a constant learning rate (or any [`Rate`]).
    pub fn new(rate: impl Into<Rate>) -> Sgd {
        Sgd { rate: rate.into(), momentum: 0.0, decay: 0.0, nesterov: false }
    }

    /// With momentum, 0 ≤ momentum < 1.
    pub fn momentum(self, momentum: f64) -> Sgd {
        Sgd { momentum, ..self }
    }

    /// With weight decay.
    pub fn decay(self, decay: f64) -> Sgd {
        Sgd { decay, ..self }
    }

    /// Nesterov's variant.
    pub fn nesterov(self, yes: bool) -> Sgd {
        Sgd { nesterov: yes, ..self }
    }
}

impl Optimizer for Sgd {
    fn describe(&self) -> String {
        format!("{self:?}")
    }

    fn state(&self) -> &'static [&'static str] {
        if self.momentum == 0.0 { &[] } else { &["momentum"] }
    }

    fn rate(&self, t: u64) -> f64 {
        self.rate.at(t)
    }

    fn update(&self, _: u64, lr: f64, weight: &mut Tensor, grad: &Tensor, state: &mut [Tensor]) -> Result<()> {
        let step = SgdStep { lr, momentum: self.momentum, decay: self.decay, nesterov: self.nesterov };
        weight.sgd_step(step, grad, state.first_mut())
    }
}
