//! Optimizers and learning rates.
mod adam;
mod rate;
mod sgd;

pub use adam::Adam;
pub use rate::Rate;
pub use sgd::Sgd;

use crate::{Result, tensor::Tensor};

/// How weights follow their gradients. An optimizer describes; the state of each parameter is held by its stage.
pub trait Optimizer: Send + Sync {
    /// Its name and settings, as compared between ranks and written to checkpoints.
    fn describe(&self) -> String;

    /// The names of the tensors that it keeps for each parameter, all of the parameter's shape and starting at zero.
    fn state(&self) -> &'static [&'static str] {
        &[]
    }

    /// The learning rate of minibatch `t`, from 0.
    fn rate(&self, t: u64) -> f64;

    /// Update `t` (from 0) of one parameter with learning rate `lr`, in place where nothing else holds it.
    fn update(&self, t: u64, lr: f64, weight: &mut Tensor, grad: &Tensor, state: &mut [Tensor]) -> Result<()>;
}
