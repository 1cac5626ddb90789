//! Functions of one and two values, and what else treats every element alike.
use super::{
    Cpu,
    isa::{Job, VectorJob},
    lanes::{Lanes, Vectors},
    math::{self, Apply, Function},
};
use crate::{
    Result,
    tensor::{
        InOut, Philox, View, ViewMut,
        backend::{Binary, Dropout, Unary},
    },
};

/// Elements that are worth a thread.
pub(crate) const GRAIN: usize = 1 << 15;
/// Pieces are cut at multiples of this, so that no two threads write one cache line.
const UNIT: usize = 64;

/// y[*] = f(x[*])
fn map(cpu: &Cpu, x: &[f32], y: &mut [f32], f: impl Fn(f32) -> f32 + Copy + Sync) {
    let piece = cpu.threads.piece(y.len(), UNIT, GRAIN);
    cpu.threads.over(x.chunks(piece).zip(y.chunks_mut(piece)), |(x, y)| cpu.simd.run(Map { x, y, f }));
}

/// The same, of a function of vectors.
fn apply(cpu: &Cpu, f: impl Function, x: &[f32], y: &mut [f32]) {
    let piece = cpu.threads.piece(y.len(), UNIT, GRAIN);
    cpu.threads.over(x.chunks(piece).zip(y.chunks_mut(piece)), |(x, y)| cpu.simd.vectors(Apply { f, x, y }));
}

struct Map<'a, F> {
    x: &'a [f32],
    y: &'a mut [f32],
    f: F,
}

impl<F: Fn(f32) -> f32> Job for Map<'_, F> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        self.y.iter_mut().zip(self.x).for_each(|(y, &x)| *y = (self.f)(x));
    }
}

/// y[*] = f(a[*], b[*]), b as long as a or repeated along it.
fn map2(cpu: &Cpu, a: &[f32], b: &[f32], y: &mut [f32], f: impl Fn(f32, f32) -> f32 + Copy + Sync) {
    if let &[b] = b {
        return map(cpu, a, y, move |a| f(a, b));
    }
    if a.len() == b.len() {
        let piece = cpu.threads.piece(y.len(), UNIT, GRAIN);
        let pieces = a.chunks(piece).zip(b.chunks(piece)).zip(y.chunks_mut(piece));
        return cpu.threads.over(pieces, |((a, b), y)| cpu.simd.run(Map2 { a, b, y, f }));
    }
    let piece = cpu.threads.piece(y.len(), b.len(), GRAIN);
    cpu.threads.over(a.chunks(piece).zip(y.chunks_mut(piece)), |(a, y)| cpu.simd.run(Map2 { a, b, y, f }));
}

/// `b` repeats along `a`.
struct Map2<'a, F> {
    a: &'a [f32],
    b: &'a [f32],
    y: &'a mut [f32],
    f: F,
}

impl<F: Fn(f32, f32) -> f32> Job for Map2<'_, F> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let d = self.b.len().max(1);
        for (a, y) in self.a.chunks(d).zip(self.y.chunks_mut(d)) {
            for ((y, &a), &b) in y.iter_mut().zip(a).zip(self.b) {
                *y = (self.f)(a, b);
            }
        }
    }
}

pub(crate) fn unary(cpu: &Cpu, op: Unary, x: View, mut y: ViewMut) -> Result<()> {
    let (x, y) = (x.slice::<f32>()?, y.slice::<f32>()?);
    match op {
        Unary::Neg => map(cpu, x, y, |x| -x),
        Unary::Exp => apply(cpu, math::Exp, x, y),
        Unary::Log => map(cpu, x, y, f32::ln),
        Unary::Sqrt => map(cpu, x, y, f32::sqrt),
        Unary::Recip => map(cpu, x, y, |x| 1.0 / x),
        Unary::Square => map(cpu, x, y, |x| x * x),
        Unary::Abs => map(cpu, x, y, f32::abs),
        Unary::Relu => map(cpu, x, y, math::relu),
        Unary::Gelu => apply(cpu, math::Gelu, x, y),
        Unary::Tanh => apply(cpu, math::Tanh, x, y),
        Unary::Sigmoid => apply(cpu, math::Sigmoid, x, y),
        Unary::Affine { scale, shift } => {
            let (scale, shift) = (scale as f32, shift as f32);
            map(cpu, x, y, move |x| scale * x + shift);
        }
    }
    Ok(())
}

pub(crate) fn unary_grad(cpu: &Cpu, op: Unary, saved: View, dy: View, mut dx: ViewMut) -> Result<()> {
    let (s, dy, dx) = (saved.slice::<f32>()?, dy.slice::<f32>()?, dx.slice::<f32>()?);
    match op {
        Unary::Neg => map(cpu, dy, dx, |dy| -dy),
        Unary::Exp => map2(cpu, s, dy, dx, |s, dy| s * dy),
        Unary::Log => map2(cpu, s, dy, dx, |s, dy| 1.0 / s * dy),
        Unary::Sqrt => map2(cpu, s, dy, dx, |s, dy| 0.5 / s * dy),
        Unary::Recip => map2(cpu, s, dy, dx, |s, dy| -s * s * dy),
        Unary::Square => map2(cpu, s, dy, dx, |s, dy| 2.0 * s * dy),
        Unary::Abs => map2(cpu, s, dy, dx, |s, dy| f32::from(i8::from(s > 0.0) - i8::from(s < 0.0)) * dy),
        Unary::Relu => map2(cpu, s, dy, dx, |s, dy| if s > 0.0 { dy } else { 0.0 * dy }),
        Unary::Gelu => gelu_grad(cpu, s, dy, dx),
        Unary::Tanh => map2(cpu, s, dy, dx, |s, dy| (1.0 - s * s) * dy),
        Unary::Sigmoid => map2(cpu, s, dy, dx, |s, dy| s * (1.0 - s) * dy),
        Unary::Affine { scale, .. } => {
            let scale = scale as f32;
            map(cpu, dy, dx, move |dy| scale * dy);
        }
    }
    Ok(())
}

fn gelu_grad(cpu: &Cpu, x: &[f32], dy: &[f32], dx: &mut [f32]) {
    let piece = cpu.threads.piece(dx.len(), UNIT, GRAIN);
    let pieces = x.chunks(piece).zip(dy.chunks(piece)).zip(dx.chunks_mut(piece));
    cpu.threads.over(pieces, |((x, dy), dx)| cpu.simd.vectors(GeluGrad { x, dy, dx }));
}

struct GeluGrad<'a> {
    x: &'a [f32],
    dy: &'a [f32],
    dx: &'a mut [f32],
}

impl VectorJob for GeluGrad<'_> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self, v: Vectors<L>) {
        let GeluGrad { x, dy, dx } = self;
        let n = dx.len();
        for at in (0..n).step_by(L::N) {
            let slope = math::gelu_slope(v, v.load_first(x, at, n - at));
            v.store_first(v.mul(slope, v.load_first(dy, at, n - at)), dx, at, n - at);
        }
    }
}

pub(crate) fn binary(cpu: &Cpu, op: Binary, a: View, b: View, mut y: ViewMut) -> Result<()> {
    let (a, b, y) = (a.slice::<f32>()?, b.slice::<f32>()?, y.slice::<f32>()?);
    match op {
        Binary::Add => map2(cpu, a, b, y, |a, b| a + b),
        Binary::Sub => map2(cpu, a, b, y, |a, b| a - b),
        Binary::Mul => map2(cpu, a, b, y, |a, b| a * b),
        Binary::Div => map2(cpu, a, b, y, |a, b| a / b),
        Binary::Max => map2(cpu, a, b, y, math::max),
    }
    Ok(())
}

pub(crate) fn axpy(cpu: &Cpu, alpha: f64, x: View, mut y: InOut) -> Result<()> {
    let (x, alpha) = (x.slice::<f32>()?, alpha as f32);
    let (old, y) = y.slices::<f32>()?;
    match old {
        Some(old) => map2(cpu, old, x, y, move |y, x| y + alpha * x),
        None => {
            let piece = cpu.threads.piece(y.len(), UNIT, GRAIN);
            cpu.threads
                .over(x.chunks(piece).zip(y.chunks_mut(piece)), |(x, y)| cpu.simd.run(AddScaled { alpha, x, y }));
        }
    }
    Ok(())
}

struct AddScaled<'a> {
    alpha: f32,
    x: &'a [f32],
    y: &'a mut [f32],
}

impl Job for AddScaled<'_> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let AddScaled { alpha, x, y } = self;
        y.iter_mut().zip(x).for_each(|(y, x)| *y += alpha * x);
    }
}

pub(crate) fn all_finite(cpu: &Cpu, x: View) -> Result<bool> {
    let x = x.slice::<f32>()?;
    let found = std::sync::atomic::AtomicBool::new(true);
    let piece = cpu.threads.piece(x.len(), UNIT, GRAIN);
    cpu.threads.over(x.chunks(piece), |x| {
        // In blocks, since a search that may stop at any element is not vectorised.
        if !x.chunks(4096).all(|x| cpu.simd.run(Finite { x })) {
            found.store(false, std::sync::atomic::Ordering::Relaxed);
        }
    });
    Ok(found.into_inner())
}

struct Finite<'a> {
    x: &'a [f32],
}

impl Job for Finite<'_> {
    type Out = bool;
    #[inline(always)]
    fn run(self) -> bool {
        let Finite { x } = self;
        x.iter().fold(true, |all, x| all & (x.to_bits() & 0x7f80_0000 != 0x7f80_0000))
    }
}

pub(crate) fn dropout(cpu: &Cpu, d: Dropout, x: View, mut y: ViewMut) -> Result<()> {
    let (x, y) = (x.slice::<f32>()?, y.slice::<f32>()?);
    let len = y.len() / d.samples.len().max(1);
    let piece = cpu.threads.piece(y.len(), UNIT, GRAIN / 4);
    let (rate, scale) = (d.rate as f32, (1.0 / (1.0 - d.rate)) as f32);
    cpu.threads.over(x.chunks(piece).zip(y.chunks_mut(piece)).enumerate(), |(i, (x, y))| {
        let mut done = 0;
        while done < y.len() {
            // Up to the end of a sample, or of the random numbers that are made at once.
            let at = i * piece + done;
            let (sample, offset) = (d.samples[at / len], at % len);
            let skip = offset % 4;
            let n = (y.len() - done).min(len - offset).min(4 * BLOCKS - skip);
            let part = done..done + n;
            let draws = Draws { rng: d.rng, sample, block: (offset / 4) as u64, skip, rate, scale };
            cpu.simd.run(Drop { draws, x: &x[part.clone()], y: &mut y[part] });
            done += n;
        }
    });
    Ok(())
}

/// Blocks of four random numbers made at once.
const BLOCKS: usize = 64;

/// Random numbers from `skip` numbers into a block on: elements whose number is below `rate` are dropped, others scaled.
struct Draws {
    rng: Philox,
    sample: u64,
    block: u64,
    skip: usize,
    rate: f32,
    scale: f32,
}

struct Drop<'a> {
    draws: Draws,
    x: &'a [f32],
    y: &'a mut [f32],
}

impl Job for Drop<'_> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let Drop { draws, x, y } = self;
        let d = draws;
        let mut words = [[0; 4]; BLOCKS];
        for (b, w) in words.iter_mut().enumerate().take((d.skip + y.len()).div_ceil(4)) {
            *w = d.rng.block(d.sample, d.block + b as u64);
        }
        for ((y, &x), &w) in y.iter_mut().zip(x).zip(&words.as_flattened()[d.skip..]) {
            *y = if Philox::unit(w) < d.rate { 0.0 } else { x * d.scale };
        }
    }
}
