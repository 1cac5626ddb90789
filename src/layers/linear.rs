//! The fully connected layer.
use super::{Example, Init, Layer, ParamSpec, positive, single};
use crate::{
    Result,
    autograd::{Cx, Outputs, Var},
};

/// `y[…,o] = x[…,i] · weight[o,i]ᵀ + bias[o]`.
#[derive(Clone, Debug)]
pub struct Linear {
    inputs: usize,
    outputs: usize,
    bias: bool,
    frozen: bool,
}

impl Linear {
    /// From `inputs` to `outputs` features.
    pub fn new(inputs: usize, outputs: usize) -> Linear {
        Linear { inputs, outputs, bias: true, frozen: false }
    }

    /// With or without bias.
    pub fn bias(self, yes: bool) -> Linear {
        Linear { bias: yes, ..self }
    }

    /// Its parameters are not learned.
    pub fn frozen(self) -> Linear {
        Linear { frozen: true, ..self }
    }
}

impl Layer for Linear {
    fn kind(&self) -> &'static str {
        "linear"
    }

    fn params(&self) -> Vec<ParamSpec> {
        let init = Init::fan_in(self.inputs);
        let mut p = vec![ParamSpec::new("weight", &[self.outputs, self.inputs], init).frozen(self.frozen)];
        if self.bias {
            p.push(ParamSpec::new("bias", &[self.outputs], init).frozen(self.frozen));
        }
        p
    }

    fn forward(&self, cx: &mut Cx, x: &[Var]) -> Result<Outputs> {
        positive("linear", &[("inputs", self.inputs), ("outputs", self.outputs)])?;
        let w = cx.param(0)?;
        let b = if self.bias { Some(cx.param(1)?) } else { None };
        Ok(cx.linear(single(x)?, &w, b.as_ref())?.into())
    }

    fn examples() -> Vec<Example> {
        vec![
            Example::new("plain", Linear::new(3, 4), &[&[2, 3]]),
            Example::new("without bias, three axes", Linear::new(3, 4).bias(false), &[&[2, 5, 3]]),
            Example::new("frozen", Linear::new(3, 4).frozen(), &[&[2, 3]]),
        ]
    }
}
