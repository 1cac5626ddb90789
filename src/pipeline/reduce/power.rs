//! PowerSGD (Vogels, Karimireddy and Jaggi 2019): sums of gradients as matrices of low rank, with error feedback.
//!
//! Of worker w's gradient G as a matrix, and what it could not send before, E: M = G + E. With the sum over workers in every product,
//! P = M·Q, made orthonormal; then Q = Mᵀ·P, and P·Qᵀ is the gradient. What it leaves of a worker's own M, M − P·(Mᵀ·P)ᵀ, is its E for
//! the next update. One power iteration an update: Q is where the next one starts.
use super::{Exchange, Share, options::factors, sums::Sums};
use crate::{
    Error, Result,
    autograd::Grads,
    pipeline::{schedule::MicroBatch, transport::Transport, weights::Slot},
    tensor::{DType, Device, Philox, Tensor},
};
use std::collections::BTreeMap;

/// A column of a factor that is shorter than this is drawn anew: nothing would ever come of it again.
const VANISHED: f64 = 1e-30;

/// A parameter that is sent as two factors.
struct Matrix {
    shape: Vec<usize>,
    rows: usize,
    columns: usize,
    /// Q: \[columns, rank\].
    basis: Tensor,
    /// E: \[rows, columns\]; none is zero.
    error: Option<Tensor>,
    /// M and this worker's M·Q, of the update under way.
    under_way: Option<(Tensor, Tensor)>,
}

/// One worker's side of the sums of a stage.
pub(super) struct PowerSgd {
    /// Sums of P, and of gradients that are sent whole.
    first: Sums,
    /// Sums of Q.
    second: Sums,
    /// By slot.
    matrices: BTreeMap<usize, Matrix>,
    seed: u64,
    stage: usize,
    dtype: DType,
    device: Device,
    /// Updates made so far.
    updates: u64,
    /// Of the update under way: this worker's first micro-batch and its samples, if it has any, and the shares of all workers.
    shares: (Option<(MicroBatch, usize)>, Vec<usize>),
}

/// The slots of `slots` as the two sums see them: the first with P in place of what is factored, the second with Q alone.
pub(super) fn slots_of_factors(slots: &[Slot], rank: usize) -> [Vec<Slot>; 2] {
    let mut all = [Vec::new(), Vec::new()];
    for Slot { slot, shape } in slots.iter().cloned() {
        match factors(&shape, rank) {
            Some([rows, columns, rank]) => {
                all[0].push(Slot { slot, shape: vec![rows, rank] });
                all[1].push(Slot { slot, shape: vec![columns, rank] });
            }
            None => all[0].push(Slot { slot, shape }),
        }
    }
    all
}

impl PowerSgd {
    /// Of the gradients of `slots` with two sums over [their factors](slots_of_factors), which `seed` and `stage` make begin alike on all
    /// workers.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn new(
        [first, second]: [Sums; 2],
        slots: &[Slot],
        rank: usize,
        (seed, stage): (u64, usize),
        (dtype, device): (DType, &Device),
    ) -> Result<PowerSgd> {
        let mut matrices = BTreeMap::new();
        for Slot { slot, shape } in slots {
            if let Some([rows, columns, rank]) = factors(shape, rank) {
                let draw = draw(seed, stage, *slot, 0);
                let all = (0..rank).flat_map(|c| draw.normal(c as u64, columns).collect::<Vec<_>>());
                let basis = device.from_f64(all, &[rank, columns], dtype)?.transpose()?.contiguous()?;
                let (shape, error, under_way) = (shape.clone(), None, None);
                matrices.insert(*slot, Matrix { shape, rows, columns, basis, error, under_way });
            }
        }
        let (device, shares) = (device.clone(), (None, Vec::new()));
        Ok(PowerSgd { first, second, matrices, seed, stage, dtype, device, updates: 0, shares })
    }
}

/// What the columns of a slot's Q are drawn from.
fn draw(seed: u64, stage: usize, slot: usize, update: u64) -> Philox {
    Philox::new(seed, update, &format!("powersgd {stage} {slot}"))
}

impl Matrix {
    /// M·Q of a gradient, which is kept with M until the sum is made.
    fn project(&mut self, grad: Tensor) -> Result<Tensor> {
        if let Some((_, p)) = &self.under_way {
            return Ok(p.clone());
        }
        let grad = grad.contiguous()?.reshape(&[self.rows, self.columns])?;
        let m = match self.error.take() {
            Some(mut m) => {
                m.accumulate(&grad)?;
                m
            }
            None => grad,
        };
        let p = m.matmul(&self.basis)?;
        self.under_way = Some((m, p.clone()));
        Ok(p)
    }
}

/// The columns of `p` made orthonormal one after the other, in f64; one that depends on those before it becomes zero.
fn orthonormal(p: &Tensor) -> Result<Tensor> {
    let (rows, rank) = (p.shape()[0], p.shape()[1]);
    let mut a = p.to_f64()?;
    let dot = |a: &[f64], x: usize, y: usize| (0..rows).map(|r| a[r * rank + x] * a[r * rank + y]).sum::<f64>();
    for c in 0..rank {
        let before = dot(&a, c, c).sqrt();
        // Twice, so that rounding leaves nothing of the others.
        for _ in 0..2 {
            for other in 0..c {
                let along = dot(&a, other, c);
                (0..rows).for_each(|r| a[r * rank + c] -= along * a[r * rank + other]);
            }
        }
        let norm = dot(&a, c, c).sqrt();
        let scale = if norm > VANISHED && norm > 1e-7 * before { 1.0 / norm } else { 0.0 };
        (0..rows).for_each(|r| a[r * rank + c] *= scale);
    }
    p.device().from_f64(a.into_iter(), p.shape(), p.dtype())
}

impl Exchange for PowerSgd {
    fn reserve(&self, _: usize) {
        self.first.reserve(1);
        self.second.reserve(1);
        let pool = self.device.pool();
        for m in self.matrices.values() {
            // M, what is left of it, and the gradient.
            pool.reserve(m.rows * m.columns * self.dtype.size(), 3);
        }
    }

    fn offer(
        &mut self,
        transport: &mut dyn Transport,
        part: (MicroBatch, usize),
        slot: usize,
        grad: &Tensor,
    ) -> Result<()> {
        match self.matrices.get_mut(&slot) {
            Some(matrix) => {
                let p = matrix.project(grad.clone())?;
                self.first.offer(transport, part, slot, &p)
            }
            None => self.first.offer(transport, part, slot, grad),
        }
    }

    fn begin(&mut self, transport: &mut dyn Transport, shares: Vec<Share>, counts: &[usize]) -> Result<()> {
        let mut mine: Option<Share> = None;
        for share in shares {
            match &mut mine {
                Some(mine) => {
                    mine.samples += share.samples;
                    mine.grads.fold(share.grads)?;
                }
                None => mine = Some(share),
            }
        }
        self.shares = (mine.as_ref().map(|s| (s.mb, s.samples)), counts.iter().map(|&n| n.min(1)).collect());
        if let Some(mine) = &mut mine {
            for (&slot, matrix) in &mut self.matrices {
                if let Some(grad) = mine.grads.take(slot) {
                    mine.grads.add(slot, matrix.project(grad)?)?;
                }
            }
        }
        self.first.begin(transport, mine.into_iter().collect(), &self.shares.1)
    }

    fn finish(&mut self, transport: &mut dyn Transport, present: &[bool]) -> Result<Grads> {
        let mut sum = self.first.finish(transport, present)?;
        let (mut directions, mut grads) = (BTreeMap::new(), Grads::default());
        for (&slot, matrix) in &self.matrices {
            let Some(p) = sum.take(slot) else { continue };
            let p = orthonormal(&p)?;
            if let Some((m, _)) = &matrix.under_way {
                grads.add(slot, m.gemm(true, &p, false, None)?)?;
            }
            directions.insert(slot, p);
        }
        let own = grads.clone();
        let (mine, counts) = std::mem::take(&mut self.shares);
        let share = mine.map(|(mb, samples)| Share { mb, samples, grads });
        self.second.begin(transport, share.into_iter().collect(), &counts)?;
        let mut factors = self.second.finish(transport, present)?;
        self.updates += 1;
        for (slot, p) in directions {
            let matrix = self.matrices.get_mut(&slot).ok_or_else(|| Error::schedule("a sum of no parameter"))?;
            let q = factors.take(slot).ok_or_else(|| Error::schedule("a factor without its other"))?;
            sum.add(slot, p.gemm(false, &q, true, None)?.reshape(&matrix.shape)?)?;
            if let Some(((mut m, _), q)) = matrix.under_way.take().zip(own.get(slot)) {
                m.axpy(-1.0, &p.gemm(false, q, true, None)?)?;
                matrix.error = Some(m);
            }
            matrix.basis = alive(q, &draw(self.seed, self.stage, slot, self.updates))?;
        }
        Ok(sum)
    }
}

/// Q with columns drawn anew where they have vanished.
fn alive(q: Tensor, draw: &Philox) -> Result<Tensor> {
    let (columns, rank) = (q.shape()[0], q.shape()[1]);
    let mut values = q.to_f64()?;
    let mut is_drawn = false;
    for c in 0..rank {
        let norm = (0..columns).map(|r| values[r * rank + c].powi(2)).sum::<f64>().sqrt();
        if norm <= VANISHED {
            is_drawn = true;
            draw.normal(c as u64, columns).enumerate().for_each(|(r, v)| values[r * rank + c] = v);
        }
    }
    if is_drawn { q.device().from_f64(values.into_iter(), q.shape(), q.dtype()) } else { Ok(q) }
}
