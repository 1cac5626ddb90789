//! Normalisation, softmax, losses and optimizer steps of the reference backend.
use super::*;

pub(crate) fn batch_stats<T: Element>(x: &[T], mean: &mut [T], var: &mut [T]) -> Result<()> {
    let c = mean.len();
    let m = (x.len() / c.max(1)) as f64;
    for j in 0..c {
        let column = || x[j..].iter().step_by(c).map(|v| v.to_f64());
        let mu = column().sum::<f64>() / m;
        mean[j] = T::from_f64(mu);
        var[j] = T::from_f64(column().map(|v| (v - mu) * (v - mu)).sum::<f64>() / m);
    }
    Ok(())
}

pub(super) fn batch_norm_sums<T: Element>(
    eps: f64,
    x: &[T],
    [mean, var]: [&[T]; 2],
    dy: &[T],
    dgamma: &mut [T],
    dbeta: &mut [T],
) -> Result<()> {
    let c = mean.len();
    for j in 0..c {
        let rstd = 1.0 / (var[j].to_f64() + eps).sqrt();
        let (mut g, mut b) = (0.0, 0.0);
        for i in (j..x.len()).step_by(c) {
            g += dy[i].to_f64() * (x[i].to_f64() - mean[j].to_f64()) * rstd;
            b += dy[i].to_f64();
        }
        (dgamma[j], dbeta[j]) = (T::from_f64(g), T::from_f64(b));
    }
    Ok(())
}

pub(crate) fn layer_norm<T: Element>(
    eps: f64,
    x: &[T],
    [gamma, beta]: [&[T]; 2],
    y: &mut [T],
    mean: &mut [T],
    rstd: &mut [T],
) -> Result<()> {
    let d = gamma.len();
    for r in 0..mean.len() {
        let row = &x[r * d..][..d];
        let mu = row.iter().map(|v| v.to_f64()).sum::<f64>() / d as f64;
        let var = row.iter().map(|v| (v.to_f64() - mu).powi(2)).sum::<f64>() / d as f64;
        let rs = 1.0 / (var + eps).sqrt();
        (mean[r], rstd[r]) = (T::from_f64(mu), T::from_f64(rs));
        for j in 0..d {
            y[r * d + j] = T::from_f64((row[j].to_f64() - mu) * rs * gamma[j].to_f64() + beta[j].to_f64());
        }
    }
    Ok(())
}

pub(super) fn layer_norm_input_grad<T: Element>(
    x: &[T],
    [mean, rstd]: [&[T]; 2],
    gamma: &[T],
    dy: &[T],
    dx: &mut [T],
) -> Result<()> {
    let d = gamma.len();
    for r in 0..mean.len() {
        let (mu, rs) = (mean[r].to_f64(), rstd[r].to_f64());
        let hat = |j: usize| (x[r * d + j].to_f64() - mu) * rs;
        let dhat = |j: usize| dy[r * d + j].to_f64() * gamma[j].to_f64();
        let a = (0..d).map(dhat).sum::<f64>() / d as f64;
        let b = (0..d).map(|j| dhat(j) * hat(j)).sum::<f64>() / d as f64;
        for j in 0..d {
            dx[r * d + j] = T::from_f64(rs * (dhat(j) - a - hat(j) * b));
        }
    }
    Ok(())
}

pub(super) fn layer_norm_weight_grad<T: Element>(
    x: &[T],
    [mean, rstd]: [&[T]; 2],
    dy: &[T],
    dgamma: &mut [T],
    dbeta: &mut [T],
) -> Result<()> {
    let d = dgamma.len();
    for j in 0..d {
        let (mut g, mut b) = (0.0, 0.0);
        for r in 0..mean.len() {
            let dy = dy[r * d + j].to_f64();
            g += dy * (x[r * d + j].to_f64() - mean[r].to_f64()) * rstd[r].to_f64();
            b += dy;
        }
        (dgamma[j], dbeta[j]) = (T::from_f64(g), T::from_f64(b));
    }
    Ok(())
}

pub(super) fn softmax<T: Element>(d: usize, x: &[T], y: &mut [T]) -> Result<()> {
    for (x, y) in x.chunks_exact(d.max(1)).zip(y.chunks_exact_mut(d.max(1))) {
        let max = x.iter().fold(f64::NEG_INFINITY, |a, v| binary(Binary::Max, a, v.to_f64()));
        let sum: f64 = x.iter().map(|v| (v.to_f64() - max).exp()).sum();
        y.iter_mut().zip(x).for_each(|(y, x)| *y = T::from_f64((x.to_f64() - max).exp() / sum));
    }
    Ok(())
}

pub(super) fn softmax_grad<T: Element>(d: usize, y: &[T], dy: &[T], dx: &mut [T]) -> Result<()> {
    let d = d.max(1);
    for ((y, dy), dx) in y.chunks_exact(d).zip(dy.chunks_exact(d)).zip(dx.chunks_exact_mut(d)) {
        let dot: f64 = y.iter().zip(dy).map(|(a, b)| a.to_f64() * b.to_f64()).sum();
        for j in 0..d {
            dx[j] = T::from_f64(y[j].to_f64() * (dy[j].to_f64() - dot));
        }
    }
    Ok(())
}

/// The class of row `r`, or `None` where it is ignored.
pub(crate) fn class(c: CrossEntropy, classes: &[i64], r: usize) -> Result<Option<usize>> {
    let k = classes[r];
    if c.ignore == Some(k) {
        return Ok(None);
    }
    let inside = usize::try_from(k).ok().filter(|&k| k < c.v);
    inside.map(Some).ok_or_else(|| Error::data(format!("cross_entropy: class {k} at row {r} is outside 0..{}", c.v)))
}

/// Loss and number of right answers, summed over the rows.
pub(super) fn cross_entropy<T: Element>(
    c: CrossEntropy,
    logits: &[T],
    classes: &[i64],
    prob: &mut [T],
) -> Result<(f64, f64)> {
    let (mut loss, mut correct) = (0.0, 0.0);
    softmax(c.v, logits, prob)?;
    for r in 0..c.m {
        let Some(k) = class(c, classes, r)? else { continue };
        let row: Vec<f64> = logits[r * c.v..][..c.v].iter().map(|v| v.to_f64()).collect();
        let max = row.iter().copied().fold(f64::NEG_INFINITY, |a, v| binary(Binary::Max, a, v));
        let log_sum = max + row.iter().map(|v| (v - max).exp()).sum::<f64>().ln();
        let uniform = row.iter().map(|v| log_sum - v).sum::<f64>() / c.v as f64;
        loss += (1.0 - c.smoothing) * (log_sum - row[k]);
        if c.smoothing > 0.0 {
            loss += c.smoothing * uniform;
        }
        let first_largest = row.iter().position(|&v| v == max);
        correct += f64::from(u8::from(first_largest == Some(k)));
    }
    Ok((loss, correct))
}

pub(super) fn cross_entropy_grad<T: Element>(c: CrossEntropy, prob: &[T], classes: &[i64], dy: f64, dx: &mut [T]) {
    for (i, dx) in dx.iter_mut().enumerate() {
        let (r, j) = (i / c.v, i % c.v);
        let target = c.smoothing / c.v as f64 + if classes[r] == j as i64 { 1.0 - c.smoothing } else { 0.0 };
        *dx = T::from_f64(if c.ignore == Some(classes[r]) { 0.0 } else { dy * (prob[i].to_f64() - target) });
    }
}

/// What SGD adds to a weight, and the new velocity.
fn sgd_element(s: SgdStep, w: f64, g: f64, v: f64) -> (f64, f64) {
    let g = g + s.decay * w;
    let v = s.momentum * v + g;
    (w - s.lr * if s.nesterov { g + s.momentum * v } else { v }, v)
}

pub(super) fn sgd<T: Element>(s: SgdStep, g: &[T], mut w: InOut, v: Option<InOut>) -> Result<()> {
    let Some(mut v) = v else {
        return update::<T>(w, |i, w| sgd_element(SgdStep { momentum: 0.0, ..s }, w, g[i].to_f64(), 0.0).0);
    };
    let ((w0, w1), (v0, v1)) = (w.slices::<T>()?, v.slices::<T>()?);
    for i in 0..g.len() {
        let (wi, vi) = (w0.map_or(w1[i], |w| w[i]), v0.map_or(v1[i], |v| v[i]));
        let (wi, vi) = sgd_element(s, wi.to_f64(), g[i].to_f64(), vi.to_f64());
        (w1[i], v1[i]) = (T::from_f64(wi), T::from_f64(vi));
    }
    Ok(())
}

pub(super) fn adam<T: Element>(s: AdamStep, g: &[T], mut w: InOut, mut m: InOut, mut v: InOut) -> Result<()> {
    let ((w0, w1), (m0, m1), (v0, v1)) = (w.slices::<T>()?, m.slices::<T>()?, v.slices::<T>()?);
    let correction = s.betas.map(|b| 1.0 - b.powf(s.t as f64));
    for i in 0..g.len() {
        let w = w0.map_or(w1[i], |w| w[i]).to_f64();
        let (m, v) = (m0.map_or(m1[i], |m| m[i]).to_f64(), v0.map_or(v1[i], |v| v[i]).to_f64());
        let g = g[i].to_f64() + if s.decoupled { 0.0 } else { s.decay * w };
        let w = if s.decoupled { w - s.lr * s.decay * w } else { w };
        let m = s.betas[0] * m + (1.0 - s.betas[0]) * g;
        let v = s.betas[1] * v + (1.0 - s.betas[1]) * g * g;
        let step = s.lr * (m / correction[0]) / ((v / correction[1]).sqrt() + s.eps);
        (w1[i], m1[i], v1[i]) = (T::from_f64(w - step), T::from_f64(m), T::from_f64(v));
    }
    Ok(())
}
