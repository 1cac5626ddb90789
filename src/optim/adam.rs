//! Adam and AdamW.
use super::{Optimizer, Rate};
use crate::{
    Result,
    tensor::{Tensor, backend::AdamStep},
};

/// Adam (Kingma and Ba 2015; decay is added to the gradient) and AdamW (Loshchilov and Hutter 2019; decay is decoupled).
#[derive(Clone, Debug)]
pub struct Adam {
    rate: Rate,
    betas: [f64; 2],
    eps: f64,
    decay: f64,
    decoupled: bool,
}

impl Adam {
    /// Adam with a constant learning rate (or any [`Rate`]), betas 0.9 and 0.999, eps 1e-8, no decay.
    pub fn new(rate: impl Into<Rate>) -> Adam {
        Adam { rate: rate.into(), betas: [0.9, 0.999], eps: 1e-8, decay: 0.0, decoupled: false }
    }

    /// AdamW with decay 0.01.
    pub fn adamw(rate: impl Into<Rate>) -> Adam {
        Adam { decay: 0.01, decoupled: true, ..Adam::new(rate) }
    }

    /// The decay rates of the two moments.
    pub fn betas(self, first: f64, second: f64) -> Adam {
        Adam { betas: [first, second], ..self }
    }

    /// What is added to the square root.
    pub fn eps(self, eps: f64) -> Adam {
        Adam { eps, ..self }
    }

    /// With weight decay.
    pub fn decay(self, decay: f64) -> Adam {
        Adam { decay, ..self }
    }
}

impl Optimizer for Adam {
    fn describe(&self) -> String {
        format!("{self:?}")
    }

    fn state(&self) -> &'static [&'static str] {
        &["first_moment", "second_moment"]
    }

    fn rate(&self, t: u64) -> f64 {
        self.rate.at(t)
    }

    fn update(&self, t: u64, lr: f64, weight: &mut Tensor, grad: &Tensor, state: &mut [Tensor]) -> Result<()> {
        let Adam { betas, eps, decay, decoupled, .. } = *self;
        let step = AdamStep { lr, betas, eps, decay, decoupled, t: t + 1 };
        match state {
            [m, v] => weight.adam_step(step, grad, m, v),
            _ => Err(crate::Error::config(format!("adam keeps two moments, got {}", state.len()))),
        }
    }
}
