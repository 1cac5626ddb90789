//! Functions of each element, sums, and moves.
use crate::{
    Result,
    autograd::{Cx, Mask, Op, Saved, Sink, Var},
    tensor::{
        Tensor,
        backend::{Binary, Unary},
    },
};

struct UnaryOp(Unary);

impl Op for UnaryOp {
    fn name(&self) -> &'static str {
        "unary"
    }
    fn backward(&self, saved: &mut Saved, dy: &[Option<Tensor>], _: Mask, dx: &mut Sink) -> Result<()> {
        let Some(dy) = &dy[0] else { return Ok(()) };
        dx.put(0, dy.unary_grad(self.0, saved.get(0)?)?)
    }
}

struct BinaryOp(Binary, [Vec<usize>; 2]);

impl Op for BinaryOp {
    fn name(&self) -> &'static str {
        "binary"
    }
    fn backward(&self, saved: &mut Saved, dy: &[Option<Tensor>], wrt: Mask, dx: &mut Sink) -> Result<()> {
        let Some(dy) = &dy[0] else { return Ok(()) };
        let BinaryOp(op, [sa, sb]) = self;
        if wrt.has(0) {
            let g = match op {
                Binary::Add | Binary::Sub => dy.clone(),
                Binary::Mul => dy.mul(saved.get(1)?)?,
                Binary::Div => dy.div(saved.get(1)?)?,
                Binary::Max => dy.mul(&larger(saved.get(0)?, saved.get(1)?)?)?,
            };
            dx.put(0, g.sum_to(sa)?)?;
        }
        if wrt.has(1) {
            let g = match op {
                Binary::Add => dy.clone(),
                Binary::Sub => dy.unary(Unary::Neg)?,
                Binary::Mul => dy.mul(saved.get(0)?)?,
                Binary::Div => {
                    let (a, b) = (saved.get(0)?, saved.get(1)?);
                    dy.mul(&a.div(&b.mul(b)?)?)?.unary(Unary::Neg)?
                }
                Binary::Max => {
                    let a = larger(saved.get(0)?, saved.get(1)?)?;
                    dy.mul(&a.affine(-1.0, 1.0)?)?
                }
            };
            dx.put(1, g.sum_to(sb)?)?;
        }
        Ok(())
    }
}

/// 1 where a > b, else 0: whose element was the maximum.
fn larger(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let d = a.sub(b)?;
    let ones = Tensor::full(1.0, d.shape(), d.dtype(), d.device())?;
    ones.unary_grad(Unary::Relu, &d)
}

struct Sum(Vec<usize>);

impl Op for Sum {
    fn name(&self) -> &'static str {
        "sum"
    }
    fn backward(&self, _: &mut Saved, dy: &[Option<Tensor>], _: Mask, dx: &mut Sink) -> Result<()> {
        let Some(dy) = &dy[0] else { return Ok(()) };
        dx.put(0, dy.broadcast_to(&self.0)?.contiguous()?)
    }
}

impl Cx<'_> {
    /// `op` of every element.
    pub fn unary(&mut self, op: Unary, x: &Var) -> Result<Var> {
        let y = x.value().unary(op)?;
        let saved = if op.saves_result() { y.clone() } else { x.value().clone() };
        self.record(UnaryOp(op), &[x], vec![y], &[(&saved, Mask::only(0))])?.one()
    }

    /// `op(a, b)`, broadcast.
    pub fn binary(&mut self, op: Binary, a: &Var, b: &Var) -> Result<Var> {
        let y = a.value().binary(op, b.value())?;
        let (need_a, need_b) = match op {
            Binary::Add | Binary::Sub => (Mask::NONE, Mask::NONE),
            Binary::Mul => (Mask::only(1), Mask::only(0)),
            Binary::Div => (Mask::only(1), Mask::ALL),
            Binary::Max => (Mask::ALL, Mask::ALL),
        };
        let op = BinaryOp(op, [a.shape().to_vec(), b.shape().to_vec()]);
        self.record(op, &[a, b], vec![y], &[(a.value(), need_a), (b.value(), need_b)])?.one()
    }

    /// `a + b`, broadcast.
    pub fn add(&mut self, a: &Var, b: &Var) -> Result<Var> {
        self.binary(Binary::Add, a, b)
    }

    /// `a·b`, elementwise and broadcast.
    pub fn mul(&mut self, a: &Var, b: &Var) -> Result<Var> {
        self.binary(Binary::Mul, a, b)
    }

    /// max(x, 0).
    pub fn relu(&mut self, x: &Var) -> Result<Var> {
        self.unary(Unary::Relu, x)
    }

    /// The sum of all elements, as a scalar of shape [].
    pub fn sum(&mut self, x: &Var) -> Result<Var> {
        let y = x.value().sum()?;
        self.record(Sum(x.shape().to_vec()), &[x], vec![y], &[])?.one()
    }
}
