//! Look-up and random choice.
use crate::{
    Result,
    autograd::{Cx, Mask, Op, Saved, Sink, Var},
    tensor::{Philox, Tensor, backend::Dropout},
};
use std::sync::Arc;

/// Rows of the table. Saved: ids.
struct Embedding(usize);

impl Op for Embedding {
    fn name(&self) -> &'static str {
        "embedding"
    }
    fn backward(&self, saved: &mut Saved, dy: &[Option<Tensor>], _: Mask, dx: &mut Sink) -> Result<()> {
        let Some(dy) = &dy[0] else { return Ok(()) };
        dx.put(0, dy.embedding_grad(self.0, saved.get(0)?)?)
    }
}

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
    /// y[…,d] = table[ids[…],d].
    pub fn embedding(&mut self, table: &Var, ids: &Var) -> Result<Var> {
        let y = table.value().embedding(ids.value())?;
        let rows = table.shape()[0];
        self.record(Embedding(rows), &[table], vec![y], &[(ids.value(), Mask::only(0))])?.one()
    }

    /// Zeroes elements with probability `rate` and divides the others by 1 − rate, drawn for the node that runs now.
    pub fn dropout(&mut self, rate: f64, x: &Var) -> Result<Var> {
        let (rng, samples) = self.rng();
        let y = x.value().dropout(Dropout { rate, rng, samples: &samples })?;
        self.record(DropoutOp { rate, rng, samples }, &[x], vec![y], &[])?.one()
    }
}
