//! Operands of a matrix product, and how blocks of them are laid out for the micro-kernels.
//!
//! Letters: m, n rows and columns of the result, k inner size, mr, nr those of a tile. A block of `a` is a sequence of panels of
//! mr rows, packed by rows (row r at r·ROW) where the operand is contiguous along k, else by columns (column p at p·mr). A block
//! of `b` is a sequence of panels of nr columns, row p at p·nr, filled up with zeros.
use super::{
    ahead::{Carry, Fetch, Rows},
    isa::{Job, Simd, VectorJob},
    lanes::{Lanes, Vectors},
    micro::{KC, ROW},
    patches::Patches,
};
use std::ops::Range;

/// Rows of an operand that are read side by side, each from end to end.
const STREAMS: usize = 16;

/// The left operand, a[m,k].
pub(crate) enum A<'a> {
    /// Row i at i·ld.
    Rows { data: &'a [f32], ld: usize },
    /// Column p at p·ld.
    Columns { data: &'a [f32], ld: usize },
    /// Row i is the patch of an image that output pixel i sees.
    Pixels(Patches<'a>),
    /// Column p is the patch that output pixel p sees.
    Taps(Patches<'a>),
}

/// The right operand, b[k,n].
pub(crate) enum B<'a> {
    /// Row p at p·ld.
    Rows { data: &'a [f32], ld: usize },
    /// Element (p, j) at bases[p / run] + j·ld + p % run.
    Columns { data: &'a [f32], ld: usize, run: usize, bases: Vec<usize> },
    /// Packed before, all k rows in one block: for several products with one b.
    Panels { data: &'a [f32] },
}

impl A<'_> {
    /// Whether blocks are packed by rows.
    pub(crate) fn by_rows(&self) -> bool {
        matches!(self, A::Rows { .. } | A::Pixels(_))
    }

    /// Elements of a panel.
    pub(crate) fn panel(&self, mr: usize) -> usize {
        mr * if self.by_rows() { ROW } else { KC }
    }

    /// Packs the rows `rows` and at most [`KC`] columns `ks`.
    pub(crate) fn pack(&self, simd: Simd, rows: Range<usize>, ks: Range<usize>, mr: usize, out: &mut [f32]) {
        let panel = self.panel(mr);
        match self {
            A::Rows { data, ld } => {
                for (i, out) in rows.zip(out.chunks_mut(ROW)) {
                    out[..ks.len()].copy_from_slice(&data[i * ld..][ks.clone()]);
                }
            }
            A::Columns { data, ld } => {
                let (from, width) = (&data[ks.start * ld + rows.start..], rows.len());
                simd.vectors(Spread { from, ld: *ld, rows: ks.len(), width, unit: mr, panel, to: out });
            }
            A::Pixels(x) => x.pack_pixels(simd, rows, ks, out),
            A::Taps(x) => {
                for (rows, out) in panels(rows, mr).zip(out.chunks_mut(panel)) {
                    x.pack_taps(simd, rows, ks.clone(), mr, out);
                }
            }
        }
    }

    /// Whether panels of so many columns can be packed while others are used, by no more than copying; two vectors hold `nr`
    /// elements. Columns are better read side by side, and so together.
    pub(crate) fn can_carry(&self, k: usize, nr: usize) -> bool {
        matches!(self, A::Rows { .. }) && k.is_multiple_of(nr / 2)
    }

    /// Packs one panel, of the rows `rows`, over as many steps as there are `ks`, if [`can_carry`](A::can_carry) says so.
    pub(crate) fn carry(&self, rows: Range<usize>, ks: Range<usize>, nr: usize, out: &mut [f32]) -> Carry {
        let A::Rows { data, ld } = self else { return Carry::NOTHING };
        let len = if ks.len().is_multiple_of(nr) { nr } else { nr / 2 };
        let all = Rows { rows: rows.len(), pieces: ks.len() / len, len, from: *ld, to: ROW };
        Carry::new(&data[rows.start * ld + ks.start..], out, &all, ks.len())
    }

    /// The memory that packing these rows and columns will read, to be asked for over so many `steps`; nothing, where that is
    /// scattered.
    pub(crate) fn fetch(&self, rows: Range<usize>, ks: Range<usize>, steps: usize) -> Fetch {
        match self {
            A::Rows { data, ld } => Fetch::new(&data[rows.start * ld + ks.start..], rows.len(), ks.len(), *ld, steps),
            A::Columns { data, ld } => {
                Fetch::new(&data[ks.start * ld + rows.start..], ks.len(), rows.len(), *ld, steps)
            }
            A::Pixels(_) | A::Taps(_) => Fetch::NOTHING,
        }
    }
}

impl B<'_> {
    /// Packs the rows `ks` and the columns `cols`.
    pub(crate) fn pack(&self, simd: Simd, ks: Range<usize>, cols: Range<usize>, nr: usize, out: &mut [f32]) {
        let panel = ks.len() * nr;
        if !cols.len().is_multiple_of(nr) {
            out[cols.len() / nr * panel..][..panel].fill(0.0);
        }
        match self {
            B::Rows { data, ld } => {
                let (from, width) = (&data[ks.start * ld + cols.start..], cols.len());
                simd.vectors(Spread { from, ld: *ld, rows: ks.len(), width, unit: nr, panel, to: out });
            }
            B::Columns { data, ld, run, bases } => {
                for (cols, out) in panels(cols, nr).zip(out.chunks_mut(panel)) {
                    let mut p = ks.start;
                    while p < ks.end {
                        let (base, within) = (bases[p / run], p % run);
                        let len = (run - within).min(ks.end - p);
                        let from = &data[base + cols.start * ld + within..];
                        let to = &mut out[(p - ks.start) * nr..];
                        simd.vectors(Transpose { from, from_step: *ld, to, to_step: nr, len, rows: cols.len() });
                        p += len;
                    }
                }
            }
            // Never packed again.
            B::Panels { .. } => {}
        }
    }

    /// Whether panels can be packed while others are used, by no more than copying.
    pub(crate) fn can_carry(&self) -> bool {
        matches!(self, B::Rows { .. })
    }

    /// Packs one panel, of all its columns `cols`, over as many steps as there are `ks`, if [`can_carry`](B::can_carry) says so.
    pub(crate) fn carry(&self, ks: Range<usize>, cols: Range<usize>, out: &mut [f32]) -> Carry {
        let B::Rows { data, ld } = self else { return Carry::NOTHING };
        let all = Rows { rows: ks.len(), pieces: 1, len: cols.len(), from: *ld, to: cols.len() };
        Carry::new(&data[ks.start * ld + cols.start..], out, &all, ks.len())
    }

    /// The memory that packing the rows `ks` and the columns `cols`, of one panel, will read, to be asked for over so many
    /// `steps`; nothing, where that is scattered.
    pub(crate) fn fetch(&self, ks: Range<usize>, cols: Range<usize>, steps: usize) -> Fetch {
        match self {
            B::Rows { data, ld } => Fetch::new(&data[ks.start * ld + cols.start..], ks.len(), cols.len(), *ld, steps),
            B::Columns { data, ld, run, bases } if ks.start / run == (ks.end - 1) / run => {
                let from = bases[ks.start / run] + cols.start * ld + ks.start % run;
                Fetch::new(&data[from..], cols.len(), ks.len(), *ld, steps)
            }
            _ => Fetch::NOTHING,
        }
    }
}

/// `all` in pieces of `unit`, the last one perhaps shorter.
fn panels(all: Range<usize>, unit: usize) -> impl Iterator<Item = Range<usize>> {
    all.clone().step_by(unit).map(move |i| i..all.end.min(i + unit))
}

/// Packs `width` elements of `rows` rows, `ld` apart, into panels of `unit` columns that are `panel` elements long.
struct Spread<'a> {
    from: &'a [f32],
    ld: usize,
    rows: usize,
    width: usize,
    unit: usize,
    panel: usize,
    to: &'a mut [f32],
}

impl VectorJob for Spread<'_> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self, v: Vectors<L>) {
        let Spread { from, ld, rows, width, unit, panel, to } = self;
        for r0 in (0..rows).step_by(STREAMS) {
            for (i, at) in (0..width).step_by(unit).enumerate() {
                let len = unit.min(width - at);
                for r in r0..rows.min(r0 + STREAMS) {
                    let piece = &from[r * ld + at..][..len];
                    let place = &mut to[i * panel + r * unit..][..len];
                    if len == 2 * L::N {
                        v.store(v.load(piece, 0), place, 0);
                        v.store(v.load(piece, L::N), place, L::N);
                    } else {
                        for at in (0..len).step_by(L::N) {
                            v.store_first(v.load_first(piece, at, len - at), place, at, len - at);
                        }
                    }
                }
            }
        }
    }
}

/// Copies `count` pieces of `len` elements, `from_step` apart, to places `to_step` apart.
pub(crate) struct Pieces<'a> {
    pub(crate) from: &'a [f32],
    pub(crate) from_step: usize,
    pub(crate) to: &'a mut [f32],
    pub(crate) to_step: usize,
    pub(crate) count: usize,
    pub(crate) len: usize,
}

impl Job for Pieces<'_> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let Pieces { from, from_step, to, to_step, count, len } = self;
        // The lengths of whole panels, and of rows of 3×3 kernels over one or three channels, are known to the compiler, so that
        // each copy is a few moves.
        match len {
            32 => pieces::<32>(from, from_step, to, to_step, count),
            16 => pieces::<16>(from, from_step, to, to_step, count),
            14 => pieces::<14>(from, from_step, to, to_step, count),
            13 => pieces::<13>(from, from_step, to, to_step, count),
            12 => pieces::<12>(from, from_step, to, to_step, count),
            11 => pieces::<11>(from, from_step, to, to_step, count),
            9 => pieces::<9>(from, from_step, to, to_step, count),
            8 => pieces::<8>(from, from_step, to, to_step, count),
            6 => pieces::<6>(from, from_step, to, to_step, count),
            4 => pieces::<4>(from, from_step, to, to_step, count),
            3 => pieces::<3>(from, from_step, to, to_step, count),
            _ => {
                for p in 0..count {
                    to[p * to_step..][..len].copy_from_slice(&from[p * from_step..][..len]);
                }
            }
        }
    }
}

#[inline(always)]
fn pieces<const L: usize>(from: &[f32], from_step: usize, to: &mut [f32], to_step: usize, count: usize) {
    for p in 0..count {
        to[p * to_step..][..L].copy_from_slice(&from[p * from_step..][..L]);
    }
}

/// Copies `rows` rows of `len` elements, `from_step` apart, to columns: element (r, p) to p·`to_step` + r.
pub(crate) struct Transpose<'a> {
    pub(crate) from: &'a [f32],
    pub(crate) from_step: usize,
    pub(crate) to: &'a mut [f32],
    pub(crate) to_step: usize,
    pub(crate) len: usize,
    pub(crate) rows: usize,
}

impl VectorJob for Transpose<'_> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self, v: Vectors<L>) {
        let Transpose { from, from_step, to, to_step, len, rows } = self;
        for r0 in (0..rows).step_by(L::N) {
            for p0 in (0..len).step_by(L::N) {
                if r0 + L::N <= rows && p0 + L::N <= len {
                    v.transpose(&from[r0 * from_step + p0..], from_step, &mut to[p0 * to_step + r0..], to_step);
                    continue;
                }
                for r in r0..rows.min(r0 + L::N) {
                    for p in p0..len.min(p0 + L::N) {
                        to[p * to_step + r] = from[r * from_step + p];
                    }
                }
            }
        }
    }
}
