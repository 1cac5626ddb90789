//! Moves: the same elements in another place.
use crate::{
    Error, Result,
    autograd::{Cx, Mask, Op, Saved, Sink, Var},
    tensor::Tensor,
};

/// The shape of x.
struct Reshape(Vec<usize>);

impl Op for Reshape {
    fn name(&self) -> &'static str {
        "reshape"
    }
    fn backward(&self, _: &mut Saved, dy: &[Option<Tensor>], _: Mask, dx: &mut Sink) -> Result<()> {
        let Some(dy) = &dy[0] else { return Ok(()) };
        dx.put(0, dy.reshape(&self.0)?)
    }
}

/// The order that undoes it.
struct Permute(Vec<usize>);

impl Op for Permute {
    fn name(&self) -> &'static str {
        "permute"
    }
    fn backward(&self, _: &mut Saved, dy: &[Option<Tensor>], _: Mask, dx: &mut Sink) -> Result<()> {
        let Some(dy) = &dy[0] else { return Ok(()) };
        dx.put(0, dy.permute(&self.0)?.contiguous()?)
    }
}

/// The axis, and the lengths along it.
struct Concat(usize, Vec<usize>);

impl Op for Concat {
    fn name(&self) -> &'static str {
        "concat"
    }
    fn backward(&self, _: &mut Saved, dy: &[Option<Tensor>], wrt: Mask, dx: &mut Sink) -> Result<()> {
        let Some(dy) = &dy[0] else { return Ok(()) };
        let mut start = 0;
        for (i, &len) in self.1.iter().enumerate() {
            if wrt.has(i) {
                dx.put(i, dy.slice(self.0, start, len)?.contiguous()?)?;
            }
            start += len;
        }
        Ok(())
    }
}

/// The shape of x, the axis, and where the cut begins.
struct Slice(Vec<usize>, usize, usize);

impl Op for Slice {
    fn name(&self) -> &'static str {
        "slice"
    }
    fn backward(&self, _: &mut Saved, dy: &[Option<Tensor>], _: Mask, dx: &mut Sink) -> Result<()> {
        let Some(dy) = &dy[0] else { return Ok(()) };
        let Slice(shape, axis, start) = self;
        let zeros = |len: usize| {
            let mut part = shape.clone();
            part[*axis] = len;
            Tensor::zeros(&part, dy.dtype(), dy.device())
        };
        let end = start + dy.shape()[*axis];
        dx.put(0, Tensor::concat(&[zeros(*start)?, dy.clone(), zeros(shape[*axis] - end)?], *axis)?)
    }
}

/// The shape of x.
struct Broadcast(Vec<usize>);

impl Op for Broadcast {
    fn name(&self) -> &'static str {
        "broadcast"
    }
    fn backward(&self, _: &mut Saved, dy: &[Option<Tensor>], _: Mask, dx: &mut Sink) -> Result<()> {
        let Some(dy) = &dy[0] else { return Ok(()) };
        dx.put(0, dy.sum_to(&self.0)?)
    }
}

/// The shape of x, the axis, and the lengths of the parts.
struct Split(Vec<usize>, usize, Vec<usize>);

impl Op for Split {
    fn name(&self) -> &'static str {
        "split"
    }
    fn backward(&self, _: &mut Saved, dy: &[Option<Tensor>], _: Mask, dx: &mut Sink) -> Result<()> {
        let Split(shape, axis, lengths) = self;
        let Some(like) = dy.iter().flatten().next() else { return Ok(()) };
        let mut parts = Vec::new();
        for (dy, &len) in dy.iter().zip(lengths) {
            let mut part = shape.clone();
            part[*axis] = len;
            parts.push(match dy {
                Some(dy) => dy.clone(),
                None => Tensor::zeros(&part, like.dtype(), like.device())?,
            });
        }
        dx.put(0, Tensor::concat(&parts, *axis)?)
    }
}

impl Cx<'_> {
    /// The same elements in another shape; one length may be `usize::MAX` and is worked out.
    pub fn reshape(&mut self, x: &Var, shape: &[usize]) -> Result<Var> {
        let y = x.value().reshape(shape)?;
        self.record(Reshape(x.shape().to_vec()), &[x], vec![y], &[])?.one()
    }

    /// Axis `i` of the result is axis `axes[i]` of `x`.
    pub fn permute(&mut self, x: &Var, axes: &[usize]) -> Result<Var> {
        let y = x.value().permute(axes)?.contiguous()?;
        let back = (0..axes.len()).filter_map(|i| axes.iter().position(|&a| a == i)).collect();
        self.record(Permute(back), &[x], vec![y], &[])?.one()
    }

    /// The elements `start..start + len` along `axis`.
    pub fn slice(&mut self, x: &Var, axis: usize, start: usize, len: usize) -> Result<Var> {
        let y = x.value().slice(axis, start, len)?.contiguous()?;
        self.record(Slice(x.shape().to_vec(), axis, start), &[x], vec![y], &[])?.one()
    }

    /// Repeated along axes of length 1 and new leading axes, up to `shape`.
    pub fn broadcast_to(&mut self, x: &Var, shape: &[usize]) -> Result<Var> {
        let y = x.value().broadcast_to(shape)?.contiguous()?;
        self.record(Broadcast(x.shape().to_vec()), &[x], vec![y], &[])?.one()
    }

    /// Joins any number of values along `axis`.
    pub fn concat(&mut self, parts: &[Var], axis: usize) -> Result<Var> {
        if parts.len() > Mask::MAX {
            let groups = parts.chunks(Mask::MAX).map(|g| self.concat(g, axis)).collect::<Result<Vec<_>>>()?;
            return self.concat(&groups, axis);
        }
        let values: Vec<Tensor> = parts.iter().map(|v| v.value().clone()).collect();
        let y = Tensor::concat(&values, axis)?;
        let lengths = values.iter().map(|t| t.shape()[axis]).collect();
        let inputs: Vec<&Var> = parts.iter().collect();
        self.record(Concat(axis, lengths), &inputs, vec![y], &[])?.one()
    }

    /// Cuts `x` along `axis` into parts of the given lengths: an op with several outputs.
    pub fn split(&mut self, x: &Var, axis: usize, lengths: &[usize]) -> Result<Vec<Var>> {
        let whole = lengths.iter().fold(0usize, |sum, &len| sum.saturating_add(len));
        if x.shape().get(axis) != Some(&whole) {
            return Err(Error::shape(format!("split: axis {axis} of {:?} into {lengths:?}", x.shape())));
        }
        let (mut start, mut parts) = (0, Vec::new());
        for &len in lengths {
            parts.push(x.value().slice(axis, start, len)?.contiguous()?);
            start += len;
        }
        Ok(self.record(Split(x.shape().to_vec(), axis, lengths.to_vec()), &[x], parts, &[])?.all())
    }
}
