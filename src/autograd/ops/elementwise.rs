//! Functions of each element, of one value or of two that are broadcast.
use crate::{
    Result,
    autograd::{Cx, Mask, Op, Saved, Sink, Var},
    tensor::{
        Tensor,
        backend::{Binary, Unary},
    },
};

/// Saved: x or y, as [`Unary::saves_result`] says; nothing where the slope is constant.
struct UnaryOp(Unary);

impl Op for UnaryOp {
    fn name(&self) -> &'static str {
        match self.0 {
            Unary::Neg => "neg",
            Unary::Exp => "exp",
            Unary::Log => "log",
            Unary::Sqrt => "sqrt",
            Unary::Recip => "recip",
            Unary::Square => "square",
            Unary::Abs => "abs",
            Unary::Relu => "relu",
            Unary::Gelu => "gelu",
            Unary::Tanh => "tanh",
            Unary::Sigmoid => "sigmoid",
            Unary::Affine { .. } => "affine",
        }
    }
    fn backward(&self, saved: &mut Saved, dy: &[Option<Tensor>], _: Mask, dx: &mut Sink) -> Result<()> {
        let Some(dy) = &dy[0] else { return Ok(()) };
        let g = match slope(self.0) {
            Some(slope) => dy.affine(slope, 0.0)?,
            None => dy.unary_grad(self.0, saved.get(0)?)?,
        };
        dx.put(0, g)
    }
}

/// The derivative, where it is the same everywhere.
fn slope(op: Unary) -> Option<f64> {
    match op {
        Unary::Neg => Some(-1.0),
        Unary::Affine { scale, .. } => Some(scale),
        _ => None,
    }
}

/// The function, and the shapes of both operands. Saved: a, b.
struct BinaryOp(Binary, [Vec<usize>; 2]);

impl Op for BinaryOp {
    fn name(&self) -> &'static str {
        match self.0 {
            Binary::Add => "add",
            Binary::Sub => "sub",
            Binary::Mul => "mul",
            Binary::Div => "div",
            Binary::Max => "maximum",
        }
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

impl Cx<'_> {
    /// `op` of every element.
    pub fn unary(&mut self, op: Unary, x: &Var) -> Result<Var> {
        let y = x.value().unary(op)?;
        let saved = if op.saves_result() { y.clone() } else { x.value().clone() };
        let need = if slope(op).is_some() { Mask::NONE } else { Mask::only(0) };
        self.record(UnaryOp(op), &[x], vec![y], &[(&saved, need)])?.one()
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

    /// `a − b`, broadcast.
    pub fn sub(&mut self, a: &Var, b: &Var) -> Result<Var> {
        self.binary(Binary::Sub, a, b)
    }

    /// `a·b`, elementwise and broadcast.
    pub fn mul(&mut self, a: &Var, b: &Var) -> Result<Var> {
        self.binary(Binary::Mul, a, b)
    }

    /// `a/b`, elementwise and broadcast.
    pub fn div(&mut self, a: &Var, b: &Var) -> Result<Var> {
        self.binary(Binary::Div, a, b)
    }

    /// max(a, b), elementwise and broadcast; where they are equal, b gets the gradient.
    pub fn maximum(&mut self, a: &Var, b: &Var) -> Result<Var> {
        self.binary(Binary::Max, a, b)
    }

    /// `scale·x + shift`.
    pub fn affine(&mut self, x: &Var, scale: f64, shift: f64) -> Result<Var> {
        self.unary(Unary::Affine { scale, shift }, x)
    }

    /// `scale·x`.
    pub fn scale(&mut self, x: &Var, scale: f64) -> Result<Var> {
        self.affine(x, scale, 0.0)
    }

    /// −x.
    pub fn neg(&mut self, x: &Var) -> Result<Var> {
        self.unary(Unary::Neg, x)
    }

    /// eˣ.
    pub fn exp(&mut self, x: &Var) -> Result<Var> {
        self.unary(Unary::Exp, x)
    }

    /// ln x.
    pub fn log(&mut self, x: &Var) -> Result<Var> {
        self.unary(Unary::Log, x)
    }

    /// √x.
    pub fn sqrt(&mut self, x: &Var) -> Result<Var> {
        self.unary(Unary::Sqrt, x)
    }

    /// 1/x.
    pub fn recip(&mut self, x: &Var) -> Result<Var> {
        self.unary(Unary::Recip, x)
    }

    /// x².
    pub fn square(&mut self, x: &Var) -> Result<Var> {
        self.unary(Unary::Square, x)
    }

    /// |x|.
    pub fn abs(&mut self, x: &Var) -> Result<Var> {
        self.unary(Unary::Abs, x)
    }

    /// max(x, 0).
    pub fn relu(&mut self, x: &Var) -> Result<Var> {
        self.unary(Unary::Relu, x)
    }

    /// x·Φ(x), with the exact error function.
    pub fn gelu(&mut self, x: &Var) -> Result<Var> {
        self.unary(Unary::Gelu, x)
    }

    /// tanh x.
    pub fn tanh(&mut self, x: &Var) -> Result<Var> {
        self.unary(Unary::Tanh, x)
    }

    /// 1/(1 + e⁻ˣ).
    pub fn sigmoid(&mut self, x: &Var) -> Result<Var> {
        self.unary(Unary::Sigmoid, x)
    }
}
