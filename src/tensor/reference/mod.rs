//! The executable specification: plain loops, one thread, accumulation in `f64`. Every other backend is tested against it.
//!
//! Letters as in [`backend`](super::backend).
mod attention;
mod conv;
mod lstm;
mod nn;

pub(crate) use nn::{batch_stats, class, layer_norm};

use super::{
    Backend, DType, Element, InOut, Philox, Pool, View, ViewMut,
    backend::{AdamStep, Attention, Binary, Conv2d, CrossEntropy, Dropout, Gemm, Lstm, Pool2d, Reduce, SgdStep, Unary},
    with_dtype, with_float,
};
use crate::{Error, Result};
use std::sync::Arc;

pub(crate) struct Reference {
    pool: Arc<Pool>,
}

impl Reference {
    pub(crate) fn new() -> Reference {
        Reference { pool: Pool::new(true) }
    }
}

/// The distribution function Φ of the standard normal distribution, to about 1e-15 of the smaller of Φ(x) and Φ(−x): the Maclaurin
/// series of the error function for small arguments, a continued fraction (modified Lentz) of its complement for large ones.
pub(crate) fn normal(x: f64) -> f64 {
    let a = x.abs() * std::f64::consts::FRAC_1_SQRT_2;
    if a < 2.5 {
        // erf a = 2/√π · e^(−a²) · Σ 2ⁿ a^(2n+1) / (2n+1)!!, all terms positive.
        let (mut term, mut sum, mut n) = (a, a, 0.0);
        while term > sum * 1e-17 {
            n += 1.0;
            term *= 2.0 * a * a / (2.0 * n + 1.0);
            sum += term;
        }
        return 0.5 + x.signum() / std::f64::consts::PI.sqrt() * (-a * a).exp() * sum;
    }
    // erfc a = e^(−a²)/√π · 1/(a + (1/2)/(a + 1/(a + (3/2)/(a + …)))), folded from the end.
    let f = (1..=60).rev().fold(a, |f, k| a + f64::from(k) / 2.0 / f);
    let tail = 0.5 * (-a * a).exp() / std::f64::consts::PI.sqrt() / f;
    if x < 0.0 { tail } else { 1.0 - tail }
}

pub(crate) fn unary(op: Unary, x: f64) -> f64 {
    match op {
        Unary::Neg => -x,
        Unary::Exp => x.exp(),
        Unary::Log => x.ln(),
        Unary::Sqrt => x.sqrt(),
        Unary::Recip => 1.0 / x,
        Unary::Square => x * x,
        Unary::Abs => x.abs(),
        Unary::Relu => {
            if x > 0.0 || x.is_nan() {
                x
            } else {
                0.0
            }
        }
        Unary::Gelu => x * normal(x),
        Unary::Tanh => x.tanh(),
        Unary::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        Unary::Affine { scale, shift } => scale * x + shift,
    }
}

/// The derivative, given the argument or the result as [`Unary::saves_result`] says.
pub(crate) fn derivative(op: Unary, s: f64) -> f64 {
    match op {
        Unary::Neg => -1.0,
        Unary::Exp => s,
        Unary::Log => 1.0 / s,
        Unary::Sqrt => 0.5 / s,
        Unary::Recip => -s * s,
        Unary::Square => 2.0 * s,
        Unary::Abs => {
            if s > 0.0 {
                1.0
            } else if s < 0.0 {
                -1.0
            } else {
                0.0
            }
        }
        Unary::Relu => {
            if s > 0.0 {
                1.0
            } else {
                0.0
            }
        }
        Unary::Gelu => {
            let phi = (-0.5 * s * s).exp() / (2.0 * std::f64::consts::PI).sqrt();
            normal(s) + s * phi
        }
        Unary::Tanh => 1.0 - s * s,
        Unary::Sigmoid => s * (1.0 - s),
        Unary::Affine { scale, .. } => scale,
    }
}

pub(crate) fn binary(op: Binary, a: f64, b: f64) -> f64 {
    match op {
        Binary::Add => a + b,
        Binary::Sub => a - b,
        Binary::Mul => a * b,
        Binary::Div => a / b,
        Binary::Max => {
            if a > b || a.is_nan() {
                a
            } else {
                b
            }
        }
    }
}

/// Applies `f` to every element of an operand to be updated.
fn update<T: Element>(mut io: InOut, mut f: impl FnMut(usize, f64) -> f64) -> Result<()> {
    let (old, new) = io.slices::<T>()?;
    for (i, y) in new.iter_mut().enumerate() {
        let x = old.map_or(*y, |o| o[i]);
        *y = T::from_f64(f(i, x.to_f64()));
    }
    Ok(())
}

/// Class or token ids of any integer type.
pub(crate) fn ids(v: View) -> Result<Vec<i64>> {
    match v.dtype {
        DType::I64 => Ok(v.slice::<i64>()?.to_vec()),
        DType::I32 => Ok(v.slice::<i32>()?.iter().map(|&i| i.into()).collect()),
        DType::U8 => Ok(v.slice::<u8>()?.iter().map(|&i| i.into()).collect()),
        other => Err(Error::dtype(format!("ids must be integers, got {other}"))),
    }
}

/// An error unless all of `ids` are rows of a table of `v`.
pub(crate) fn inside(op: &str, ids: &[i64], v: usize) -> Result<()> {
    match ids.iter().enumerate().find(|(_, id)| !(0..v as i64).contains(id)) {
        Some((row, id)) => Err(Error::data(format!("{op}: id {id} at row {row} is outside 0..{v}"))),
        None => Ok(()),
    }
}

/// The random number of element `offset` of `sample` in a dropout.
pub(crate) fn dropout_draw(rng: &Philox, sample: u64, offset: usize) -> f32 {
    Philox::unit(rng.block(sample, offset as u64 / 4)[offset % 4])
}

impl Backend for Reference {
    fn name(&self) -> &str {
        "reference"
    }
    fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    fn fill(&self, value: f64, mut y: ViewMut) -> Result<()> {
        with_dtype!(y.dtype, T => { y.slice::<T>()?.fill(<T as Element>::from_f64(value)); Ok(()) })
    }

    fn copy(&self, x: View, y: ViewMut) -> Result<()> {
        let places = x.layout.positions().zip(y.layout.positions());
        with_dtype!(x.dtype, X => with_dtype!(y.dtype, Y => {
            let (x, y): (&[X], &mut [Y]) = (x.raw::<X>()?, bytemuck::cast_slice_mut(y.buf.bytes_mut()));
            if X::DTYPE == Y::DTYPE {
                let x: &[Y] = bytemuck::cast_slice(x);
                places.for_each(|(i, j)| y[j] = x[i]);
            } else {
                places.for_each(|(i, j)| y[j] = <Y as Element>::from_f64(x[i].to_f64()));
            }
            Ok(())
        }))
    }

    fn unary(&self, op: Unary, x: View, mut y: ViewMut) -> Result<()> {
        with_float!(y.dtype, "unary", T => {
            for (y, x) in y.slice::<T>()?.iter_mut().zip(x.slice::<T>()?) {
                *y = T::from_f64(unary(op, x.to_f64()));
            }
            Ok(())
        })
    }

    fn unary_grad(&self, op: Unary, saved: View, dy: View, mut dx: ViewMut) -> Result<()> {
        with_float!(dx.dtype, "unary_grad", T => {
            for ((dx, s), dy) in dx.slice::<T>()?.iter_mut().zip(saved.slice::<T>()?).zip(dy.slice::<T>()?) {
                *dx = T::from_f64(derivative(op, s.to_f64()) * dy.to_f64());
            }
            Ok(())
        })
    }

    fn binary(&self, op: Binary, a: View, b: View, mut y: ViewMut) -> Result<()> {
        with_float!(y.dtype, "binary", T => {
            let b = b.slice::<T>()?;
            for ((y, a), b) in y.slice::<T>()?.iter_mut().zip(a.slice::<T>()?).zip(b.iter().cycle()) {
                *y = T::from_f64(binary(op, a.to_f64(), b.to_f64()));
            }
            Ok(())
        })
    }

    fn axpy(&self, alpha: f64, x: View, y: InOut) -> Result<()> {
        with_float!(y.dst.dtype, "axpy", T => {
            let x = x.slice::<T>()?;
            update::<T>(y, |i, y| y + alpha * x[i].to_f64())
        })
    }

    fn reduce(&self, op: Reduce, [outer, mid, inner]: [usize; 3], x: View, mut y: ViewMut) -> Result<()> {
        with_float!(y.dtype, "reduce", T => {
            let (x, y) = (x.slice::<T>()?, y.slice::<T>()?);
            if y.is_empty() {
                return Ok(());
            }
            for o in 0..outer {
                for i in 0..inner {
                    let column = (0..mid).map(|m| x[(o * mid + m) * inner + i].to_f64());
                    y[o * inner + i] = T::from_f64(match op {
                        // From +0, which a sum of nothing is.
                        Reduce::Sum => column.fold(0.0, |a, b| a + b),
                        Reduce::Max => column.fold(f64::NEG_INFINITY, |a, b| binary(Binary::Max, a, b)),
                    });
                }
            }
            Ok(())
        })
    }

    fn all_finite(&self, x: View) -> Result<bool> {
        with_dtype!(x.dtype, T => Ok(x.slice::<T>()?.iter().all(|v| v.to_f64().is_finite())))
    }

    fn gemm(&self, g: Gemm, a: View, b: View, bias: Option<View>, mut y: ViewMut) -> Result<()> {
        with_float!(y.dtype, "gemm", T => {
            let (a, b, y) = (a.slice::<T>()?, b.slice::<T>()?, y.slice::<T>()?);
            let bias = bias.map(|v| v.slice::<T>()).transpose()?;
            if y.is_empty() {
                return Ok(());
            }
            for batch in 0..g.batch {
                for i in 0..g.m {
                    for j in 0..g.n {
                        let mut sum = 0.0;
                        for p in 0..g.k {
                            let pa = if g.ta { p * g.m + i } else { i * g.k + p };
                            let pb = if g.tb { j * g.k + p } else { p * g.n + j };
                            sum += a[batch * g.m * g.k + pa].to_f64() * b[batch * g.k * g.n + pb].to_f64();
                        }
                        y[(batch * g.m + i) * g.n + j] = T::from_f64(sum + bias.map_or(0.0, |v| v[j].to_f64()));
                    }
                }
            }
            Ok(())
        })
    }

    fn conv2d(&self, c: Conv2d, x: View, w: View, bias: Option<View>, mut y: ViewMut) -> Result<()> {
        with_float!(y.dtype, "conv2d", T => {
            let bias = bias.map(|v| v.slice::<T>()).transpose()?;
            conv::forward(c, x.slice::<T>()?, w.slice::<T>()?, bias, y.slice::<T>()?)
        })
    }

    fn conv2d_input_grad(&self, c: Conv2d, w: View, dy: View, mut dx: ViewMut) -> Result<()> {
        with_float!(dx.dtype, "conv2d_input_grad", T => conv::input_grad(c, w.slice::<T>()?, dy.slice::<T>()?, dx.slice::<T>()?))
    }

    fn conv2d_weight_grad(&self, c: Conv2d, x: View, dy: View, mut dw: ViewMut) -> Result<()> {
        with_float!(dw.dtype, "conv2d_weight_grad", T => conv::weight_grad(c, x.slice::<T>()?, dy.slice::<T>()?, dw.slice::<T>()?))
    }

    fn max_pool2d(&self, p: Pool2d, x: View, mut y: ViewMut, mut arg: ViewMut) -> Result<()> {
        with_float!(y.dtype, "max_pool2d", T => conv::max_pool(p, x.slice::<T>()?, y.slice::<T>()?, arg.slice::<i32>()?))
    }

    fn max_pool2d_grad(&self, p: Pool2d, arg: View, dy: View, mut dx: ViewMut) -> Result<()> {
        with_float!(dx.dtype, "max_pool2d_grad", T => conv::max_pool_grad(p, arg.slice::<i32>()?, dy.slice::<T>()?, dx.slice::<T>()?))
    }

    fn avg_pool2d(&self, p: Pool2d, x: View, mut y: ViewMut) -> Result<()> {
        with_float!(y.dtype, "avg_pool2d", T => conv::avg_pool(p, x.slice::<T>()?, y.slice::<T>()?))
    }

    fn avg_pool2d_grad(&self, p: Pool2d, dy: View, mut dx: ViewMut) -> Result<()> {
        with_float!(dx.dtype, "avg_pool2d_grad", T => conv::avg_pool_grad(p, dy.slice::<T>()?, dx.slice::<T>()?))
    }

    fn batch_stats(&self, x: View, mut mean: ViewMut, mut var: ViewMut) -> Result<()> {
        with_float!(x.dtype, "batch_stats", T => nn::batch_stats(x.slice::<T>()?, mean.slice::<T>()?, var.slice::<T>()?))
    }

    fn batch_norm(
        &self,
        eps: f64,
        x: View,
        [mean, var]: [View; 2],
        gamma: View,
        beta: View,
        mut y: ViewMut,
    ) -> Result<()> {
        with_float!(y.dtype, "batch_norm", T => {
            let (x, mean, var) = (x.slice::<T>()?, mean.slice::<T>()?, var.slice::<T>()?);
            let (gamma, beta) = (gamma.slice::<T>()?, beta.slice::<T>()?);
            for (i, y) in y.slice::<T>()?.iter_mut().enumerate() {
                let c = i % mean.len();
                let hat = (x[i].to_f64() - mean[c].to_f64()) / (var[c].to_f64() + eps).sqrt();
                *y = T::from_f64(hat * gamma[c].to_f64() + beta[c].to_f64());
            }
            Ok(())
        })
    }

    fn batch_norm_weight_grad(
        &self,
        eps: f64,
        x: View,
        [mean, var]: [View; 2],
        dy: View,
        mut dgamma: ViewMut,
        mut dbeta: ViewMut,
    ) -> Result<()> {
        with_float!(dy.dtype, "batch_norm_weight_grad", T => {
            let (x, mean, var, dy) = (x.slice::<T>()?, mean.slice::<T>()?, var.slice::<T>()?, dy.slice::<T>()?);
            nn::batch_norm_sums(eps, x, [mean, var], dy, dgamma.slice::<T>()?, dbeta.slice::<T>()?)
        })
    }

    fn batch_norm_input_grad(
        &self,
        eps: f64,
        x: View,
        [mean, var]: [View; 2],
        gamma: View,
        [dgamma, dbeta]: [View; 2],
        dy: View,
        mut dx: ViewMut,
    ) -> Result<()> {
        with_float!(dx.dtype, "batch_norm_input_grad", T => {
            let (x, mean, var, gamma) = (x.slice::<T>()?, mean.slice::<T>()?, var.slice::<T>()?, gamma.slice::<T>()?);
            let (dgamma, dbeta, dy) = (dgamma.slice::<T>()?, dbeta.slice::<T>()?, dy.slice::<T>()?);
            let c = mean.len();
            let m = x.len() as f64 / c.max(1) as f64;
            for (i, dx) in dx.slice::<T>()?.iter_mut().enumerate() {
                let j = i % c;
                let rstd = 1.0 / (var[j].to_f64() + eps).sqrt();
                let hat = (x[i].to_f64() - mean[j].to_f64()) * rstd;
                let inner = dy[i].to_f64() - (dbeta[j].to_f64() + hat * dgamma[j].to_f64()) / m;
                *dx = T::from_f64(gamma[j].to_f64() * rstd * inner);
            }
            Ok(())
        })
    }

    fn layer_norm(
        &self,
        eps: f64,
        x: View,
        gamma: View,
        beta: View,
        mut y: ViewMut,
        mut mean: ViewMut,
        mut rstd: ViewMut,
    ) -> Result<()> {
        with_float!(x.dtype, "layer_norm", T => {
            let affine = [gamma.slice::<T>()?, beta.slice::<T>()?];
            nn::layer_norm(eps, x.slice::<T>()?, affine, y.slice::<T>()?, mean.slice::<T>()?, rstd.slice::<T>()?)
        })
    }

    fn layer_norm_input_grad(
        &self,
        x: View,
        [mean, rstd]: [View; 2],
        gamma: View,
        dy: View,
        mut dx: ViewMut,
    ) -> Result<()> {
        with_float!(x.dtype, "layer_norm_input_grad", T => {
            let stats = [mean.slice::<T>()?, rstd.slice::<T>()?];
            nn::layer_norm_input_grad(x.slice::<T>()?, stats, gamma.slice::<T>()?, dy.slice::<T>()?, dx.slice::<T>()?)
        })
    }

    fn layer_norm_weight_grad(
        &self,
        x: View,
        [mean, rstd]: [View; 2],
        dy: View,
        mut dgamma: ViewMut,
        mut dbeta: ViewMut,
    ) -> Result<()> {
        with_float!(x.dtype, "layer_norm_weight_grad", T => {
            let stats = [mean.slice::<T>()?, rstd.slice::<T>()?];
            nn::layer_norm_weight_grad(x.slice::<T>()?, stats, dy.slice::<T>()?, dgamma.slice::<T>()?, dbeta.slice::<T>()?)
        })
    }

    fn softmax(&self, x: View, mut y: ViewMut) -> Result<()> {
        let d = x.layout.shape().last().copied().unwrap_or(1);
        with_float!(x.dtype, "softmax", T => nn::softmax(d, x.slice::<T>()?, y.slice::<T>()?))
    }

    fn softmax_grad(&self, y: View, dy: View, mut dx: ViewMut) -> Result<()> {
        let d = y.layout.shape().last().copied().unwrap_or(1);
        with_float!(y.dtype, "softmax_grad", T => nn::softmax_grad(d, y.slice::<T>()?, dy.slice::<T>()?, dx.slice::<T>()?))
    }

    fn attention(&self, a: Attention, qkv: View, mut y: ViewMut, mut lse: ViewMut) -> Result<()> {
        with_float!(qkv.dtype, "attention", T => attention::forward(a, qkv.slice::<T>()?, y.slice::<T>()?, lse.slice::<T>()?))
    }

    fn attention_grad(&self, a: Attention, qkv: View, [y, lse]: [View; 2], dy: View, mut dqkv: ViewMut) -> Result<()> {
        with_float!(qkv.dtype, "attention_grad", T => {
            let (qkv, kept) = (qkv.slice::<T>()?, [y.slice::<T>()?, lse.slice::<T>()?]);
            attention::backward(a, qkv, kept, dy.slice::<T>()?, dqkv.slice::<T>()?)
        })
    }

    fn lstm(
        &self,
        l: Lstm,
        w: View,
        start: Option<[View; 2]>,
        mut gates: InOut,
        mut y: ViewMut,
        mut c: ViewMut,
    ) -> Result<()> {
        with_float!(w.dtype, "lstm", T => {
            let start = start.map(|[h, c]| Ok::<_, Error>([h.slice::<T>()?, c.slice::<T>()?])).transpose()?;
            lstm::forward(l, w.slice::<T>()?, start, gates.slices::<T>()?, y.slice::<T>()?, c.slice::<T>()?)
        })
    }

    fn lstm_grad(
        &self,
        l: Lstm,
        w: View,
        [gates, c]: [View; 2],
        c0: Option<View>,
        dy: View,
        dlast: Option<[View; 2]>,
        [mut da, mut dh0, mut dc0]: [ViewMut; 3],
    ) -> Result<()> {
        with_float!(w.dtype, "lstm_grad", T => {
            let kept = [gates.slice::<T>()?, c.slice::<T>()?];
            let c0 = c0.map(|c| c.slice::<T>()).transpose()?;
            let dlast = dlast.map(|[h, c]| Ok::<_, Error>([h.slice::<T>()?, c.slice::<T>()?])).transpose()?;
            let out = [da.slice::<T>()?, dh0.slice::<T>()?, dc0.slice::<T>()?];
            lstm::backward(l, w.slice::<T>()?, kept, c0, dy.slice::<T>()?, dlast, out)
        })
    }

    fn cross_entropy(
        &self,
        c: CrossEntropy,
        logits: View,
        classes: View,
        mut loss: ViewMut,
        mut correct: ViewMut,
        mut prob: ViewMut,
    ) -> Result<()> {
        let classes = ids(classes)?;
        with_float!(logits.dtype, "cross_entropy", T => {
            let (l, n) = nn::cross_entropy(c, logits.slice::<T>()?, &classes, prob.slice::<T>()?)?;
            loss.slice::<T>()?[0] = T::from_f64(l);
            correct.slice::<T>()?[0] = T::from_f64(n);
            Ok(())
        })
    }

    fn cross_entropy_grad(&self, c: CrossEntropy, prob: View, classes: View, dy: View, mut dx: ViewMut) -> Result<()> {
        let classes = ids(classes)?;
        with_float!(prob.dtype, "cross_entropy_grad", T => {
            nn::cross_entropy_grad(c, prob.slice::<T>()?, &classes, dy.slice::<T>()?[0].to_f64(), dx.slice::<T>()?);
            Ok(())
        })
    }

    fn embedding(&self, table: View, ids_: View, mut y: ViewMut) -> Result<()> {
        let ids = ids(ids_)?;
        inside("embedding", &ids, table.layout.shape()[0])?;
        with_float!(table.dtype, "embedding", T => {
            let (table, y) = (table.slice::<T>()?, y.slice::<T>()?);
            let d = y.len() / ids.len().max(1);
            for (row, &id) in ids.iter().enumerate() {
                y[row * d..][..d].copy_from_slice(&table[id as usize * d..][..d]);
            }
            Ok(())
        })
    }

    fn embedding_grad(&self, ids_: View, dy: View, mut dtable: ViewMut) -> Result<()> {
        let ids = ids(ids_)?;
        inside("embedding_grad", &ids, dtable.layout.shape()[0])?;
        with_float!(dy.dtype, "embedding_grad", T => {
            let (dy, dtable) = (dy.slice::<T>()?, dtable.slice::<T>()?);
            let d = dy.len() / ids.len().max(1);
            let mut sum = vec![0.0; dtable.len()];
            for (row, &id) in ids.iter().enumerate() {
                for j in 0..d {
                    sum[id as usize * d + j] += dy[row * d + j].to_f64();
                }
            }
            dtable.iter_mut().zip(sum).for_each(|(t, s)| *t = T::from_f64(s));
            Ok(())
        })
    }

    fn dropout(&self, d: Dropout, x: View, mut y: ViewMut) -> Result<()> {
        with_float!(y.dtype, "dropout", T => {
            let (x, y) = (x.slice::<T>()?, y.slice::<T>()?);
            let per_sample = y.len() / d.samples.len().max(1);
            for (i, y) in y.iter_mut().enumerate() {
                let draw = dropout_draw(&d.rng, d.samples[i / per_sample], i % per_sample);
                *y = if draw < d.rate as f32 { T::from_f64(0.0) } else { T::from_f64(x[i].to_f64() / (1.0 - d.rate)) };
            }
            Ok(())
        })
    }

    fn sgd(&self, s: SgdStep, g: View, w: InOut, v: Option<InOut>) -> Result<()> {
        with_float!(g.dtype, "sgd", T => {
            let g = g.slice::<T>()?;
            nn::sgd::<T>(s, g, w, v)
        })
    }

    fn adam(&self, s: AdamStep, g: View, w: InOut, m: InOut, v: InOut) -> Result<()> {
        with_float!(g.dtype, "adam", T => nn::adam::<T>(s, g.slice::<T>()?, w, m, v))
    }
}
