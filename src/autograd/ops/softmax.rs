//! Softmax.
use crate::{
    Result,
    autograd::{Cx, Mask, Op, Saved, Sink, Var},
    tensor::Tensor,
};

/// Saved: y.
struct Softmax;

impl Op for Softmax {
    fn name(&self) -> &'static str {
        "softmax"
    }
    fn backward(&self, saved: &mut Saved, dy: &[Option<Tensor>], _: Mask, dx: &mut Sink) -> Result<()> {
        let Some(dy) = &dy[0] else { return Ok(()) };
        dx.put(0, dy.softmax_grad(saved.get(0)?)?)
    }
}

impl Cx<'_> {
    /// The softmax of each row of x[…,d].
    pub fn softmax(&mut self, x: &Var) -> Result<Var> {
        let y = x.value().softmax()?;
        self.record(Softmax, &[x], vec![y.clone()], &[(&y, Mask::only(0))])?.one()
    }
}
