//! 3×3 convolutions of stride 1 with 4 products for 9: Winograd's minimal filtering F(2×2, 3×3) and, for the weights'
//! gradient, F(3×3, 2×2) (Lavin and Gray 2016).
//!
//! A *tile* is 2×2 pixels of the output, with the 4×4 pixels of the input that they see. Both are transformed to 16 *points*, at
//! each of which the channels are multiplied as matrices. The transforms are sums of at most four values and halves, so that the
//! error stays close to that of the plain sum. Tiles are worked on in *strips*, of whole rows of tiles, that fit into the
//! second-level cache from the input's transform to the output's.
mod transform;

use super::{
    Cpu,
    isa::Simd,
    micro::{KC, Kernels, Layout, Pitch, Product, ROW},
    pack::Transpose,
    par::part,
};
use crate::{
    Result,
    tensor::{View, ViewMut, backend::Conv2d},
};
use std::ops::Range;
use transform::{Filters, Gradients, Inputs, Outputs, Taps};

/// Points of a tile.
const POINTS: usize = 16;
/// Tiles of a strip, about.
const STRIP: usize = 112;
/// Fewer channels are not worth the transforms, fewer tiles not that of the weights.
const CHANNELS: usize = 16;
const TILES: usize = 48;
/// Elements of the transformed operands of a weights' gradient that are multiplied at a time, about.
const BLOCK: usize = 1 << 20;

/// Whether a convolution is done this way.
pub(crate) fn suits(c: &Conv2d) -> bool {
    let shape = c.kernel == [3, 3] && c.stride == [1, 1] && c.dilation == [1, 1] && c.groups == 1;
    let size = |[h, w]: [usize; 2]| c.n * h.div_ceil(2) * w.div_ceil(2);
    shape
        && c.padding.iter().all(|&p| p <= 2)
        && c.ci.min(c.co) >= CHANNELS
        && c.out().is_ok_and(|out| size(out).min(size(c.hw)) >= TILES)
}

/// Images x[n,h,w,c].
#[derive(Clone, Copy)]
struct Images<'a> {
    data: &'a [f32],
    hw: [usize; 2],
    channels: usize,
}

/// The tiles that cover the outputs: rows of tiles are numbered over all images.
#[derive(Clone, Copy)]
struct Grid {
    /// Height and width of an output.
    out: [usize; 2],
    /// Tiles of an image.
    tiles: [usize; 2],
    /// Rows of tiles of all images.
    rows: usize,
    /// Zeros before the first pixel of an input.
    padding: [usize; 2],
}

impl Grid {
    fn new(n: usize, out: [usize; 2], padding: [usize; 2]) -> Grid {
        let tiles = out.map(|o| o.div_ceil(2));
        Grid { out, tiles, rows: n * tiles[0], padding }
    }

    /// The image of a row of tiles, and its first output row.
    fn place(&self, row: usize) -> (usize, usize) {
        (row / self.tiles[0], row % self.tiles[0] * 2)
    }

    /// Strips of about `tiles` tiles, a multiple of `times` of them where there are enough rows.
    fn strips(&self, tiles: usize, times: usize) -> Vec<Range<usize>> {
        let count = (self.rows * self.tiles[1]).div_ceil(tiles).next_multiple_of(times).clamp(1, self.rows);
        (0..count).map(|i| part(self.rows, 1, count, i)).collect()
    }

    fn tiles(&self, rows: &Range<usize>) -> usize {
        rows.len() * self.tiles[1]
    }

    /// Pixels of the outputs of some rows of tiles.
    fn pixels(&self, rows: &Range<usize>) -> usize {
        rows.clone().map(|r| (self.out[0] - self.place(r).1).min(2) * self.out[1]).sum()
    }
}

/// Where the transformed channels of a tile lie: planes of `tiles` rows of [`ROW`] elements, each row either a block of
/// channels of one point or, where there are few channels, those of several points.
#[derive(Clone, Copy)]
struct Planes {
    channels: usize,
    /// Channels with those that fill up a vector.
    width: usize,
    tiles: usize,
}

impl Planes {
    fn new(channels: usize, tiles: usize) -> Planes {
        Planes { channels, width: channels.next_multiple_of(16), tiles }
    }

    /// Points that share a row.
    fn shared(&self) -> usize {
        (KC / self.width).max(1)
    }

    fn blocks(&self) -> usize {
        self.channels.div_ceil(KC)
    }

    fn len(&self) -> usize {
        POINTS.div_ceil(self.shared()) * self.blocks() * apart(self.tiles * ROW)
    }

    /// Where the channels from `channel` (a multiple of 16) on of a point begin, in the row of the first tile.
    fn at(&self, point: usize, channel: usize) -> usize {
        let (shared, block) = (self.shared(), channel / KC);
        (point / shared * self.blocks() + block) * apart(self.tiles * ROW) + point % shared * self.width + channel % KC
    }
}

/// Elements from the matrix of `len` elements of one point to that of the next, whose places are written one after the other:
/// apart by no power of two, which would bring all 16 into the same few sets of a cache.
fn apart(len: usize) -> usize {
    len.next_multiple_of(16) + 16
}

/// Elements from row to row of a matrix of `n` columns of which whole panels are read; not a power of two.
fn pitch(n: usize) -> usize {
    n.next_multiple_of(16) + 16
}

/// Weights as the products want them: [panel of nr columns][point][k][nr].
struct Weights<'a> {
    w: &'a [f32],
    ci: usize,
    co: usize,
    /// For the input's gradient: the kernel turned round, from output to input channels.
    turned: bool,
}

impl Weights<'_> {
    /// Rows and columns of the matrix of a point.
    fn size(&self) -> [usize; 2] {
        if self.turned { [self.co, self.ci] } else { [self.ci, self.co] }
    }

    /// Elements of a panel.
    fn panel_len(&self, nr: usize) -> usize {
        POINTS * apart(self.size()[0] * nr)
    }

    /// Elements of all panels, and of what is needed besides to make one.
    fn need(&self, nr: usize) -> [usize; 2] {
        let [k, n] = self.size();
        [n.div_ceil(nr) * self.panel_len(nr), if self.turned { 9 * k * nr } else { 0 }]
    }

    fn panel(&self, simd: Simd, nr: usize, first: usize, u: &mut [f32], scratch: &mut [f32]) {
        let Weights { w, ci, co, turned } = *self;
        let [k, n] = self.size();
        let cols = (n - first).min(nr);
        if !turned {
            let data = &w[first..];
            return simd.vectors(Filters { data, tap_step: ci * co, row_step: co, k, cols, nr, u });
        }
        for (tap, to) in scratch.chunks_mut(k * nr).enumerate() {
            let from = &w[((8 - tap) * ci + first) * co..];
            simd.vectors(Transpose { from, from_step: co, to, to_step: nr, len: k, rows: cols });
        }
        simd.vectors(Filters { data: scratch, tap_step: k * nr, row_step: nr, k, cols, nr, u });
    }

    /// Transforms them all; `scratch` holds `each` elements for each thread.
    fn transform(&self, cpu: &Cpu, nr: usize, u: &mut [f32], scratch: &mut [f32], each: usize) {
        let panels = u.chunks_mut(self.panel_len(nr)).enumerate();
        cpu.threads.over_with(scratch.chunks_mut(each), panels, |scratch, (i, u)| {
            self.panel(cpu.simd, nr, i * nr, u, &mut scratch[..self.need(nr)[1]]);
        });
    }
}

/// y[n,out,co] = x[n,h,w,ci] seen through `weights`, plus bias[co].
fn correlate(cpu: &Cpu, x: Images, grid: Grid, weights: &Weights, bias: Option<&[f32]>, y: &mut [f32]) -> Result<()> {
    let kernels = Kernels::of(cpu.simd);
    let nr = kernels.nr;
    let [k, n] = weights.size();
    let parts = cpu.threads.count();
    let strips = grid.strips(STRIP, parts);
    let most = strips.iter().map(|s| grid.tiles(s)).max().unwrap_or(0);
    let [filters, turning] = weights.need(nr);
    let (inputs, products) = (Planes::new(k, most).len(), POINTS * apart(most * pitch(n)));
    let own = turning.max(inputs + products).next_multiple_of(16).max(1);
    let mut scratch = cpu.memory("conv2d", filters + parts * own)?;
    let (u, scratch) = bytemuck::cast_slice_mut::<u8, f32>(scratch.bytes_mut()).split_at_mut(filters);
    let scratch = &mut scratch[..parts * own];
    weights.transform(cpu, nr, u, scratch, own);

    let (mut left, mut work) = (y, Vec::new());
    for rows in strips {
        let y = cut(&mut left, grid.pixels(&rows) * n);
        work.push((rows, y));
    }
    let u = &*u;
    cpu.threads.over_with(scratch.chunks_mut(own), work.into_iter(), |scratch, (rows, y)| {
        let planes = Planes::new(k, grid.tiles(&rows));
        let (v, m) = scratch.split_at_mut(inputs);
        cpu.simd.vectors(Inputs { x, grid, rows: rows.clone(), planes, v });
        for (point, m) in m.chunks_mut(apart(planes.tiles * pitch(n))).take(POINTS).enumerate() {
            for (panel, u) in u.chunks(weights.panel_len(nr)).enumerate() {
                let u = &u[point * apart(k * nr)..][..k * nr];
                multiply(kernels, &planes, point, v, u, &mut m[panel * nr..], [pitch(n), (n - panel * nr).min(nr)]);
            }
        }
        cpu.simd.vectors(Outputs { m, pitch: pitch(n), grid, rows, channels: n, bias, y });
    });
    Ok(())
}

/// The product of a point of all tiles with a panel of weights.
fn multiply(
    kernels: &Kernels,
    planes: &Planes,
    point: usize,
    v: &[f32],
    u: &[f32],
    m: &mut [f32],
    [ldc, cols]: [usize; 2],
) {
    let (mr, nr, apart) = (kernels.mr, kernels.nr, Pitch::new(ldc));
    for channel in (0..planes.channels).step_by(KC) {
        let k = (planes.channels - channel).min(KC);
        for tile in (0..planes.tiles).step_by(mr) {
            let product = Product {
                a: &v[planes.at(point, channel) + tile * ROW..],
                layout: Layout::Rows,
                b: &u[channel * nr..],
                ldb: nr,
                rows: (planes.tiles - tile).min(mr),
                cols,
                k,
                add: channel > 0,
            };
            kernels.product(&product, &mut m[tile * ldc..], &apart);
        }
    }
}

/// See [`Backend::conv2d`](crate::tensor::Backend::conv2d).
pub(crate) fn forward(cpu: &Cpu, c: Conv2d, x: View, w: View, bias: Option<View>, mut y: ViewMut) -> Result<()> {
    let (x, w, y) = (x.slice::<f32>()?, w.slice::<f32>()?, y.slice::<f32>()?);
    let bias = bias.map(|v| v.slice::<f32>()).transpose()?;
    let weights = Weights { w, ci: c.ci, co: c.co, turned: false };
    let x = Images { data: x, hw: c.hw, channels: c.ci };
    correlate(cpu, x, Grid::new(c.n, c.out()?, c.padding), &weights, bias, y)
}

/// The gradient of the input is what the gradient of the output is seen as through the kernel turned round.
pub(crate) fn input_grad(cpu: &Cpu, c: Conv2d, w: View, dy: View, mut dx: ViewMut) -> Result<()> {
    let (w, dy, dx) = (w.slice::<f32>()?, dy.slice::<f32>()?, dx.slice::<f32>()?);
    let weights = Weights { w, ci: c.ci, co: c.co, turned: true };
    let dy = Images { data: dy, hw: c.out()?, channels: c.co };
    correlate(cpu, dy, Grid::new(c.n, c.hw, c.padding.map(|p| 2 - p)), &weights, None, dx)
}

/// dw: the products of transformed inputs and gradients, summed over all tiles.
pub(crate) fn weight_grad(cpu: &Cpu, c: Conv2d, x: View, dy: View, mut dw: ViewMut) -> Result<()> {
    let (x, dy, dw) = (x.slice::<f32>()?, dy.slice::<f32>()?, dw.slice::<f32>()?);
    let kernels = Kernels::of(cpu.simd);
    let out = c.out()?;
    let grid = Grid::new(c.n, out, c.padding);
    let x = Images { data: x, hw: c.hw, channels: c.ci };
    let dy = Images { data: dy, hw: out, channels: c.co };
    let pitch = pitch(c.co);
    // The order of the sums depends on the strips, hence not on the threads.
    let strips = grid.strips(STRIP, 1);
    let most = strips.iter().map(|s| grid.tiles(s)).max().unwrap_or(0);
    let (inputs, gradients) = (Planes::new(c.ci, most).len(), POINTS * apart(most * pitch));
    let at_once = (BLOCK / (inputs + gradients)).clamp(1, strips.len());
    let products = POINTS * apart(c.ci * pitch);
    let mut scratch = cpu.memory("conv2d_weight_grad", products + at_once * (inputs + gradients))?;
    let (m, scratch) = bytemuck::cast_slice_mut::<u8, f32>(scratch.bytes_mut()).split_at_mut(products);
    let parts = cpu.threads.count();
    for (block, strips) in strips.chunks(at_once).enumerate() {
        let scratch = &mut scratch[..strips.len() * (inputs + gradients)];
        let work = strips.iter().zip(scratch.chunks_mut(inputs + gradients));
        cpu.threads.over(work, |(rows, scratch)| {
            let (v, e) = scratch.split_at_mut(inputs);
            let planes = Planes::new(c.ci, grid.tiles(rows));
            cpu.simd.vectors(Inputs { x, grid, rows: rows.clone(), planes, v });
            cpu.simd.vectors(Gradients { dy, grid, rows: rows.clone(), pitch, e });
        });
        let scratch = &*scratch;
        cpu.threads.over(m.chunks_mut(apart(c.ci * pitch)).enumerate(), |(point, m)| {
            for (s, (rows, scratch)) in strips.iter().zip(scratch.chunks(inputs + gradients)).enumerate() {
                let (v, e) = scratch.split_at(inputs);
                let planes = Planes::new(c.ci, grid.tiles(rows));
                let e = &e[point * apart(planes.tiles * pitch)..][..planes.tiles * pitch];
                accumulate(kernels, &planes, point, [v, e], m, [pitch, c.co], block + s > 0);
            }
        });
    }
    let m = &*m;
    let mut taps: Vec<&mut [f32]> = dw.chunks_mut(c.ci * c.co).collect();
    let mut work = Vec::new();
    for i in 0..parts {
        let rows = part(c.ci, 1, parts, i);
        let mine: Vec<&mut [f32]> = taps.iter_mut().map(|tap| cut(tap, rows.len() * c.co)).collect();
        work.push((rows, mine));
    }
    cpu.threads.over(work.into_iter(), |(rows, dw)| cpu.simd.vectors(Taps { m, pitch, ci: c.ci, rows, co: c.co, dw }));
    Ok(())
}

/// Takes the first `len` elements off `left`.
fn cut<'a>(left: &mut &'a mut [f32], len: usize) -> &'a mut [f32] {
    let (first, rest) = std::mem::take(left).split_at_mut(len);
    *left = rest;
    first
}

/// Adds the products of the tiles of a strip at a point to m[ci][pitch], or puts them there.
fn accumulate(
    kernels: &Kernels,
    planes: &Planes,
    point: usize,
    [v, e]: [&[f32]; 2],
    m: &mut [f32],
    [pitch, n]: [usize; 2],
    add: bool,
) {
    let (mr, nr, apart) = (kernels.mr, kernels.nr, Pitch::new(pitch));
    for j in (0..n).step_by(nr) {
        for block in (0..planes.channels).step_by(KC) {
            let width = (planes.channels - block).min(KC);
            for i in (0..width).step_by(mr) {
                let product = Product {
                    a: &v[planes.at(point, block) + i..],
                    layout: Layout::Columns(ROW),
                    b: &e[j..],
                    ldb: pitch,
                    rows: (width - i).min(mr),
                    cols: (n - j).min(nr),
                    k: planes.tiles,
                    add,
                };
                kernels.product(&product, &mut m[(block + i) * pitch + j..], &apart);
            }
        }
    }
}
