//! Self-attention with several heads (Vaswani et al. 2017).
use super::{Example, Init, Layer, ParamSpec, positive, single};
use crate::{
    Error, Result,
    autograd::{Cx, Outputs, Var},
};

/// `y[n,t,features]` of `x[n,t,features]`: queries, keys and values are linear in x; each head mixes the values of all tokens by
/// softmax(q·kᵀ/√(features/heads)); a linear map of what the heads found ends it.
#[derive(Clone, Copy, Debug)]
pub struct MultiHeadAttention {
    features: usize,
    heads: usize,
    causal: bool,
    frozen: bool,
}

impl MultiHeadAttention {
    /// Every token sees all; `heads` divides `features`.
    pub fn new(features: usize, heads: usize) -> MultiHeadAttention {
        MultiHeadAttention { features, heads, causal: false, frozen: false }
    }

    /// Whether a token sees only itself and those before it.
    pub fn causal(self, yes: bool) -> MultiHeadAttention {
        MultiHeadAttention { causal: yes, ..self }
    }

    /// Its parameters are not learned.
    pub fn frozen(self) -> MultiHeadAttention {
        MultiHeadAttention { frozen: true, ..self }
    }
}

impl Layer for MultiHeadAttention {
    fn kind(&self) -> &'static str {
        "attention"
    }

    fn params(&self) -> Vec<ParamSpec> {
        let (d, init) = (self.features, Init::fan_in(self.features));
        let three = d.saturating_mul(3);
        let param = |name, shape: &[usize]| ParamSpec::new(name, shape, init).frozen(self.frozen);
        vec![
            param("in_weight", &[three, d]),
            param("in_bias", &[three]),
            param("out_weight", &[d, d]),
            param("out_bias", &[d]),
        ]
    }

    fn forward(&self, cx: &mut Cx, x: &[Var]) -> Result<Outputs> {
        let (x, d) = (single(x)?, self.features);
        positive("attention", &[("features", d), ("heads", self.heads)])?;
        if !d.is_multiple_of(self.heads) {
            return Err(Error::config(format!("attention: heads must divide features, got {} of {d}", self.heads)));
        }
        if !matches!(x.shape(), &[_, t, features] if features == d && t > 0) {
            return Err(Error::shape(format!(
                "attention: x[n,t,{d}] of one token or more expected, got {:?}",
                x.shape()
            )));
        }
        let (in_weight, in_bias, out_weight, out_bias) = (cx.param(0)?, cx.param(1)?, cx.param(2)?, cx.param(3)?);
        let qkv = cx.linear(x, &in_weight, Some(&in_bias))?;
        let y = cx.attention(&qkv, self.heads, self.causal)?;
        Ok(cx.linear(&y, &out_weight, Some(&out_bias))?.into())
    }

    fn examples() -> Vec<Example> {
        vec![
            Example::new("two heads", MultiHeadAttention::new(6, 2), &[&[2, 5, 6]]),
            Example::new("causal", MultiHeadAttention::new(6, 3).causal(true), &[&[2, 7, 6]]),
            Example::new("one token", MultiHeadAttention::new(4, 2).causal(true), &[&[3, 1, 4]]),
            Example::new("heads of one feature", MultiHeadAttention::new(3, 3), &[&[1, 4, 3]]),
            Example::new("frozen", MultiHeadAttention::new(5, 1).causal(true).frozen(), &[&[2, 3, 5]]),
        ]
    }
}
