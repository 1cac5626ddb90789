//! Functions of each element, and softmax.
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
        vec![Example::new("plain", Relu, &[&[2, 3]]), Example::new("images", Relu, &[&[2, 3, 5, 1]])]
    }
}

/// `y = x·Φ(x)`, with the exact error function (Hendrycks and Gimpel 2016).
#[derive(Clone, Copy, Debug, Default)]
pub struct Gelu;

impl Layer for Gelu {
    fn kind(&self) -> &'static str {
        "gelu"
    }
    fn forward(&self, cx: &mut Cx, x: &[Var]) -> Result<Outputs> {
        Ok(cx.gelu(single(x)?)?.into())
    }
    fn examples() -> Vec<Example> {
        vec![Example::new("plain", Gelu, &[&[3, 4]])]
    }
}

/// `y = tanh x`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tanh;

impl Layer for Tanh {
    fn kind(&self) -> &'static str {
        "tanh"
    }
    fn forward(&self, cx: &mut Cx, x: &[Var]) -> Result<Outputs> {
        Ok(cx.tanh(single(x)?)?.into())
    }
    fn examples() -> Vec<Example> {
        vec![Example::new("plain", Tanh, &[&[3, 4]])]
    }
}

/// `y = 1/(1 + e⁻ˣ)`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sigmoid;

impl Layer for Sigmoid {
    fn kind(&self) -> &'static str {
        "sigmoid"
    }
    fn forward(&self, cx: &mut Cx, x: &[Var]) -> Result<Outputs> {
        Ok(cx.sigmoid(single(x)?)?.into())
    }
    fn examples() -> Vec<Example> {
        vec![Example::new("plain", Sigmoid, &[&[3, 4]])]
    }
}

/// The softmax of each row of x[…,d].
#[derive(Clone, Copy, Debug, Default)]
pub struct Softmax;

impl Layer for Softmax {
    fn kind(&self) -> &'static str {
        "softmax"
    }
    fn forward(&self, cx: &mut Cx, x: &[Var]) -> Result<Outputs> {
        Ok(cx.softmax(single(x)?)?.into())
    }
    fn examples() -> Vec<Example> {
        vec![Example::new("three axes", Softmax, &[&[2, 3, 5]])]
    }
}
