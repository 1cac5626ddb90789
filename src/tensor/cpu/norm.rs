//! Normalisation over the batch and over the features of each row.
//!
//! A mean is taken twice, the second time of what the numbers differ by from the first one: its rounding, and that of the variance,
//! are relative to the spread of the numbers. Where f32 has no such sums (numbers that overflow when squared, infinities) the
//! reference's f64 has.
//!
//! Letters: m rows, c channels, d features; x̂ the normalised x.
use super::{
    Cpu,
    columns::{self, Piece, Plain, Terms},
    elementwise::GRAIN,
    isa::{Job, VectorJob},
    lanes::{Lanes, Vectors},
    math,
};
use crate::{
    Result,
    tensor::{View, ViewMut, reference},
};
use std::slice::from_mut;

/// Σ (x − centre) and Σ (x − centre)², per column.
struct Distances<'a> {
    x: &'a [f32],
    centre: &'a [f32],
}

impl Terms<2> for Distances<'_> {
    #[inline(always)]
    fn add<const W: usize>(&self, r: usize, p: Piece, [sum, squares]: &mut [[f32; W]; 2]) {
        let (x, centre) = (p.of(self.x, r, self.centre.len()), p.of(self.centre, 0, 0));
        for (((sum, squares), x), centre) in sum.iter_mut().zip(squares).zip(x).zip(centre) {
            *sum += x - centre;
            *squares += (x - centre) * (x - centre);
        }
    }
}

/// Mean and variance of numbers of which each has this `share`, from the sums of their distances from a centre and of the squares
/// of those.
fn statistics(centre: f32, [sum, squares]: [f64; 2], share: f64) -> [f64; 2] {
    let (off, square) = (sum * share, squares * share);
    // Rounding makes a variance no less than nothing; a NaN stays.
    [f64::from(centre) + off, if square < off * off { 0.0 } else { square - off * off }]
}

/// mean[c] and var[c] of x[m,c].
pub(crate) fn batch_stats(cpu: &Cpu, x: View, mut mean: ViewMut, mut var: ViewMut) -> Result<()> {
    let (x, mean, var) = (x.slice::<f32>()?, mean.slice::<f32>()?, var.slice::<f32>()?);
    let c = mean.len();
    let rows = x.len() / c.max(1);
    let (share, mut centre) = (1.0 / rows as f64, vec![0.0; c]);
    columns::sums(cpu, rows, &Plain { x, columns: c }, [&mut centre], |_, [s]| [(s * share) as f32]);
    columns::sums(cpu, rows, &Distances { x, centre: &centre }, [&mut *mean, &mut *var], |j, sums| {
        statistics(centre[j], sums, share).map(|s| s as f32)
    });
    for j in (0..c).filter(|&j| !var[j].is_finite()).collect::<Vec<_>>() {
        let column: Vec<f32> = x[j..].iter().step_by(c).copied().collect();
        reference::batch_stats(&column, from_mut(&mut mean[j]), from_mut(&mut var[j]))?;
    }
    Ok(())
}

/// One coefficient per channel, computed once.
fn per_channel(c: usize, f: impl Fn(usize) -> f64) -> Vec<f32> {
    (0..c).map(|j| f(j) as f32).collect()
}

fn rstd(var: f32, eps: f64) -> f64 {
    1.0 / (f64::from(var) + eps).sqrt()
}

/// Calls `f` on pieces of whole rows of x (one or two operands) and y.
fn over_rows<'a, X: Send>(
    cpu: &Cpu,
    d: usize,
    y: &'a mut [f32],
    operands: impl Fn(usize, usize) -> X,
    f: impl Fn((X, &'a mut [f32])) + Sync,
) {
    let piece = cpu.threads.piece(y.len(), d, GRAIN);
    let items: Vec<_> = y.chunks_mut(piece).enumerate().map(|(i, y)| (operands(i * piece, y.len()), y)).collect();
    cpu.threads.over(items.into_iter(), f);
}

/// y = (x − mean)·rstd·gamma + beta.
pub(crate) fn batch_norm(
    cpu: &Cpu,
    eps: f64,
    x: View,
    [mean, var]: [View; 2],
    [gamma, beta]: [View; 2],
    mut y: ViewMut,
) -> Result<()> {
    let (x, mean, var) = (x.slice::<f32>()?, mean.slice::<f32>()?, var.slice::<f32>()?);
    let (gamma, beta) = (gamma.slice::<f32>()?, beta.slice::<f32>()?);
    let scale = per_channel(mean.len(), |j| f64::from(gamma[j]) * rstd(var[j], eps));
    let coefficients = [mean, &scale[..], beta];
    over_rows(
        cpu,
        mean.len(),
        y.slice::<f32>()?,
        |at, n| &x[at..][..n],
        |(x, y)| {
            cpu.simd.run(Normalise { x, y, coefficients });
        },
    );
    Ok(())
}

struct Normalise<'a> {
    x: &'a [f32],
    y: &'a mut [f32],
    coefficients: [&'a [f32]; 3],
}

impl Job for Normalise<'_> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let Normalise { x, y, coefficients } = self;
        let [mean, scale, beta] = coefficients;
        let c = mean.len().max(1);
        for (x, y) in x.chunks(c).zip(y.chunks_mut(c)) {
            for ((((y, x), mean), scale), beta) in y.iter_mut().zip(x).zip(mean).zip(scale).zip(beta) {
                *y = (x - mean) * scale + beta;
            }
        }
    }
}

/// Σ dy·(x − mean) and Σ dy, per column.
struct Moments<'a> {
    x: &'a [f32],
    dy: &'a [f32],
    mean: &'a [f32],
}

impl Terms<2> for Moments<'_> {
    #[inline(always)]
    fn add<const W: usize>(&self, r: usize, p: Piece, [g, b]: &mut [[f32; W]; 2]) {
        let c = self.mean.len();
        let (x, dy, mean) = (p.of(self.x, r, c), p.of(self.dy, r, c), p.of(self.mean, 0, 0));
        for ((((g, b), x), dy), mean) in g.iter_mut().zip(b).zip(x).zip(dy).zip(mean) {
            *g += dy * (x - mean);
            *b += dy;
        }
    }
}

pub(crate) fn batch_norm_weight_grad(
    cpu: &Cpu,
    eps: f64,
    x: View,
    [mean, var]: [View; 2],
    dy: View,
    [mut dgamma, mut dbeta]: [ViewMut; 2],
) -> Result<()> {
    let (x, mean, var, dy) = (x.slice::<f32>()?, mean.slice::<f32>()?, var.slice::<f32>()?, dy.slice::<f32>()?);
    let rows = x.len() / mean.len().max(1);
    let out = [dgamma.slice::<f32>()?, dbeta.slice::<f32>()?];
    columns::sums(cpu, rows, &Moments { x, dy, mean }, out, |j, [g, b]| [(g * rstd(var[j], eps)) as f32, b as f32]);
    Ok(())
}

/// dx = gamma·rstd·(dy − (dbeta + x̂·dgamma)/m); `sums` = [dgamma, dbeta].
pub(crate) fn batch_norm_input_grad(
    cpu: &Cpu,
    eps: f64,
    x: View,
    [mean, var]: [View; 2],
    gamma: View,
    [dgamma, dbeta]: [View; 2],
    dy: View,
    mut dx: ViewMut,
) -> Result<()> {
    let (x, mean, var, gamma) = (x.slice::<f32>()?, mean.slice::<f32>()?, var.slice::<f32>()?, gamma.slice::<f32>()?);
    let (dgamma, dbeta, dy) = (dgamma.slice::<f32>()?, dbeta.slice::<f32>()?, dy.slice::<f32>()?);
    let c = mean.len();
    let m = x.len() as f64 / c.max(1) as f64;
    let scale = per_channel(c, |j| f64::from(gamma[j]) * rstd(var[j], eps));
    let shift = per_channel(c, |j| f64::from(dbeta[j]) / m);
    let slope = per_channel(c, |j| f64::from(dgamma[j]) * rstd(var[j], eps) / m);
    let coefficients = [mean, &scale[..], &shift[..], &slope[..]];
    over_rows(
        cpu,
        c,
        dx.slice::<f32>()?,
        |at, n| [&x[at..][..n], &dy[at..][..n]],
        |(xs, dx)| {
            cpu.simd.run(Denormalise { xs, dx, coefficients });
        },
    );
    Ok(())
}

struct Denormalise<'a> {
    xs: [&'a [f32]; 2],
    dx: &'a mut [f32],
    coefficients: [&'a [f32]; 4],
}

impl Job for Denormalise<'_> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let Denormalise { xs, dx, coefficients } = self;
        let ([x, dy], [mean, scale, shift, slope]) = (xs, coefficients);
        let c = mean.len().max(1);
        for ((x, dy), dx) in x.chunks(c).zip(dy.chunks(c)).zip(dx.chunks_mut(c)) {
            let n = dx.len();
            let (x, dy, mean, scale) = (&x[..n], &dy[..n], &mean[..n], &scale[..n]);
            let (shift, slope) = (&shift[..n], &slope[..n]);
            for j in 0..n {
                dx[j] = scale[j] * (dy[j] - shift[j] - (x[j] - mean[j]) * slope[j]);
            }
        }
    }
}

pub(crate) fn layer_norm(
    cpu: &Cpu,
    eps: f64,
    x: View,
    [gamma, beta]: [View; 2],
    mut y: ViewMut,
    [mut mean, mut rstd]: [ViewMut; 2],
) -> Result<()> {
    let (x, gamma, beta) = (x.slice::<f32>()?, gamma.slice::<f32>()?, beta.slice::<f32>()?);
    let (y, mean, rstd) = (y.slice::<f32>()?, mean.slice::<f32>()?, rstd.slice::<f32>()?);
    let d = gamma.len();
    if d == 0 {
        // The mean of nothing.
        [mean, rstd].into_iter().for_each(|s| s.fill(f32::NAN));
        return Ok(());
    }
    let rows = cpu.threads.piece(mean.len(), 1, GRAIN / d);
    let pieces = x.chunks(rows * d).zip(y.chunks_mut(rows * d)).zip(mean.chunks_mut(rows)).zip(rstd.chunks_mut(rows));
    cpu.threads
        .try_over(pieces, |(((x, y), mean), rstd)| cpu.simd.vectors(LayerNorm { x, y, mean, rstd, eps, gamma, beta }))
}

struct LayerNorm<'a> {
    x: &'a [f32],
    y: &'a mut [f32],
    mean: &'a mut [f32],
    rstd: &'a mut [f32],
    eps: f64,
    gamma: &'a [f32],
    beta: &'a [f32],
}

impl VectorJob for LayerNorm<'_> {
    type Out = Result<()>;
    #[inline(always)]
    fn run<L: Lanes>(self, v: Vectors<L>) -> Result<()> {
        let LayerNorm { x, y, mean, rstd, eps, gamma, beta } = self;
        let d = gamma.len();
        let share = 1.0 / d as f64;
        for ((x, y), (mean, rstd)) in x.chunks(d).zip(y.chunks_mut(d)).zip(mean.iter_mut().zip(rstd)) {
            let centre = (math::sum(v, x) * share) as f32;
            let [exact, var] = statistics(centre, math::moments(v, x, centre), share);
            if !var.is_finite() {
                reference::layer_norm(eps, x, [gamma, beta], y, from_mut(mean), from_mut(rstd))?;
                continue;
            }
            let (mu, rs) = (exact as f32, 1.0 / (var + eps).sqrt());
            (*mean, *rstd) = (mu, rs as f32);
            // What the mean loses as f32 would show in numbers that differ by no more.
            let shift = v.splat(((f64::from(mu) - exact) * rs) as f32);
            let (mu, rs) = (v.splat(mu), v.splat(rs as f32));
            for at in (0..d).step_by(L::N) {
                let normalised = v.fma(shift, v.sub(v.load_first(x, at, d - at), mu), rs);
                let (gamma, beta) = (v.load_first(gamma, at, d - at), v.load_first(beta, at, d - at));
                v.store_first(v.fma(beta, normalised, gamma), y, at, d - at);
            }
        }
        Ok(())
    }
}

pub(crate) fn layer_norm_input_grad(
    cpu: &Cpu,
    x: View,
    [mean, rstd]: [View; 2],
    gamma: View,
    dy: View,
    mut dx: ViewMut,
) -> Result<()> {
    let (x, mean, rstd) = (x.slice::<f32>()?, mean.slice::<f32>()?, rstd.slice::<f32>()?);
    let (gamma, dy, dx) = (gamma.slice::<f32>()?, dy.slice::<f32>()?, dx.slice::<f32>()?);
    let d = gamma.len().max(1);
    let rows = cpu.threads.piece(mean.len(), 1, GRAIN / d);
    let stats = mean.chunks(rows).zip(rstd.chunks(rows));
    let pieces = x.chunks(rows * d).zip(dy.chunks(rows * d)).zip(dx.chunks_mut(rows * d)).zip(stats);
    cpu.threads.over(pieces, |(((x, dy), dx), (mean, rstd))| {
        cpu.simd.vectors(LayerNormGrad { x, dy, dx, mean, rstd, gamma });
    });
    Ok(())
}

struct LayerNormGrad<'a> {
    x: &'a [f32],
    dy: &'a [f32],
    dx: &'a mut [f32],
    mean: &'a [f32],
    rstd: &'a [f32],
    gamma: &'a [f32],
}

impl VectorJob for LayerNormGrad<'_> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self, v: Vectors<L>) {
        let LayerNormGrad { x, dy, dx, mean, rstd, gamma } = self;
        let d = gamma.len();
        let rows = x.chunks(d).zip(dy.chunks(d)).zip(dx.chunks_mut(d)).zip(mean.iter().zip(rstd));
        for (((x, dy), dx), (&mu, &rs)) in rows {
            let (mu, rs) = (v.splat(mu), v.splat(rs));
            // The gradient dy·gamma of x̂, its sum, and its product with x̂.
            let (mut sum, mut along) = (v.zero(), v.zero());
            for at in (0..d).step_by(L::N) {
                let normalised = v.mul(v.sub(v.load_first(x, at, d - at), mu), rs);
                let g = v.mul(v.load_first(dy, at, d - at), v.load_first(gamma, at, d - at));
                sum = v.add(sum, g);
                along = v.fma(along, g, normalised);
            }
            // What its mean and its part along x̂ take away.
            let a = v.splat(-v.sum(sum) / d as f32);
            let b = v.splat(-v.sum(along) / d as f32);
            for at in (0..d).step_by(L::N) {
                let normalised = v.mul(v.sub(v.load_first(x, at, d - at), mu), rs);
                let away = v.fma(a, normalised, b);
                let g = v.fma(away, v.load_first(dy, at, d - at), v.load_first(gamma, at, d - at));
                v.store_first(v.mul(g, rs), dx, at, d - at);
            }
        }
    }
}

/// Σ dy·x̂ and Σ dy, per column; the statistics are those of the rows.
struct RowMoments<'a> {
    x: &'a [f32],
    dy: &'a [f32],
    mean: &'a [f32],
    rstd: &'a [f32],
    columns: usize,
}

impl Terms<2> for RowMoments<'_> {
    #[inline(always)]
    fn add<const W: usize>(&self, r: usize, p: Piece, [g, b]: &mut [[f32; W]; 2]) {
        let (x, dy, mu, rs) =
            (p.of(self.x, r, self.columns), p.of(self.dy, r, self.columns), self.mean[r], self.rstd[r]);
        for (((g, b), x), dy) in g.iter_mut().zip(b).zip(x).zip(dy) {
            *g += dy * ((x - mu) * rs);
            *b += dy;
        }
    }
}

pub(crate) fn layer_norm_weight_grad(
    cpu: &Cpu,
    x: View,
    [mean, rstd]: [View; 2],
    dy: View,
    [mut dgamma, mut dbeta]: [ViewMut; 2],
) -> Result<()> {
    let (x, dy, mean, rstd) = (x.slice::<f32>()?, dy.slice::<f32>()?, mean.slice::<f32>()?, rstd.slice::<f32>()?);
    let out = [dgamma.slice::<f32>()?, dbeta.slice::<f32>()?];
    let terms = RowMoments { x, dy, mean, rstd, columns: out[0].len() };
    columns::sums(cpu, mean.len(), &terms, out, |_, [g, b]| [g as f32, b as f32]);
    Ok(())
}
