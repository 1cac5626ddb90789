//! Convolution and its two gradients as matrix products whose operands are gathered from the images while they are packed.
//!
//! Letters as in [`backend`](crate::tensor::backend); each group of channels is a product of its own.
use super::{
    Cpu,
    gemm::{Problem, solve},
    pack::{A, B},
    patches::{Patches, Source},
};
use crate::{
    Result,
    tensor::{View, ViewMut, backend::Conv2d},
};

/// Where the taps of a kernel are along one axis, relative to an output's place in the input.
fn offsets(c: &Conv2d, axis: usize) -> Vec<isize> {
    (0..c.kernel[axis]).map(|k| (k * c.dilation[axis]) as isize - c.padding[axis] as isize).collect()
}

/// Whether every output sees just the input pixel in its own place.
fn pointwise(c: &Conv2d) -> bool {
    c.kernel == [1, 1] && c.stride == [1, 1] && c.padding == [0, 0]
}

/// The patches of x that the outputs see, channels of group `g`.
fn patches<'a>(c: &Conv2d, x: &'a [f32], g: usize, out: [usize; 2]) -> Patches<'a> {
    let run = c.ci / c.groups;
    let source = Source { data: x, hw: c.hw, channels: c.ci, first: g * run, run };
    Patches::new(source, out, c.stride, &offsets(c, 0), &offsets(c, 1))
}

/// y[n,oh,ow,co] = patches of x times w, plus bias[co].
pub(crate) fn forward(cpu: &Cpu, c: Conv2d, x: View, w: View, bias: Option<View>, mut y: ViewMut) -> Result<()> {
    let (x, w, y) = (x.slice::<f32>()?, w.slice::<f32>()?, y.slice::<f32>()?);
    let bias = bias.map(|v| v.slice::<f32>()).transpose()?;
    let out = c.out()?;
    if y.is_empty() {
        return Ok(());
    }
    let (cig, cog) = (c.ci / c.groups, c.co / c.groups);
    let group = |g: usize| Problem {
        m: c.n * out[0] * out[1],
        n: cog,
        k: c.kernel[0] * c.kernel[1] * cig,
        // Without channels there are no patches, however many taps the kernel has.
        a: if pointwise(&c) || cig == 0 {
            A::Rows { data: x.get(g * cig..).unwrap_or_default(), ld: c.ci }
        } else {
            A::Pixels(patches(&c, x, g, out))
        },
        b: B::Rows { data: w.get(g * cog..).unwrap_or_default(), ld: c.co },
        bias: bias.map(|b| &b[g * cog..][..cog]),
        row: Box::new(move |i| i * c.co + g * cog),
    };
    let problems: Vec<Problem> = (0..c.groups).map(group).collect();
    solve(cpu, &problems, y);
    Ok(())
}

/// dw[kh,kw,ci/groups,co] = transposed patches of x times dy.
pub(crate) fn weight_grad(cpu: &Cpu, c: Conv2d, x: View, dy: View, mut dw: ViewMut) -> Result<()> {
    let (x, dy, dw) = (x.slice::<f32>()?, dy.slice::<f32>()?, dw.slice::<f32>()?);
    let out = c.out()?;
    if dw.is_empty() {
        return Ok(());
    }
    let (cig, cog) = (c.ci / c.groups, c.co / c.groups);
    let group = |g: usize| Problem {
        m: c.kernel[0] * c.kernel[1] * cig,
        n: cog,
        k: c.n * out[0] * out[1],
        a: if pointwise(&c) {
            A::Columns { data: x.get(g * cig..).unwrap_or_default(), ld: c.ci }
        } else {
            A::Taps(patches(&c, x, g, out))
        },
        b: B::Rows { data: dy.get(g * cog..).unwrap_or_default(), ld: c.co },
        bias: None,
        row: Box::new(move |i| i * c.co + g * cog),
    };
    let problems: Vec<Problem> = (0..c.groups).map(group).collect();
    solve(cpu, &problems, dw);
    Ok(())
}

/// dx[n,h,w,ci]: an input pixel sees the outputs that it went into. Pixels in the same place modulo the stride see them
/// through the same taps, so each such phase is a product of its own, and none multiplies zeros that the stride leaves.
pub(crate) fn input_grad(cpu: &Cpu, c: Conv2d, w: View, dy: View, mut dx: ViewMut) -> Result<()> {
    let (w, dy, dx) = (w.slice::<f32>()?, dy.slice::<f32>()?, dx.slice::<f32>()?);
    let out = c.out()?;
    if w.is_empty() || dx.is_empty() {
        dx.fill(0.0);
        return Ok(());
    }
    let mut problems = Vec::new();
    for g in 0..c.groups {
        for a in 0..c.stride[0].min(c.hw[0]) {
            for b in 0..c.stride[1].min(c.hw[1]) {
                problems.push(phase(&c, w, dy, out, g, [a, b]));
            }
        }
    }
    solve(cpu, &problems, dx);
    Ok(())
}

fn phase<'a>(c: &Conv2d, w: &'a [f32], dy: &'a [f32], out: [usize; 2], g: usize, first: [usize; 2]) -> Problem<'a> {
    let c = *c;
    let (cig, cog) = (c.ci / c.groups, c.co / c.groups);
    let taps = [taps(&c, 0, first[0]), taps(&c, 1, first[1])];
    let grid = [0, 1].map(|i| (c.hw[i] - first[i]).div_ceil(c.stride[i]));
    let source = Source { data: dy, hw: out, channels: c.co, first: g * cog, run: cog };
    let offsets = [0, 1].map(|i: usize| taps[i].iter().map(|t| t.1).collect::<Vec<_>>());
    let a = if pointwise(&c) {
        A::Rows { data: dy.get(g * cog..).unwrap_or_default(), ld: c.co }
    } else {
        A::Pixels(Patches::new(source, grid, [1, 1], &offsets[0], &offsets[1]))
    };
    let base = |u: usize, v: usize| (u * c.kernel[1] + v) * cig * c.co + g * cog;
    let bases: Vec<usize> = taps[0].iter().flat_map(|&(u, _)| taps[1].iter().map(move |&(v, _)| base(u, v))).collect();
    Problem {
        m: c.n * grid[0] * grid[1],
        n: cig,
        k: bases.len() * cog,
        a,
        b: B::Columns { data: w, ld: c.co, run: cog, bases },
        bias: None,
        row: Box::new(move |i| {
            let (n, h, w) = (i / (grid[0] * grid[1]), i / grid[1] % grid[0], i % grid[1]);
            let (h, w) = (first[0] + h * c.stride[0], first[1] + w * c.stride[1]);
            ((n * c.hw[0] + h) * c.hw[1] + w) * c.ci + g * cig
        }),
    }
}

/// The kernel elements through which the inputs `first`, `first` + stride, … of an axis went into outputs, and those outputs'
/// offsets from the input's ordinal, ascending.
fn taps(c: &Conv2d, axis: usize, first: usize) -> Vec<(usize, isize)> {
    let stride = c.stride[axis] as isize;
    let at = |k: usize| (first + c.padding[axis]) as isize - (k * c.dilation[axis]) as isize;
    (0..c.kernel[axis]).rev().filter(|&k| at(k) % stride == 0).map(|k| (k, at(k) / stride)).collect()
}
