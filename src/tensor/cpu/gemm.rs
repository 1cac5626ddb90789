//! Matrix products: packed, tiled for cache and registers, one driver for all operands (see [`pack`](super::pack)) and all
//! instruction sets (see [`micro`](super::micro)).
//!
//! The order in which a result's products are summed depends on the shapes only, never on threads.
use super::{
    Cpu,
    ahead::{Ahead, Fetch},
    micro::{Dots, KC, Kernels, MAX_ROWS, ROW, Tile},
    pack::{A, B},
    par::{Shared, part},
};
use crate::{
    Result,
    tensor::{View, ViewMut, backend::Gemm},
};
use std::ops::Range;

/// The most rows of a packed block of `a` (about half a megabyte, for the second-level cache) and columns and rows of `b`.
const MC: usize = 280;
const NC: usize = 1024;
const KS: usize = 1024;
/// Up to so many rows a `b` that is contiguous along k is multiplied as dot products instead of being transposed.
const DOT_ROWS: usize = 32;
/// Elements of `b` that stay in the second-level cache while it is read in any order, and rows of a larger one that are read
/// side by side.
const CACHED: usize = 1 << 18;
const STREAMS: usize = 64;
/// Multiply-adds that are worth a thread: some 15 µs, what it takes to wake one.
const GRAIN: usize = 1_000_000;

/// c[m,n] = a[m,k] · b[k,n] (+ bias[n]).
pub(crate) struct Problem<'a> {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a: A<'a>,
    pub b: B<'a>,
    pub bias: Option<&'a [f32]>,
    /// Where row i of the result starts; its n elements lie there without gaps, and no two rows of any problem of one call
    /// overlap.
    pub row: Box<dyn Fn(usize) -> usize + Sync + 'a>,
}

/// How `b` is read: packed, which pays from some number of rows on; where it lies, for few rows or if it came in panels; or,
/// where it is contiguous along k, for few rows, as dot products.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    Packed,
    Direct,
    Panels,
    Dot,
}

impl Problem<'_> {
    fn way(&self) -> Way {
        let direct = match self.k * self.n {
            ..=CACHED => 3 * MAX_ROWS,
            // Narrow rows of a large b lie close enough together for the second tile to find them in a cache.
            _ if self.n <= NC => 2 * MAX_ROWS,
            _ => MAX_ROWS,
        };
        match self.b {
            _ if self.k == 0 => Way::Packed,
            B::Panels { .. } => Way::Panels,
            B::Rows { .. } if self.m <= direct => Way::Direct,
            B::Columns { .. } if self.m <= DOT_ROWS && self.a.by_rows() => Way::Dot,
            _ => Way::Packed,
        }
    }

    /// Columns of the inner dimension per block: nearly equal blocks of at most [`KC`], within the runs of `b` for dot products.
    fn block(&self) -> usize {
        let even = |k: usize| k.div_ceil(k.div_ceil(KC).max(1)).next_multiple_of(16).min(KC);
        match &self.b {
            B::Columns { run, .. } if self.way() == Way::Dot => even(*run),
            // Few rows at a time, which are then read as as many long streams.
            B::Rows { .. } if self.way() == Way::Direct && self.k * self.n > CACHED => self.k.min(STREAMS),
            _ => even(self.k),
        }
    }

    /// Columns that are computed together: for packed ones as many as the second-level cache holds of `b`.
    fn width(&self) -> usize {
        match self.way() {
            Way::Packed if self.k <= KS / 2 => 2 * NC,
            Way::Packed => NC,
            _ => self.n.max(1),
        }
    }

    /// The blocks of columns and inner indices that `b` is packed in at a time; with no inner index one that is empty.
    fn super_blocks(&self, cols: Range<usize>) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
        let (block, width, k) = (self.block().max(1), self.width(), self.k);
        let most = (KS / block * block).max(block);
        cols.clone().step_by(width).flat_map(move |j| {
            let cols = j..cols.end.min(j + width);
            (0..k.max(1)).step_by(most).map(move |q| (cols.clone(), q..k.min(q + most)))
        })
    }

    /// Rows of a tile, and of a packed block of `a`: nearly equal tiles and blocks, since one of few rows keeps the units waiting.
    fn rows(&self, kernels: &Kernels) -> [usize; 2] {
        let mr = self.m.div_ceil(self.m.div_ceil(kernels.mr).max(1)).max(1);
        let tiles = self.m.div_ceil(mr).max(1);
        [mr, tiles.div_ceil(tiles.div_ceil(MC / mr)) * mr]
    }

    /// Elements of packed `a` and `b` that one thread needs at most, for this product or a part of it of any smaller sizes.
    fn scratch(&self, kernels: &Kernels) -> [usize; 2] {
        let a = (self.m + kernels.mr).min(MC) * self.a.panel(1);
        let packed = |k: usize, n: usize| k.min(self.k) * n.min(self.n.next_multiple_of(kernels.nr));
        let b = match self.way() {
            Way::Packed => packed(KS, NC).max(packed(KS / 2, 2 * NC)),
            // The last, incomplete panel.
            Way::Direct => packed(KS, kernels.nr),
            Way::Panels | Way::Dot => 0,
        };
        [a.next_multiple_of(16), b]
    }
}

/// Elements of memory that [`alone`] needs for `p`, and for products of its operands' parts.
pub(crate) fn scratch(cpu: &Cpu, p: &Problem) -> usize {
    p.scratch(Kernels::of(cpu.simd)).iter().sum()
}

/// Computes one product in this thread, and adds it to what is in `c` if `add` says so. What [`Problem::row`] promises holds for
/// all that threads compute in `c` meanwhile.
pub(crate) fn alone(cpu: &Cpu, p: &Problem, add: bool, c: &Shared, scratch: &mut [f32]) {
    let kernels = Kernels::of(cpu.simd);
    let (a, b) = scratch.split_at_mut(p.scratch(kernels)[0]);
    Worker { cpu, kernels, p, add, c, a }.run(0..p.m, 0..p.n, b);
}

/// Computes independent products, cut over the device's threads.
pub(crate) fn solve(cpu: &Cpu, problems: &[Problem], c: &mut [f32]) {
    solve_into(cpu, problems, false, c);
}

/// The same, added to what is in `c` if `add` says so.
pub(crate) fn solve_into(cpu: &Cpu, problems: &[Problem], add: bool, c: &mut [f32]) {
    let kernels = Kernels::of(cpu.simd);
    let work: usize = problems.iter().map(|p| p.m * p.n * p.k.max(1)).sum();
    let parts = cpu.threads.parts(work, GRAIN);
    let need = problems.iter().map(|p| p.scratch(kernels));
    let [a, b] = need.fold([0, 0], |x, y| [x[0].max(y[0]), x[1].max(y[1])]);
    let each = (a + b).max(1);
    let mut scratch = cpu.scratch(each * parts);
    let scratch: &mut [f32] = &mut bytemuck::cast_slice_mut(scratch.bytes_mut())[..each * parts];
    let c = Shared::new(c);
    let job = |p: &Problem, rows, cols, scratch: &mut [f32]| {
        let (a, b) = scratch.split_at_mut(a);
        Worker { cpu, kernels, p, add, c: &c, a }.run(rows, cols, b);
    };
    if problems.len() >= parts {
        let own = scratch.chunks_mut(each);
        return cpu.threads.over_with(own, problems.iter(), |scratch, p| job(p, 0..p.m, 0..p.n, scratch));
    }
    for p in problems {
        let [mr, _] = p.rows(kernels);
        let tiles = [p.m.div_ceil(mr), p.n.div_ceil(kernels.nr)];
        if p.way() == Way::Packed && (p.m >= p.n || tiles[1] < parts) && tiles[0] >= parts {
            let (b, own) = scratch.split_at_mut(p.scratch(kernels)[1]);
            by_rows(cpu, p, add, &c, b, &mut own[..a * parts]);
            continue;
        }
        // Each part packs all of a, if b is packed too; else there are few rows of it.
        let cut = if p.way() == Way::Packed { parts } else { cpu.threads.pieces(tiles[1], 4) };
        let cols: Vec<_> = (0..cut).map(|i| part(p.n, kernels.nr, cut, i)).collect();
        cpu.threads
            .over_with(scratch.chunks_mut(each), cols.into_iter(), |scratch, cols| job(p, 0..p.m, cols, scratch));
    }
}

/// One product whose rows the threads divide: they pack each block of b together, then use it together. `own` is memory for
/// packed blocks of `a`, a part of it for each thread that takes part.
fn by_rows(cpu: &Cpu, p: &Problem, add: bool, c: &Shared, b: &mut [f32], own: &mut [f32]) {
    let kernels = Kernels::of(cpu.simd);
    let each = p.scratch(kernels)[0];
    let (block, nr, [mr, _]) = (p.block().max(1), kernels.nr, p.rows(kernels));
    for (cols, ks) in p.super_blocks(0..p.n) {
        let panels = cols.len().div_ceil(nr);
        let group = panels.div_ceil(cpu.threads.pieces(panels, 2)) * nr;
        let (mut left, mut items) = (&mut *b, Vec::new());
        for q in ks.clone().step_by(block) {
            let q = q..ks.end.min(q + block);
            for j in cols.clone().step_by(group) {
                let cols = j..cols.end.min(j + group);
                let (out, rest) = left.split_at_mut(cols.len().next_multiple_of(nr) * q.len());
                left = rest;
                items.push((q.clone(), cols, out));
            }
        }
        cpu.threads.over(items.into_iter(), |(q, cols, out)| p.b.pack(cpu.simd, q, cols, nr, out));
        let b = &*b;
        let cut = cpu.threads.pieces(p.m.div_ceil(mr), 6);
        let rows: Vec<_> = (0..cut).map(|i| part(p.m, mr, cut, i)).collect();
        cpu.threads.over_with(own.chunks_exact_mut(each), rows.into_iter(), |a, rows| {
            Worker { cpu, kernels, p, add, c, a }.blocks(rows, &cols, &ks, b);
        });
    }
}

/// One thread at one problem.
struct Worker<'a, 'p> {
    cpu: &'a Cpu,
    kernels: &'static Kernels,
    p: &'a Problem<'p>,
    /// Whether to add to what is in `c`.
    add: bool,
    c: &'a Shared<'a>,
    /// For packed blocks of `a`.
    a: &'a mut [f32],
}

impl Worker<'_, '_> {
    /// The products of some rows and columns; `b` is for packed blocks of that operand.
    fn run(&mut self, rows: Range<usize>, cols: Range<usize>, b: &mut [f32]) {
        let (p, nr, block) = (self.p, self.kernels.nr, self.p.block().max(1));
        if rows.is_empty() || cols.is_empty() {
            return;
        }
        let [_, mc] = p.rows(self.kernels);
        for (cols, ks) in p.super_blocks(cols) {
            if p.way() == Way::Packed && rows.len() <= mc && !ks.is_empty() {
                self.rows(rows.clone(), 0..0, &cols, &ks, Packed::Soon(b));
                continue;
            }
            // Rows of b are read better side by side than panel by panel.
            if matches!(p.way(), Way::Packed | Way::Direct) {
                let whole = cols.start + cols.len() / nr * nr;
                let packed = if p.way() == Way::Packed { cols.clone() } else { whole..cols.end };
                let width = packed.len().next_multiple_of(nr);
                for q in ks.clone().step_by(block) {
                    let at = (q - ks.start) * width;
                    p.b.pack(self.cpu.simd, q..ks.end.min(q + block), packed.clone(), nr, &mut b[at..]);
                }
            }
            self.blocks(rows.clone(), &cols, &ks, b);
        }
    }

    /// The products with one packed block of b.
    fn blocks(&mut self, rows: Range<usize>, cols: &Range<usize>, ks: &Range<usize>, b: &[f32]) {
        let [_, mc] = self.p.rows(self.kernels);
        for i0 in rows.clone().step_by(mc) {
            let i1 = rows.end.min(i0 + mc);
            self.rows(i0..i1, i1..rows.end.min(i1 + mc), cols, ks, Packed::Ready(b));
        }
    }

    /// The products of a block of rows with the columns `cols` over the inner range `ks`; `next` is the block of rows after it.
    fn rows(&mut self, rows: Range<usize>, next: Range<usize>, cols: &Range<usize>, ks: &Range<usize>, mut b: Packed) {
        let (p, block) = (self.p, self.p.block().max(1));
        let mut starts = [0; MC];
        for (s, i) in starts.iter_mut().zip(rows.clone()) {
            *s = (p.row)(i) + cols.start;
            assert!(*s + cols.len() <= self.c.len(), "row {i} of a product lies outside its result");
        }
        let starts = &starts[..rows.len()];
        let mut q = ks.start;
        loop {
            let end = match &p.b {
                B::Columns { run, .. } if p.way() == Way::Dot => ks.end.min(q + block).min((q / run + 1) * run),
                _ => ks.end.min(q + block),
            };
            let (rows, cols) = (rows.clone(), cols.clone());
            let after = match end < ks.end {
                true => [rows.clone(), end..ks.end.min(end + block)],
                false => [next.clone(), ks.start..ks.end.min(ks.start + block)],
            };
            let step = Step { rows, starts, cols, q: q..end, after, k0: ks.start, last: end == p.k };
            match p.way() {
                Way::Dot => self.dots(&step),
                _ => self.tiles(&step, &mut b),
            }
            q = end;
            if q >= ks.end {
                return;
            }
        }
    }

    fn bias(&self, step: &Step, at: usize) -> *const f32 {
        match self.p.bias {
            Some(b) if step.last => b[at..].as_ptr(),
            _ => std::ptr::null(),
        }
    }

    fn tiles(&mut self, step: &Step, packed: &mut Packed) {
        let (p, simd, nr) = (self.p, self.cpu.simd, self.kernels.nr);
        let [mr, _] = p.rows(self.kernels);
        let functions = if p.a.by_rows() { self.kernels.by_rows } else { self.kernels.by_columns };
        let (panel, k, way) = (p.a.panel(mr), step.q.len(), p.way());
        let (width, tiles) = (step.cols.len(), step.starts.len().div_ceil(mr));
        let rows = |i: usize| step.rows.start + i * mr..step.rows.end.min(step.rows.start + (i + 1) * mr);
        // Panels of a are packed one by one while the first columns are computed, or all before.
        let carries = tiles > 1 && p.a.can_carry(k, nr);
        if k > 0 {
            p.a.pack(simd, if carries { rows(0) } else { step.rows.clone() }, step.q.clone(), mr, self.a);
        }
        let mut ahead = Ahead::NOTHING;
        for j in (0..width).step_by(nr) {
            let (at, cols) = (step.cols.start + j, nr.min(width - j));
            let next = step.cols.end.min(at + nr)..step.cols.end.min(at + 2 * nr);
            // Where the next panel of b is packed while the last tile of this one is computed.
            let mut there = None;
            let (b, ldb) = match (&p.b, way) {
                (B::Rows { data, ld }, Way::Direct) if cols == nr => {
                    // All nr columns of the k rows are inside.
                    (data[step.q.start * ld + at..][..(k - 1) * ld + nr].as_ptr(), *ld)
                }
                // A panel holds all k rows of its nr columns.
                (B::Panels { data }, _) => (data[at * p.k + step.q.start * nr..][..k * nr].as_ptr(), nr),
                _ => match packed {
                    Packed::Soon(b) => {
                        let (even, odd) = b.split_at_mut(k * nr);
                        let [here, other] = if (j / nr).is_multiple_of(2) { [even, odd] } else { [odd, even] };
                        // The first one; the others while the last tile before was computed, if they are whole.
                        if j == 0 || cols < nr || !p.b.can_carry() {
                            p.b.pack(simd, step.q.clone(), at..at + cols, nr, &mut here[..k * nr]);
                        }
                        there = (next.len() == nr && p.b.can_carry()).then_some(other);
                        ahead.b = match next.is_empty() {
                            true => Fetch::NOTHING,
                            false => p.b.fetch(step.q.clone(), next.clone(), k * (tiles - 1).max(1)),
                        };
                        (here[..k * nr].as_ptr(), nr)
                    }
                    Packed::Ready(b) => {
                        // All panels, or the last one only.
                        let (columns, at) = if way == Way::Packed { (width.next_multiple_of(nr), j) } else { (nr, 0) };
                        let (here, rest) = b[(step.q.start - step.k0) * columns + at * k..].split_at(k * nr);
                        ahead.b = match rest.get(..k * nr) {
                            Some(next) => Fetch::new(next, 1, next.len(), next.len(), k * tiles),
                            None => Fetch::NOTHING,
                        };
                        (here.as_ptr(), nr)
                    }
                },
            };
            if j == nr && k > 0 && !step.after[0].is_empty() {
                let [rows, ks] = step.after.clone();
                let rows = if carries { rows.start..rows.end.min(rows.start + mr) } else { rows };
                ahead.a = p.a.fetch(rows, ks, k * tiles * (width - j).div_ceil(nr));
            }
            let mut tile = Tile {
                k,
                a: std::ptr::null(),
                step: if p.a.by_rows() { 1 } else { mr },
                b,
                ldb,
                c: self.c.start().wrapping_add(j),
                rows: std::ptr::null(),
                cols,
                add: self.add || step.q.start > 0,
                bias: self.bias(step, at),
            };
            for (i, starts) in step.starts.chunks(mr).enumerate() {
                let (a, a_next) = self.a.split_at_mut((i + 1) * panel);
                if i + 1 == tiles {
                    if let Some(there) = there.take() {
                        ahead.carry = p.b.carry(step.q.clone(), next.clone(), there);
                    }
                } else if carries && j == 0 {
                    ahead.carry = p.a.carry(rows(i + 1), step.q.clone(), nr, a_next);
                    if i + 2 < tiles {
                        ahead.a = p.a.fetch(rows(i + 2), step.q.clone(), k);
                    }
                }
                (tile.a, tile.rows) = (a[i * panel..].as_ptr(), starts.as_ptr());
                // SAFETY: a is a packed panel of starts.len() ≤ mr rows; b was checked to hold k rows of nr columns; each start
                // plus the columns was checked to lie in c, where this thread alone writes these rows and columns; bias has n
                // elements. What is packed ahead lies in other panels. `kernels` comes from `Kernels::of`.
                unsafe { functions[starts.len() - 1](&tile, &mut ahead) };
            }
        }
    }

    fn dots(&mut self, step: &Step) {
        let (p, k) = (self.p, step.q.len());
        let B::Columns { data, ld, run, bases } = &p.b else { return };
        p.a.pack(self.cpu.simd, step.rows.clone(), step.q.clone(), p.rows(self.kernels)[0], self.a);
        let per = self.kernels.dots.len();
        // So few rows of b at a time that they stay in the first-level cache for all rows of a.
        for j in (0..step.cols.len()).step_by(16) {
            let cols = 16.min(step.cols.len() - j);
            let base = bases[step.q.start / run] + step.q.start % run;
            let b = data[base + (step.cols.start + j) * ld..][..(cols - 1) * ld + k].as_ptr();
            for (i, starts) in step.starts.chunks(per).enumerate() {
                let dots = Dots {
                    k,
                    a: self.a[i * per * ROW..][..starts.len() * ROW].as_ptr(),
                    b,
                    ldb: *ld,
                    c: self.c.start().wrapping_add(j),
                    rows: starts.as_ptr(),
                    cols,
                    add: self.add || step.q.start > 0,
                    bias: self.bias(step, step.cols.start + j),
                };
                // SAFETY: as in `tiles`; a holds starts.len() rows packed by rows, b was checked to hold k elements of each of
                // its rows.
                unsafe { self.kernels.dots[starts.len() - 1](&dots) };
            }
        }
    }
}

/// Memory of packed blocks of b.
enum Packed<'a> {
    Ready(&'a [f32]),
    /// Room for two panels, each of which is packed just before its only use.
    Soon(&'a mut [f32]),
}

/// One block of the inner dimension.
struct Step<'a> {
    rows: Range<usize>,
    /// Where the first of `cols` of each row lies in c.
    starts: &'a [usize],
    cols: Range<usize>,
    /// The block, and where packed `b` begins.
    q: Range<usize>,
    /// The rows and columns of `a` that will be needed next, no rows if there are no more.
    after: [Range<usize>; 2],
    k0: usize,
    /// Whether it is the last one.
    last: bool,
}

/// Products of one call that are described at a time.
const AT_ONCE: usize = 4096;

/// See [`Gemm`].
pub(crate) fn gemm(cpu: &Cpu, g: Gemm, a: View, b: View, bias: Option<View>, mut y: ViewMut) -> Result<()> {
    let (a, b, y) = (a.slice::<f32>()?, b.slice::<f32>()?, y.slice::<f32>()?);
    let bias = bias.map(|v| v.slice::<f32>()).transpose()?;
    let Gemm { batch, m, n, k, ta, tb } = g;
    if y.is_empty() {
        return Ok(());
    }
    let problem = |i: usize| {
        let (a, b) = (&a[i * m * k..][..m * k], &b[i * k * n..][..k * n]);
        Problem {
            m,
            n,
            k,
            a: if ta { A::Columns { data: a, ld: m } } else { A::Rows { data: a, ld: k } },
            b: if tb {
                B::Columns { data: b, ld: k, run: k.max(1), bases: vec![0] }
            } else {
                B::Rows { data: b, ld: n }
            },
            bias,
            row: Box::new(move |r| (i % AT_ONCE * m + r) * n),
        }
    };
    for (i, y) in y.chunks_mut(AT_ONCE * m * n).enumerate() {
        let problems: Vec<Problem> = (i * AT_ONCE..batch.min((i + 1) * AT_ONCE)).map(problem).collect();
        solve(cpu, &problems, y);
    }
    Ok(())
}
