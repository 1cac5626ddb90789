//! Convolution and pooling of the reference backend.
use super::*;

/// The input position of output `o` and kernel element `k` along one axis, if it is not padding.
fn at(o: usize, k: usize, stride: usize, dilation: usize, padding: usize, n: usize) -> Option<usize> {
    (o * stride + k * dilation).checked_sub(padding).filter(|&i| i < n)
}

/// Calls `f(x, w, y)` with the positions of every product of the convolution, in order of y, kernel and input channel.
fn products(c: Conv2d, mut f: impl FnMut(usize, usize, usize)) -> Result<()> {
    let [oh, ow] = c.out()?;
    let (cig, cog) = (c.ci / c.groups, c.co / c.groups);
    if cig == 0 || cog == 0 {
        return Ok(());
    }
    for n in 0..c.n {
        for (i, j) in (0..oh).flat_map(|i| (0..ow).map(move |j| (i, j))) {
            for o in 0..c.co {
                let y = ((n * oh + i) * ow + j) * c.co + o;
                for (u, v) in (0..c.kernel[0]).flat_map(|u| (0..c.kernel[1]).map(move |v| (u, v))) {
                    let (Some(h), Some(w)) = (
                        at(i, u, c.stride[0], c.dilation[0], c.padding[0], c.hw[0]),
                        at(j, v, c.stride[1], c.dilation[1], c.padding[1], c.hw[1]),
                    ) else {
                        continue;
                    };
                    for q in 0..cig {
                        let x = ((n * c.hw[0] + h) * c.hw[1] + w) * c.ci + o / cog * cig + q;
                        f(x, ((u * c.kernel[1] + v) * cig + q) * c.co + o, y);
                    }
                }
            }
        }
    }
    Ok(())
}

fn store<T: Element>(sum: Vec<f64>, y: &mut [T]) {
    y.iter_mut().zip(sum).for_each(|(y, s)| *y = T::from_f64(s));
}

pub(super) fn forward<T: Element>(c: Conv2d, x: &[T], w: &[T], bias: Option<&[T]>, y: &mut [T]) -> Result<()> {
    let mut sum: Vec<f64> = (0..y.len()).map(|i| bias.map_or(0.0, |b| b[i % c.co].to_f64())).collect();
    products(c, |ix, iw, iy| sum[iy] += x[ix].to_f64() * w[iw].to_f64())?;
    store(sum, y);
    Ok(())
}

pub(super) fn input_grad<T: Element>(c: Conv2d, w: &[T], dy: &[T], dx: &mut [T]) -> Result<()> {
    let mut sum = vec![0.0; dx.len()];
    products(c, |ix, iw, iy| sum[ix] += dy[iy].to_f64() * w[iw].to_f64())?;
    store(sum, dx);
    Ok(())
}

pub(super) fn weight_grad<T: Element>(c: Conv2d, x: &[T], dy: &[T], dw: &mut [T]) -> Result<()> {
    let mut sum = vec![0.0; dw.len()];
    products(c, |ix, iw, iy| sum[iw] += x[ix].to_f64() * dy[iy].to_f64())?;
    store(sum, dw);
    Ok(())
}

/// Calls `f(y, k, x)` for every output and the elements of its window: k its position there, x its place in the input.
fn windows(p: Pool2d, mut f: impl FnMut(usize, usize, usize)) -> Result<()> {
    let [oh, ow] = p.out()?;
    if p.c == 0 {
        return Ok(());
    }
    for n in 0..p.n {
        for (i, j) in (0..oh).flat_map(|i| (0..ow).map(move |j| (i, j))) {
            for c in 0..p.c {
                let y = ((n * oh + i) * ow + j) * p.c + c;
                for (u, v) in (0..p.kernel[0]).flat_map(|u| (0..p.kernel[1]).map(move |v| (u, v))) {
                    let h = at(i, u, p.stride[0], 1, p.padding[0], p.hw[0]);
                    let w = at(j, v, p.stride[1], 1, p.padding[1], p.hw[1]);
                    if let (Some(h), Some(w)) = (h, w) {
                        f(y, u * p.kernel[1] + v, ((n * p.hw[0] + h) * p.hw[1] + w) * p.c + c);
                    }
                }
            }
        }
    }
    Ok(())
}

pub(super) fn max_pool<T: Element>(p: Pool2d, x: &[T], y: &mut [T], arg: &mut [i32]) -> Result<()> {
    arg.fill(-1);
    y.fill(T::from_f64(f64::NEG_INFINITY));
    windows(p, |iy, k, ix| {
        let (v, best) = (x[ix].to_f64(), y[iy].to_f64());
        if arg[iy] < 0 || v > best || (v.is_nan() && !best.is_nan()) {
            (y[iy], arg[iy]) = (x[ix], k as i32);
        }
    })
}

pub(super) fn max_pool_grad<T: Element>(p: Pool2d, arg: &[i32], dy: &[T], dx: &mut [T]) -> Result<()> {
    let mut sum = vec![0.0; dx.len()];
    windows(p, |iy, k, ix| {
        if arg[iy] == k as i32 {
            sum[ix] += dy[iy].to_f64();
        }
    })?;
    store(sum, dx);
    Ok(())
}

pub(super) fn avg_pool<T: Element>(p: Pool2d, x: &[T], y: &mut [T]) -> Result<()> {
    let mut sum = vec![0.0; y.len()];
    let size = (p.kernel[0] * p.kernel[1]) as f64;
    windows(p, |iy, _, ix| sum[iy] += x[ix].to_f64())?;
    store(sum.into_iter().map(|s| s / size).collect(), y);
    Ok(())
}

pub(super) fn avg_pool_grad<T: Element>(p: Pool2d, dy: &[T], dx: &mut [T]) -> Result<()> {
    let mut sum = vec![0.0; dx.len()];
    let size = (p.kernel[0] * p.kernel[1]) as f64;
    windows(p, |iy, _, ix| sum[ix] += dy[iy].to_f64() / size)?;
    store(sum, dx);
    Ok(())
}
