//! Losses.
use crate::{
    Error, Result,
    autograd::{Cx, Mask, Op, Outputs, Saved, Sink, Var},
    tensor::{
        Tensor,
        backend::{CrossEntropy, Unary},
    },
};

/// Saved: prob[m,v], classes[m].
struct CrossEntropyOp(CrossEntropy, Vec<usize>);

impl Op for CrossEntropyOp {
    fn name(&self) -> &'static str {
        "cross_entropy"
    }
    fn backward(&self, saved: &mut Saved, dy: &[Option<Tensor>], _: Mask, dx: &mut Sink) -> Result<()> {
        let Some(dy) = &dy[0] else { return Ok(()) };
        dx.put(0, dy.cross_entropy_grad(self.0, saved.get(0)?, saved.get(1)?)?.reshape(&self.1)?)
    }
}

/// Saved: x − target.
struct SquaredError;

impl Op for SquaredError {
    fn name(&self) -> &'static str {
        "squared_error"
    }
    fn backward(&self, saved: &mut Saved, dy: &[Option<Tensor>], wrt: Mask, dx: &mut Sink) -> Result<()> {
        let Some(dy) = &dy[0] else { return Ok(()) };
        let g = saved.get(0)?.affine(2.0, 0.0)?.mul(dy)?;
        if wrt.has(1) {
            dx.put(1, g.unary(Unary::Neg)?)?;
        }
        if wrt.has(0) {
            dx.put(0, g)?;
        }
        Ok(())
    }
}

impl Cx<'_> {
    /// Of logits[…,v] and classes[…]: the loss summed over the rows, and how many rows were right; both of shape [].
    pub fn cross_entropy(
        &mut self,
        smoothing: f64,
        ignore: Option<i64>,
        logits: &Var,
        classes: &Var,
    ) -> Result<Outputs> {
        let (shape, v) = (logits.shape(), logits.shape().last().copied().unwrap_or(0));
        if shape.len() < 2 || classes.shape() != &shape[..shape.len() - 1] || v == 0 {
            let got = classes.shape();
            return Err(Error::shape(format!(
                "cross_entropy: logits{shape:?} with classes{got:?} (logits[…,v], classes[…] expected)"
            )));
        }
        let m = classes.value().len();
        let c = CrossEntropy { m, v, smoothing, ignore };
        let classes = classes.value().reshape(&[m])?;
        let (loss, correct, prob) = logits.value().reshape(&[m, v])?.cross_entropy(c, &classes)?;
        let save = [(&prob, Mask::only(0)), (&classes, Mask::only(0))];
        let loss = self.record(CrossEntropyOp(c, shape.to_vec()), &[logits], vec![loss], &save)?.one()?;
        let correct = self.constant(correct);
        Ok(vec![loss, correct].into())
    }

    /// The sum of (x − target)², of shape [].
    pub fn squared_error(&mut self, x: &Var, target: &Var) -> Result<Var> {
        if x.shape() != target.shape() {
            return Err(Error::shape(format!("squared_error: x{:?} with target{:?}", x.shape(), target.shape())));
        }
        let d = x.value().sub(target.value())?;
        let y = d.mul(&d)?.sum()?;
        self.record(SquaredError, &[x, target], vec![y], &[(&d, Mask::ALL)])?.one()
    }
}
