//! Self-attention.
use crate::{
    Error, Result,
    autograd::{Cx, Mask, Op, Saved, Sink, Var},
    tensor::{Tensor, backend::Attention},
};

/// Saved: qkv, y, lse.
struct SelfAttention(Attention);

impl Op for SelfAttention {
    fn name(&self) -> &'static str {
        "attention"
    }
    fn backward(&self, saved: &mut Saved, dy: &[Option<Tensor>], _: Mask, dx: &mut Sink) -> Result<()> {
        let Some(dy) = &dy[0] else { return Ok(()) };
        dx.put(0, dy.attention_grad(self.0, saved.get(0)?, saved.get(1)?, saved.get(2)?)?)
    }
}

impl Cx<'_> {
    /// For each of `heads` heads, softmax(q·kᵀ/√d)·v of `qkv[n,t,3·heads·d]` (queries, keys, values): `y[n,t,heads·d]`. With
    /// `causal` a token sees only itself and those before it.
    pub fn attention(&mut self, qkv: &Var, heads: usize, causal: bool) -> Result<Var> {
        let &[n, t, features] = qkv.shape() else {
            return Err(Error::shape(format!("attention: qkv[n,t,3·heads·d] expected, got {:?}", qkv.shape())));
        };
        if heads == 0 || features == 0 || t == 0 || !(features / heads).is_multiple_of(3) || features % heads != 0 {
            return Err(Error::shape(format!(
                "attention: qkv[n,t,3·heads·d] with {heads} heads expected, each size 1 or more, got {:?}",
                qkv.shape()
            )));
        }
        let a = Attention { n, t, heads, d: features / heads / 3, causal };
        let (y, lse) = qkv.value().attention(a)?;
        let save = [(qkv.value(), Mask::ALL), (&y, Mask::ALL), (&lse, Mask::ALL)];
        self.record(SelfAttention(a), &[qkv], vec![y.clone()], &save)?.one()
    }
}
