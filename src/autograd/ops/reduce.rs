//! Sums, means and maxima.
use crate::{
    Error, Result,
    autograd::{Cx, Mask, Op, Saved, Sink, Var},
    tensor::{
        Tensor,
        backend::{Pool2d, Reduce},
    },
};

/// The shape of x, and the axis that was summed; all axes if `None`.
struct Sum(Vec<usize>, Option<usize>);

impl Op for Sum {
    fn name(&self) -> &'static str {
        "sum"
    }
    fn backward(&self, _: &mut Saved, dy: &[Option<Tensor>], _: Mask, dx: &mut Sink) -> Result<()> {
        let Some(dy) = &dy[0] else { return Ok(()) };
        let Sum(shape, axis) = self;
        let kept = shape.iter().enumerate().map(|(i, &n)| if axis.is_none_or(|a| a == i) { 1 } else { n });
        dx.put(0, dy.reshape(&kept.collect::<Vec<_>>())?.broadcast_to(shape)?.contiguous()?)
    }
}

/// The maximum along an axis is one of windows as long as the axis. Saved: arg.
struct MaxAxis(Pool2d, Vec<usize>);

impl Op for MaxAxis {
    fn name(&self) -> &'static str {
        "max_axis"
    }
    fn backward(&self, saved: &mut Saved, dy: &[Option<Tensor>], _: Mask, dx: &mut Sink) -> Result<()> {
        let Some(dy) = &dy[0] else { return Ok(()) };
        let MaxAxis(p, shape) = self;
        dx.put(0, dy.reshape(&[p.n, 1, 1, p.c])?.max_pool2d_grad(*p, saved.get(0)?)?.reshape(shape)?)
    }
}

impl Cx<'_> {
    /// The sum of all elements, as a scalar of shape [].
    pub fn sum(&mut self, x: &Var) -> Result<Var> {
        let y = x.value().sum()?;
        self.record(Sum(x.shape().to_vec(), None), &[x], vec![y], &[])?.one()
    }

    /// The mean of all elements, as a scalar of shape [].
    pub fn mean(&mut self, x: &Var) -> Result<Var> {
        let n = x.value().len();
        let sum = self.sum(x)?;
        self.scale(&sum, 1.0 / n as f64)
    }

    /// The sum along `axis`, which is no more.
    pub fn sum_axis(&mut self, x: &Var, axis: usize) -> Result<Var> {
        let y = x.value().reduce(Reduce::Sum, axis)?;
        self.record(Sum(x.shape().to_vec(), Some(axis)), &[x], vec![y], &[])?.one()
    }

    /// The mean along `axis`, which is no more.
    pub fn mean_axis(&mut self, x: &Var, axis: usize) -> Result<Var> {
        let sum = self.sum_axis(x, axis)?;
        self.scale(&sum, 1.0 / x.shape()[axis] as f64)
    }

    /// The maximum along `axis`, which is no more; the first of equals gets the gradient.
    pub fn max_axis(&mut self, x: &Var, axis: usize) -> Result<Var> {
        let shape = x.shape();
        let Some(&len) = shape.get(axis).filter(|&&len| len > 0) else {
            return Err(Error::shape(format!("max_axis: there is nothing along axis {axis} of {shape:?}")));
        };
        let (n, c) = (shape[..axis].iter().product(), shape[axis + 1..].iter().product());
        let p = Pool2d { n, hw: [len, 1], c, kernel: [len, 1], stride: [len, 1], padding: [0, 0] };
        let (y, arg) = x.value().reshape(&p.x_shape())?.max_pool2d(p)?;
        let y = y.reshape(&[&shape[..axis], &shape[axis + 1..]].concat())?;
        self.record(MaxAxis(p, shape.to_vec()), &[x], vec![y], &[(&arg, Mask::only(0))])?.one()
    }
}
