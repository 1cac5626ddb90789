//! Softmax of rows, its gradient, and the cross-entropy loss that includes it.
use super::{
    Cpu,
    elementwise::GRAIN,
    isa::VectorJob,
    lanes::{Lanes, Vectors},
    math,
};
use crate::{
    Result,
    tensor::{
        View, ViewMut,
        backend::CrossEntropy,
        reference::{class, ids},
    },
};

/// Exponentials cost about this many plain operations.
const COST: usize = 8;

pub(crate) fn softmax(cpu: &Cpu, x: View, mut y: ViewMut) -> Result<()> {
    let d = x.layout.shape().last().copied().unwrap_or(1).max(1);
    let (x, y) = (x.slice::<f32>()?, y.slice::<f32>()?);
    let piece = cpu.threads.piece(y.len(), d, GRAIN / COST);
    cpu.threads.over(x.chunks(piece).zip(y.chunks_mut(piece)), |(x, y)| {
        for (x, y) in x.chunks(d).zip(y.chunks_mut(d)) {
            cpu.simd.vectors(Softmax { x, y });
        }
    });
    Ok(())
}

/// Writes the softmax of x; gives the largest x that is a number and the sum of e^(x − largest).
struct Softmax<'a> {
    x: &'a [f32],
    y: &'a mut [f32],
}

impl VectorJob for Softmax<'_> {
    type Out = (f32, f64);
    #[inline(always)]
    fn run<L: Lanes>(self, v: Vectors<L>) -> (f32, f64) {
        let Softmax { x, y } = self;
        y.copy_from_slice(x);
        math::softmax(v, y, 1.0)
    }
}

pub(crate) fn softmax_grad(cpu: &Cpu, y: View, dy: View, mut dx: ViewMut) -> Result<()> {
    let d = y.layout.shape().last().copied().unwrap_or(1).max(1);
    let (y, dy, dx) = (y.slice::<f32>()?, dy.slice::<f32>()?, dx.slice::<f32>()?);
    let piece = cpu.threads.piece(dx.len(), d, GRAIN);
    cpu.threads.over(y.chunks(piece).zip(dy.chunks(piece)).zip(dx.chunks_mut(piece)), |((y, dy), dx)| {
        for ((y, dy), dx) in y.chunks(d).zip(dy.chunks(d)).zip(dx.chunks_mut(d)) {
            cpu.simd.vectors(SoftmaxGrad { y, dy, dx });
        }
    });
    Ok(())
}

struct SoftmaxGrad<'a> {
    y: &'a [f32],
    dy: &'a [f32],
    dx: &'a mut [f32],
}

impl VectorJob for SoftmaxGrad<'_> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self, v: Vectors<L>) {
        let SoftmaxGrad { y, dy, dx } = self;
        let (n, dot) = (dx.len(), v.splat(math::dot(v, y, dy)));
        for at in (0..n).step_by(L::N) {
            let slope = v.sub(v.load_first(dy, at, n - at), dot);
            v.store_first(v.mul(v.load_first(y, at, n - at), slope), dx, at, n - at);
        }
    }
}

/// The loss and whether the answer was right, of each row; added in order of the rows.
pub(crate) fn cross_entropy(
    cpu: &Cpu,
    c: CrossEntropy,
    logits: View,
    classes: View,
    [mut loss, mut correct]: [ViewMut; 2],
    mut prob: ViewMut,
) -> Result<()> {
    let (classes, x, prob) = (ids(classes)?, logits.slice::<f32>()?, prob.slice::<f32>()?);
    let mut rows = vec![(0.0f64, false); c.m];
    let (d, piece) = (c.v.max(1), cpu.threads.piece(c.m, 1, GRAIN / COST / c.v.max(1)));
    let pieces = x.chunks(piece * d).zip(prob.chunks_mut(piece * d)).zip(rows.chunks_mut(piece)).enumerate();
    cpu.threads.try_over(pieces, |(i, ((x, prob), rows))| {
        for (r, ((x, prob), row)) in x.chunks(d).zip(prob.chunks_mut(d)).zip(rows).enumerate() {
            let (max, sum) = cpu.simd.vectors(Softmax { x, y: prob });
            let Some(k) = class(c, &classes, i * piece + r)? else { continue };
            let log_sum = f64::from(max) + sum.ln();
            let mut loss = (1.0 - c.smoothing) * (log_sum - f64::from(x[k]));
            if c.smoothing > 0.0 {
                let mean = x.iter().map(|&v| f64::from(v)).sum::<f64>() / c.v as f64;
                loss += c.smoothing * (log_sum - mean);
            }
            // Infinities alone make the sum a NaN too, but one of them is the largest.
            let numbers = !sum.is_nan() || !x.iter().any(|v| v.is_nan());
            *row = (loss, numbers && x.iter().position(|&v| v == max) == Some(k));
        }
        Ok(())
    })?;
    if c.v == 0 {
        // There were no rows to look at; every class that counts is outside.
        (0..c.m).try_for_each(|r| class(c, &classes, r).map(drop))?;
    }
    loss.slice::<f32>()?[0] = rows.iter().fold(0.0, |sum, r| sum + r.0) as f32;
    correct.slice::<f32>()?[0] = rows.iter().filter(|r| r.1).count() as f32;
    Ok(())
}

pub(crate) fn cross_entropy_grad(
    cpu: &Cpu,
    c: CrossEntropy,
    prob: View,
    classes: View,
    dy: View,
    mut dx: ViewMut,
) -> Result<()> {
    let (classes, prob, dy, dx) = (ids(classes)?, prob.slice::<f32>()?, dy.slice::<f32>()?[0], dx.slice::<f32>()?);
    let d = c.v.max(1);
    let piece = cpu.threads.piece(c.m, 1, GRAIN / d);
    let (uniform, own) = ((c.smoothing / d as f64) as f32, 1.0 - c.smoothing as f32);
    let pieces = prob.chunks(piece * d).zip(dx.chunks_mut(piece * d)).zip(classes.chunks(piece));
    cpu.threads.over(pieces, |((prob, dx), classes)| {
        for ((prob, dx), &k) in prob.chunks(d).zip(dx.chunks_mut(d)).zip(classes) {
            if c.ignore == Some(k) {
                dx.fill(0.0);
                continue;
            }
            dx.iter_mut().zip(prob).for_each(|(dx, p)| *dx = dy * (p - uniform));
            let right = usize::try_from(k).ok().filter(|&k| k < dx.len());
            right.into_iter().for_each(|k| dx[k] = dy * (prob[k] - (uniform + own)));
        }
    });
    Ok(())
}
