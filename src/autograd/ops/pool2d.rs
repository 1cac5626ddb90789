//! Two-dimensional pooling of x[n,h,w,c].
use crate::{
    Result,
    autograd::{Cx, Mask, Op, Saved, Sink, Var},
    tensor::{Tensor, backend::Pool2d},
};

struct Max(Pool2d);

impl Op for Max {
    fn name(&self) -> &'static str {
        "max_pool2d"
    }
    fn backward(&self, saved: &mut Saved, dy: &[Option<Tensor>], _: Mask, dx: &mut Sink) -> Result<()> {
        let Some(dy) = &dy[0] else { return Ok(()) };
        dx.put(0, dy.max_pool2d_grad(self.0, saved.get(0)?)?)
    }
}

struct Avg(Pool2d);

impl Op for Avg {
    fn name(&self) -> &'static str {
        "avg_pool2d"
    }
    fn backward(&self, _: &mut Saved, dy: &[Option<Tensor>], _: Mask, dx: &mut Sink) -> Result<()> {
        let Some(dy) = &dy[0] else { return Ok(()) };
        dx.put(0, dy.avg_pool2d_grad(self.0)?)
    }
}

impl Cx<'_> {
    /// The maximum of each window; of equals the first one gets the gradient.
    pub fn max_pool2d(&mut self, p: Pool2d, x: &Var) -> Result<Var> {
        let (y, arg) = x.value().max_pool2d(p)?;
        self.record(Max(p), &[x], vec![y], &[(&arg, Mask::only(0))])?.one()
    }

    /// The mean of each window.
    pub fn avg_pool2d(&mut self, p: Pool2d, x: &Var) -> Result<Var> {
        let y = x.value().avg_pool2d(p)?;
        self.record(Avg(p), &[x], vec![y], &[])?.one()
    }
}
