//! Two-dimensional convolution of x[n,h,w,ci] with w[kh,kw,ci/groups,co].
use crate::{
    Result,
    autograd::{Cx, Mask, Op, Saved, Sink, Var},
    tensor::{
        Tensor,
        backend::{Conv2d, Reduce},
    },
};

struct Conv(Conv2d);
const X: usize = 0;
const W: usize = 1;
const B: usize = 2;

impl Op for Conv {
    fn name(&self) -> &'static str {
        "conv2d"
    }

    fn backward(&self, saved: &mut Saved, dy: &[Option<Tensor>], wrt: Mask, dx: &mut Sink) -> Result<()> {
        let Some(dy) = &dy[0] else { return Ok(()) };
        if wrt.has(X) {
            dx.put(X, dy.conv2d_input_grad(self.0, saved.get(1)?)?)?;
        }
        if wrt.has(W) {
            dx.put(W, dy.conv2d_weight_grad(self.0, saved.get(0)?)?)?;
        }
        if wrt.has(B) {
            dx.put(B, dy.reshape(&[usize::MAX, self.0.co])?.reduce(Reduce::Sum, 0)?)?;
        }
        Ok(())
    }
}

impl Cx<'_> {
    /// `y[n,oh,ow,co] = conv(x, w) (+ b[co])`, with the sizes that `c` gives.
    pub fn conv2d(&mut self, c: Conv2d, x: &Var, w: &Var, b: Option<&Var>) -> Result<Var> {
        let y = x.value().conv2d(c, w.value(), b.map(Var::value))?;
        let save = [(x.value(), Mask::only(W)), (w.value(), Mask::only(X))];
        match b {
            Some(b) => self.record(Conv(c), &[x, w, b], vec![y], &save)?.one(),
            None => self.record(Conv(c), &[x, w], vec![y], &save)?.one(),
        }
    }
}
