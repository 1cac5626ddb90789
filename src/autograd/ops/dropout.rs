//! Random choice.
use crate::{
    Result,
    autograd::{Cx, Mask, Op, Saved, Sink, Var},
    tensor::{Philox, Tensor, backend::Dropout},
};
use std::sync::Arc;

/// The mask is drawn again in the backward pass rather than kept.
struct DropoutOp {
    rate: f64,
    rng: Philox,
    samples: Arc<[u64]>,
}

impl Op for DropoutOp {
    fn name(&self) -> &'static str {
        "dropout"
    }
    fn backward(&self, _: &mut Saved, dy: &[Option<Tensor>], _: Mask, dx: &mut Sink) -> Result<()> {
        let Some(dy) = &dy[0] else { return Ok(()) };
        dx.put(0, dy.dropout(Dropout { rate: self.rate, rng: self.rng, samples: &self.samples })?)
    }
}

impl Cx<'_> {
    /// Zeroes elements with probability `rate` and divides the others by 1 − rate, drawn for the node that runs now.
    pub fn dropout(&mut self, rate: f64, x: &Var) -> Result<Var> {
        let (rng, samples) = self.rng();
        let y = x.value().dropout(Dropout { rate, rng, samples: &samples })?;
        self.record(DropoutOp { rate, rng, samples }, &[x], vec![y], &[])?.one()
    }
}
