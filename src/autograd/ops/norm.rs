//! Normalisation.
use crate::{
    Result,
    autograd::{Cx, Mask, Op, Saved, Sink, Var},
    tensor::Tensor,
};

const X: usize = 0;
const GAMMA: usize = 1;
const BETA: usize = 2;

/// Saved: x, mean, var, gamma. The sums that W hands out are what I needs too: I keeps them for W, which then needs nothing else.
struct BatchNorm {
    eps: f64,
}

impl Op for BatchNorm {
    fn name(&self) -> &'static str {
        "batch_norm"
    }

    fn backward(&self, saved: &mut Saved, dy: &[Option<Tensor>], wrt: Mask, dx: &mut Sink) -> Result<()> {
        let Some(dy) = &dy[0] else { return Ok(()) };
        let (dgamma, dbeta) = match (saved.kept(0), saved.kept(1)) {
            (Some(g), Some(b)) => (g.clone(), b.clone()),
            _ => dy.batch_norm_weight_grad(self.eps, saved.get(0)?, [saved.get(1)?, saved.get(2)?])?,
        };
        if wrt.has(X) {
            let (stats, sums) = ([saved.get(1)?, saved.get(2)?], [&dgamma, &dbeta]);
            dx.put(X, dy.batch_norm_input_grad(self.eps, saved.get(0)?, stats, saved.get(3)?, sums)?)?;
        }
        if wrt.has(GAMMA) {
            dx.put(GAMMA, dgamma.clone())?;
        }
        if wrt.has(BETA) {
            dx.put(BETA, dbeta.clone())?;
        }
        saved.keep(0, dgamma);
        saved.keep(1, dbeta);
        Ok(())
    }
}

/// With given statistics, as in evaluation: y = (x − mean)/√(var + eps)·gamma + beta. Saved: x, mean, var, gamma.
struct FixedNorm {
    eps: f64,
}

impl Op for FixedNorm {
    fn name(&self) -> &'static str {
        "fixed_norm"
    }

    fn backward(&self, saved: &mut Saved, dy: &[Option<Tensor>], wrt: Mask, dx: &mut Sink) -> Result<()> {
        let Some(dy) = &dy[0] else { return Ok(()) };
        if wrt.has(X) {
            // (dy − 0)/√(var + eps)·gamma + 0
            let mean = saved.get(1)?;
            let zero = Tensor::zeros(mean.shape(), mean.dtype(), mean.device())?;
            dx.put(X, dy.batch_norm(self.eps, [&zero, saved.get(2)?], saved.get(3)?, &zero)?)?;
        }
        if wrt.has(GAMMA) || wrt.has(BETA) {
            let (dgamma, dbeta) = dy.batch_norm_weight_grad(self.eps, saved.get(0)?, [saved.get(1)?, saved.get(2)?])?;
            if wrt.has(GAMMA) {
                dx.put(GAMMA, dgamma)?;
            }
            if wrt.has(BETA) {
                dx.put(BETA, dbeta)?;
            }
        }
        Ok(())
    }
}

/// Saved: x, mean, rstd, gamma.
struct LayerNorm;

impl Op for LayerNorm {
    fn name(&self) -> &'static str {
        "layer_norm"
    }

    fn backward(&self, saved: &mut Saved, dy: &[Option<Tensor>], wrt: Mask, dx: &mut Sink) -> Result<()> {
        let Some(dy) = &dy[0] else { return Ok(()) };
        let stats = [saved.get(1)?, saved.get(2)?];
        if wrt.has(X) {
            dx.put(X, dy.layer_norm_input_grad(saved.get(0)?, stats, saved.get(3)?)?)?;
        }
        if wrt.has(GAMMA) || wrt.has(BETA) {
            let (dgamma, dbeta) = dy.layer_norm_weight_grad(saved.get(0)?, stats)?;
            if wrt.has(GAMMA) {
                dx.put(GAMMA, dgamma)?;
            }
            if wrt.has(BETA) {
                dx.put(BETA, dbeta)?;
            }
        }
        Ok(())
    }
}

impl Cx<'_> {
    /// Each channel of x[…,c] normalised over all other axes; also returns the batch's mean and variance (divided by the
    /// count).
    pub fn batch_norm(&mut self, eps: f64, x: &Var, gamma: &Var, beta: &Var) -> Result<(Var, Tensor, Tensor)> {
        let (mean, var) = x.value().batch_stats()?;
        let y = x.value().batch_norm(eps, [&mean, &var], gamma.value(), beta.value())?;
        let first = if x.needs_grad() { Mask::only(X) } else { Mask::ALL };
        let save = [(x.value(), first), (&mean, first), (&var, first), (gamma.value(), Mask::only(X))];
        let y = self.record(BatchNorm { eps }, &[x, gamma, beta], vec![y], &save)?.one()?;
        Ok((y, mean, var))
    }

    /// Each channel of x[…,c] normalised with the given statistics.
    pub fn fixed_norm(&mut self, eps: f64, x: &Var, stats: [&Tensor; 2], gamma: &Var, beta: &Var) -> Result<Var> {
        let y = x.value().batch_norm(eps, stats, gamma.value(), beta.value())?;
        let (weights, input) = (Mask::only(GAMMA).or(Mask::only(BETA)), Mask::only(X));
        let save = [(x.value(), weights), (stats[0], Mask::ALL), (stats[1], Mask::ALL), (gamma.value(), input)];
        self.record(FixedNorm { eps }, &[x, gamma, beta], vec![y], &save)?.one()
    }

    /// Each row of x[…,d] normalised.
    pub fn layer_norm(&mut self, eps: f64, x: &Var, gamma: &Var, beta: &Var) -> Result<Var> {
        let (y, mean, rstd) = x.value().layer_norm(eps, gamma.value(), beta.value())?;
        let save = [(x.value(), Mask::ALL), (&mean, Mask::ALL), (&rstd, Mask::ALL), (gamma.value(), Mask::only(X))];
        self.record(LayerNorm, &[x, gamma, beta], vec![y], &save)?.one()
    }
}
