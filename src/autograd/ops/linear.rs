//! Matrix products. Letters: n rows, i inputs, o outputs.
use crate::{
    Result,
    autograd::{Cx, Mask, Op, Saved, Sink, Var},
    tensor::{Tensor, backend::Reduce},
};

struct Linear;
const X: usize = 0;
const W: usize = 1;
const B: usize = 2;

impl Op for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn backward(&self, saved: &mut Saved, dy: &[Option<Tensor>], wrt: Mask, dx: &mut Sink) -> Result<()> {
        let Some(dy) = &dy[0] else { return Ok(()) };
        let rows = |t: &Tensor| t.reshape(&[usize::MAX, t.shape()[t.rank() - 1]]);
        let dy2 = rows(dy)?;
        if wrt.has(X) {
            let w = saved.get(1)?;
            let mut shape = dy.shape().to_vec();
            shape[dy.rank() - 1] = w.shape()[1];
            dx.put(X, dy2.gemm(false, w, false, None)?.reshape(&shape)?)?; // dx[n,i] = dy[n,o] w[o,i]
        }
        if wrt.has(W) {
            dx.put(W, dy2.gemm(true, &rows(saved.get(0)?)?, false, None)?)?; // dw[o,i] = dy[n,o]ᵀ x[n,i]
        }
        if wrt.has(B) {
            dx.put(B, dy2.reduce(Reduce::Sum, 0)?)?;
        }
        Ok(())
    }
}

/// Saved: a, b.
struct MatMul;

impl Op for MatMul {
    fn name(&self) -> &'static str {
        "matmul"
    }

    fn backward(&self, saved: &mut Saved, dy: &[Option<Tensor>], wrt: Mask, dx: &mut Sink) -> Result<()> {
        let Some(dy) = &dy[0] else { return Ok(()) };
        if wrt.has(0) {
            dx.put(0, dy.gemm(false, saved.get(1)?, true, None)?)?; // da[…,m,k] = dy[…,m,n] b[…,k,n]ᵀ
        }
        if wrt.has(1) {
            dx.put(1, saved.get(0)?.gemm(true, dy, false, None)?)?; // db[…,k,n] = a[…,m,k]ᵀ dy[…,m,n]
        }
        Ok(())
    }
}

impl Cx<'_> {
    /// The matrix product of `a[m,k]` and `b[k,n]`, or of two stacks `a[…,m,k]` and `b[…,k,n]` with equal leading axes.
    pub fn matmul(&mut self, a: &Var, b: &Var) -> Result<Var> {
        let y = a.value().matmul(b.value())?;
        let save = [(a.value(), Mask::only(1)), (b.value(), Mask::only(0))];
        self.record(MatMul, &[a, b], vec![y], &save)?.one()
    }

    /// `y[…,o] = x[…,i] · w[o,i]ᵀ (+ b[o])`.
    pub fn linear(&mut self, x: &Var, w: &Var, b: Option<&Var>) -> Result<Var> {
        let (n, i) = (x.value().rank(), x.shape().last().copied().unwrap_or(0));
        if n == 0 || w.value().rank() != 2 || w.shape()[1] != i {
            return Err(crate::Error::shape(format!(
                "linear: x{:?} with w{:?} (x[…,i], w[o,i] expected)",
                x.shape(),
                w.shape()
            )));
        }
        let rows = x.value().reshape(&[x.shape()[..n - 1].iter().product(), i])?;
        let mut shape = x.shape().to_vec();
        shape[n - 1] = w.shape()[0];
        let y = rows.gemm(false, w.value(), true, b.map(Var::value))?.reshape(&shape)?;
        let save = [(x.value(), Mask::only(W)), (w.value(), Mask::only(X))];
        match b {
            Some(b) => self.record(Linear, &[x, w, b], vec![y], &save)?.one(),
            None => self.record(Linear, &[x, w], vec![y], &save)?.one(),
        }
    }
}
