//! The rectified linear unit.
use super::{Example, Layer, single};
use crate::{
    Result,
    autograd::{Cx, Outputs, Var},
};

/// `y = max(x, 0)`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Relu;

impl Layer for Relu {
    fn kind(&self) -> &'static str {
        "relu"
    }

    fn forward(&self, cx: &mut Cx, x: &[Var]) -> Result<Outputs> {
        Ok(cx.relu(single(x)?)?.into())
    }

    fn examples() -> Vec<Example> {
        vec![Example::new("plain", Relu, &[&[2, 3]])]
    }
}
