//! Look-up.
use crate::{
    Result,
    autograd::{Cx, Mask, Op, Saved, Sink, Var},
    tensor::Tensor,
};

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

impl Cx<'_> {
    /// y[…,d] = table[ids[…],d].
    pub fn embedding(&mut self, table: &Var, ids: &Var) -> Result<Var> {
        let y = table.value().embedding(ids.value())?;
        let rows = table.shape()[0];
        self.record(Embedding(rows), &[table], vec![y], &[(ids.value(), Mask::only(0))])?.one()
    }
}
