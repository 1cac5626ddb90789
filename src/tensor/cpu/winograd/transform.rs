//! The transforms between pixels or weights and points, on the channels of a vector at a time.
use super::{Grid, Images, KC, POINTS, Planes, apart};
use crate::tensor::cpu::{
    isa::VectorJob,
    lanes::{Lanes, Vectors},
};
use std::{array::from_fn, ops::Range};

/// Applies a transform of N values to M along both axes of a tile.
#[inline(always)]
fn both<L: Lanes, const N: usize, const M: usize>(
    v: Vectors<L>,
    f: impl Fn(Vectors<L>, [L; N]) -> [L; M],
    d: [[L; N]; N],
) -> [[L; M]; M] {
    // Loops, not closures: what the compiler does not inline would lose the instructions of `L`.
    let mut rows = [[v.zero(); M]; N];
    for (row, d) in rows.iter_mut().zip(d) {
        *row = f(v, d);
    }
    let mut points = [[v.zero(); M]; M];
    for j in 0..M {
        let mut column = [v.zero(); N];
        for (value, row) in column.iter_mut().zip(&rows) {
            *value = row[j];
        }
        for (row, value) in points.iter_mut().zip(f(v, column)) {
            row[j] = value;
        }
    }
    points
}

/// Pixels of an input.
#[inline(always)]
fn input<L: Lanes>(v: Vectors<L>, [a, b, c, d]: [L; 4]) -> [L; 4] {
    [v.sub(a, c), v.add(b, c), v.sub(c, b), v.sub(b, d)]
}

/// Three weights.
#[inline(always)]
fn filter<L: Lanes>(v: Vectors<L>, [a, b, c]: [L; 3]) -> [L; 4] {
    let (ends, half) = (v.add(a, c), v.splat(0.5));
    [a, v.mul(half, v.add(ends, b)), v.mul(half, v.sub(ends, b)), c]
}

/// The gradients of two pixels of an output.
#[inline(always)]
fn gradient<L: Lanes>(v: Vectors<L>, [a, b]: [L; 2]) -> [L; 4] {
    let half = v.splat(0.5);
    [a, v.mul(half, v.add(a, b)), v.mul(half, v.sub(a, b)), b]
}

/// To two pixels of an output.
#[inline(always)]
fn output<L: Lanes>(v: Vectors<L>, [a, b, c, d]: [L; 4]) -> [L; 2] {
    [v.add(a, v.add(b, c)), v.sub(v.sub(b, c), d)]
}

/// To the gradients of three weights.
#[inline(always)]
fn taps<L: Lanes>(v: Vectors<L>, [a, b, c, d]: [L; 4]) -> [L; 3] {
    let middle = v.add(b, c);
    [v.add(a, middle), v.sub(b, c), v.sub(middle, d)]
}

/// Weights of a panel of columns: nine matrices of k rows to u[point][k][nr].
pub(super) struct Filters<'a> {
    /// Element (tap, p, j) at tap·tap_step + p·row_step + j.
    pub data: &'a [f32],
    pub tap_step: usize,
    pub row_step: usize,
    pub k: usize,
    /// Columns that there are, and those of the panel.
    pub cols: usize,
    pub nr: usize,
    pub u: &'a mut [f32],
}

impl VectorJob for Filters<'_> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: Vectors<L>) {
        let Filters { data, tap_step, row_step, k, cols, nr, u } = self;
        for p in 0..k {
            for j in (0..nr).step_by(L::N) {
                let len = cols.saturating_sub(j);
                let at = |tap: usize| if len > 0 { tap * tap_step + p * row_step + j } else { 0 };
                let g = from_fn(|a| from_fn(|b| l.load_first(data, at(3 * a + b), len)));
                for (i, row) in both(l, filter, g).into_iter().enumerate() {
                    for (o, v) in row.into_iter().enumerate() {
                        l.store(v, u, (4 * i + o) * apart(k * nr) + p * nr + j);
                    }
                }
            }
        }
    }
}

/// The inputs that the tiles of some rows see, to planes of points.
pub(super) struct Inputs<'a> {
    pub x: Images<'a>,
    pub grid: Grid,
    pub rows: Range<usize>,
    pub planes: Planes,
    pub v: &'a mut [f32],
}

/// No pixel: padding.
const NOWHERE: usize = usize::MAX;

impl Inputs<'_> {
    /// Where the 4×4 pixels of a tile begin.
    #[inline(always)]
    fn pixels(&self, row: usize, column: usize) -> [[usize; 4]; 4] {
        let (n, h) = self.grid.place(row);
        let [height, width] = self.x.hw;
        // Padding is at most two.
        let (h, w) = (h.wrapping_sub(self.grid.padding[0]), (2 * column).wrapping_sub(self.grid.padding[1]));
        let mut pixels = [[NOWHERE; 4]; 4];
        for (i, row) in pixels.iter_mut().enumerate() {
            for (j, pixel) in row.iter_mut().enumerate() {
                let (h, w) = (h.wrapping_add(i), w.wrapping_add(j));
                if h < height && w < width {
                    *pixel = ((n * height + h) * width + w) * self.x.channels;
                }
            }
        }
        pixels
    }
}

impl VectorJob for Inputs<'_> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: Vectors<L>) {
        let channels = self.x.channels;
        let blocks = (0..channels).step_by(KC);
        let places: Vec<[usize; POINTS]> = blocks.map(|block| from_fn(|p| self.planes.at(p, block))).collect();
        let mut tile = 0;
        for row in self.rows.clone() {
            for column in 0..self.grid.tiles[1] {
                let pixels = self.pixels(row, column);
                let inside = pixels.iter().flatten().all(|&p| p != NOWHERE);
                for c in (0..channels).step_by(L::N) {
                    let len = channels - c;
                    let (places, at) = (&places[c / KC], tile * super::ROW + c % KC);
                    let x = &self.x.data[c..];
                    let d = if inside && len >= L::N {
                        let rows: [&[f32]; 4] = from_fn(|i| &x[pixels[i][0]..][..3 * channels + L::N]);
                        from_fn(|i| from_fn(|j| l.load(rows[i], j * channels)))
                    } else {
                        from_fn(|i| {
                            from_fn(|j| match pixels[i][j] {
                                NOWHERE => l.zero(),
                                at => l.load_first(x, at, len),
                            })
                        })
                    };
                    for (i, points) in both(l, input, d).into_iter().enumerate() {
                        for (j, v) in points.into_iter().enumerate() {
                            l.store(v, self.v, places[4 * i + j] + at);
                        }
                    }
                }
                tile += 1;
            }
        }
    }
}

/// The gradients of the tiles of some rows, to e[point][tile][pitch].
pub(super) struct Gradients<'a> {
    pub dy: Images<'a>,
    pub grid: Grid,
    pub rows: Range<usize>,
    pub pitch: usize,
    pub e: &'a mut [f32],
}

impl VectorJob for Gradients<'_> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: Vectors<L>) {
        let Gradients { dy, grid, rows, pitch, e } = self;
        let tiles = grid.tiles(&rows);
        let [height, width] = grid.out;
        let mut tile = 0;
        for row in rows {
            let (n, h) = grid.place(row);
            for w in (0..width).step_by(2) {
                for c in (0..dy.channels).step_by(L::N) {
                    let len = dy.channels - c;
                    let d = from_fn(|i| {
                        from_fn(|j| {
                            let (h, w) = (h + i, w + j);
                            if h < height && w < width {
                                l.load_first(dy.data, ((n * height + h) * width + w) * dy.channels + c, len)
                            } else {
                                l.zero()
                            }
                        })
                    });
                    for (i, points) in both(l, gradient, d).into_iter().enumerate() {
                        for (j, v) in points.into_iter().enumerate() {
                            l.store(v, e, (4 * i + j) * apart(tiles * pitch) + tile * pitch + c);
                        }
                    }
                }
                tile += 1;
            }
        }
    }
}

/// The products m[point][tile][pitch] of the tiles of some rows, to their pixels, plus bias.
pub(super) struct Outputs<'a> {
    pub m: &'a [f32],
    pub pitch: usize,
    pub grid: Grid,
    pub rows: Range<usize>,
    pub channels: usize,
    pub bias: Option<&'a [f32]>,
    /// The pixels of these rows.
    pub y: &'a mut [f32],
}

impl VectorJob for Outputs<'_> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: Vectors<L>) {
        let Outputs { m, pitch, grid, rows, channels, bias, y } = self;
        let tiles = grid.tiles(&rows);
        let [height, width] = grid.out;
        let (mut tile, mut start) = (0, 0);
        for row in rows {
            let high = (height - grid.place(row).1).min(2);
            for w in (0..width).step_by(2) {
                let wide = (width - w).min(2);
                for c in (0..channels).step_by(L::N) {
                    let len = channels - c;
                    let points =
                        from_fn(|i| from_fn(|j| l.load(m, (4 * i + j) * apart(tiles * pitch) + tile * pitch + c)));
                    let bias = bias.map_or(l.zero(), |b| l.load_first(b, c, len));
                    let pixels = both(l, output, points);
                    for (i, pixels) in pixels.into_iter().enumerate().take(high) {
                        for (j, v) in pixels.into_iter().enumerate().take(wide) {
                            l.store_first(l.add(v, bias), y, start + (i * width + w + j) * channels + c, len);
                        }
                    }
                }
                tile += 1;
            }
            start += high * width * channels;
        }
    }
}

/// Rows of the products m[point][ci][pitch] to the gradients of nine weights each.
pub(super) struct Taps<'a> {
    pub m: &'a [f32],
    pub pitch: usize,
    /// Rows of a point's matrix, and the ones that are wanted.
    pub ci: usize,
    pub rows: Range<usize>,
    pub co: usize,
    /// These rows of each tap.
    pub dw: Vec<&'a mut [f32]>,
}

impl VectorJob for Taps<'_> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: Vectors<L>) {
        let Taps { m, pitch, ci, rows, co, mut dw } = self;
        for (at, row) in rows.enumerate() {
            for c in (0..co).step_by(L::N) {
                let points = from_fn(|i| from_fn(|j| l.load(m, (4 * i + j) * apart(ci * pitch) + row * pitch + c)));
                for (i, weights) in both(l, taps, points).into_iter().enumerate() {
                    for (j, v) in weights.into_iter().enumerate() {
                        l.store_first(v, dw[3 * i + j], at * co + c, co - c);
                    }
                }
            }
        }
    }
}
