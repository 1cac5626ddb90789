//! Pooling over windows of x[n,h,w,c]: each tap of a window is a run of channels, treated as vectors.
use super::{Cpu, elementwise::GRAIN, isa::Job};
use crate::{
    Result,
    tensor::{View, ViewMut, backend::Pool2d},
};

/// The taps of the window at output (i, j) that are not padding: ordinal in the window and pixel of the image.
fn taps(p: &Pool2d, i: usize, j: usize) -> impl Iterator<Item = (usize, usize)> + '_ {
    let at = |o: usize, k: usize, axis: usize| {
        (o * p.stride[axis] + k).checked_sub(p.padding[axis]).filter(|&x| x < p.hw[axis])
    };
    (0..p.kernel[0]).filter_map(move |u| Some((u, at(i, u, 0)?))).flat_map(move |(u, h)| {
        let column = move |v: usize| Some((u * p.kernel[1] + v, h * p.hw[1] + at(j, v, 1)?));
        (0..p.kernel[1]).filter_map(column)
    })
}

/// Pieces of `count` that are worth a thread each, where one has `outputs` windows.
fn piece(cpu: &Cpu, p: &Pool2d, count: usize, outputs: usize) -> usize {
    cpu.threads.piece(count, 1, GRAIN / outputs.saturating_mul(p.kernel[0] * p.kernel[1]).max(1))
}

/// Elements of an image and of its output, which the threads take whole, since windows of one image may overlap; nothing if
/// there are none of either.
fn images(p: &Pool2d, x: &[f32], y: &[f32]) -> Option<[usize; 2]> {
    (!x.is_empty() && !y.is_empty()).then(|| [x.len() / p.n, y.len() / p.n])
}

pub(crate) fn max_pool(cpu: &Cpu, p: Pool2d, x: View, mut y: ViewMut, mut arg: ViewMut) -> Result<()> {
    let (x, y, arg) = (x.slice::<f32>()?, y.slice::<f32>()?, arg.slice::<i32>()?);
    if y.is_empty() {
        return Ok(());
    }
    let [oh, ow] = p.out()?;
    let (image, row) = (x.len() / p.n, ow * p.c);
    let piece = piece(cpu, &p, p.n * oh, row);
    let pieces = y.chunks_mut(piece * row).zip(arg.chunks_mut(piece * row)).enumerate();
    cpu.threads.over(pieces, |(first, (y, arg))| {
        for (r, (y, arg)) in y.chunks_mut(row).zip(arg.chunks_mut(row)).enumerate() {
            let (n, i) = ((first * piece + r) / oh, (first * piece + r) % oh);
            cpu.simd.run(MaxRow { p: &p, i, x: &x[n * image..][..image], y, arg });
        }
    });
    Ok(())
}

struct MaxRow<'a> {
    p: &'a Pool2d,
    i: usize,
    x: &'a [f32],
    y: &'a mut [f32],
    arg: &'a mut [i32],
}

impl Job for MaxRow<'_> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let MaxRow { p, i, x, y, arg } = self;
        for (j, (y, arg)) in y.chunks_mut(p.c).zip(arg.chunks_mut(p.c)).enumerate() {
            let mut first = true;
            for (k, pixel) in taps(p, i, j) {
                let (x, k) = (&x[pixel * p.c..][..p.c], k as i32);
                if first {
                    y.copy_from_slice(x);
                    arg.fill(k);
                    first = false;
                    continue;
                }
                larger(x, k, y, arg);
            }
            if first {
                y.fill(f32::NEG_INFINITY);
                arg.fill(-1);
            }
        }
    }
}

/// Takes over those x that are larger than y, or the first NaN.
#[inline(always)]
fn larger(x: &[f32], k: i32, y: &mut [f32], arg: &mut [i32]) {
    let n = x.len();
    let (y, arg) = (&mut y[..n], &mut arg[..n]);
    for i in 0..n {
        let (old, new) = (y[i], x[i]);
        let better = ((new > old) | new.is_nan()) & !old.is_nan();
        y[i] = if better { new } else { old };
        arg[i] = if better { k } else { arg[i] };
    }
}

pub(crate) fn max_pool_grad(cpu: &Cpu, p: Pool2d, arg: View, dy: View, mut dx: ViewMut) -> Result<()> {
    let (arg, dy, dx) = (arg.slice::<i32>()?, dy.slice::<f32>()?, dx.slice::<f32>()?);
    let [_, ow] = p.out()?;
    let Some([image, out]) = images(&p, dx, dy) else {
        dx.fill(0.0);
        return Ok(());
    };
    let n = piece(cpu, &p, p.n, out);
    let pieces = dx.chunks_mut(n * image).zip(arg.chunks(n * out)).zip(dy.chunks(n * out));
    cpu.threads.over(pieces, |((dx, arg), dy)| {
        for ((dx, arg), dy) in dx.chunks_mut(image).zip(arg.chunks(out)).zip(dy.chunks(out)) {
            cpu.simd.run(MaxGrad { p: &p, ow, arg, dy, dx });
        }
    });
    Ok(())
}

struct MaxGrad<'a> {
    p: &'a Pool2d,
    ow: usize,
    arg: &'a [i32],
    dy: &'a [f32],
    dx: &'a mut [f32],
}

impl Job for MaxGrad<'_> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let MaxGrad { p, ow, arg, dy, dx } = self;
        dx.fill(0.0);
        for (o, (arg, dy)) in arg.chunks(p.c).zip(dy.chunks(p.c)).enumerate() {
            for (k, pixel) in taps(p, o / ow, o % ow) {
                let (dx, k) = (&mut dx[pixel * p.c..][..p.c], k as i32);
                for ((dx, &arg), &dy) in dx.iter_mut().zip(arg).zip(dy) {
                    *dx += if arg == k { dy } else { 0.0 };
                }
            }
        }
    }
}

pub(crate) fn avg_pool(cpu: &Cpu, p: Pool2d, x: View, mut y: ViewMut) -> Result<()> {
    let (x, y) = (x.slice::<f32>()?, y.slice::<f32>()?);
    let [_, ow] = p.out()?;
    let Some([image, out]) = images(&p, x, y) else {
        // Windows of padding alone.
        y.fill(0.0);
        return Ok(());
    };
    let n = piece(cpu, &p, p.n, out);
    cpu.threads.over(y.chunks_mut(n * out).enumerate(), |(first, y)| {
        for (i, y) in y.chunks_mut(out).enumerate() {
            cpu.simd.run(Avg { p: &p, ow, x: &x[(first * n + i) * image..][..image], y });
        }
    });
    Ok(())
}

struct Avg<'a> {
    p: &'a Pool2d,
    ow: usize,
    x: &'a [f32],
    y: &'a mut [f32],
}

impl Job for Avg<'_> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let Avg { p, ow, x, y } = self;
        let size = (p.kernel[0] * p.kernel[1]) as f32;
        for (o, y) in y.chunks_mut(p.c).enumerate() {
            y.fill(0.0);
            for (_, pixel) in taps(p, o / ow, o % ow) {
                y.iter_mut().zip(&x[pixel * p.c..][..p.c]).for_each(|(y, x)| *y += x);
            }
            y.iter_mut().for_each(|y| *y /= size);
        }
    }
}

pub(crate) fn avg_pool_grad(cpu: &Cpu, p: Pool2d, dy: View, mut dx: ViewMut) -> Result<()> {
    let (dy, dx) = (dy.slice::<f32>()?, dx.slice::<f32>()?);
    let [_, ow] = p.out()?;
    let Some([image, out]) = images(&p, dx, dy) else {
        dx.fill(0.0);
        return Ok(());
    };
    let n = piece(cpu, &p, p.n, out);
    cpu.threads.over(dx.chunks_mut(n * image).zip(dy.chunks(n * out)), |(dx, dy)| {
        for (dx, dy) in dx.chunks_mut(image).zip(dy.chunks(out)) {
            cpu.simd.run(AvgGrad { p: &p, ow, dy, dx });
        }
    });
    Ok(())
}

struct AvgGrad<'a> {
    p: &'a Pool2d,
    ow: usize,
    dy: &'a [f32],
    dx: &'a mut [f32],
}

impl Job for AvgGrad<'_> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let AvgGrad { p, ow, dy, dx } = self;
        let share = 1.0 / (p.kernel[0] * p.kernel[1]) as f32;
        dx.fill(0.0);
        for (o, dy) in dy.chunks(p.c).enumerate() {
            for (_, pixel) in taps(p, o / ow, o % ow) {
                dx[pixel * p.c..][..p.c].iter_mut().zip(dy).for_each(|(dx, dy)| *dx += dy * share);
            }
        }
    }
}
