//! Sums down the columns of matrices: bias gradients, statistics over a batch.
use super::{Cpu, elementwise::GRAIN, isa::Job};

/// Columns whose sums run side by side.
const WIDTH: usize = 64;
/// Rows that are summed in f32 before their sums are added in f64.
const ROWS: usize = 256;

/// A contiguous piece of the columns of a matrix.
#[derive(Clone, Copy)]
pub(crate) struct Piece {
    pub first: usize,
    pub len: usize,
}

impl Piece {
    /// The piece of row `r` of a matrix of `columns` columns (of one row, with both 0).
    #[inline(always)]
    pub(crate) fn of(self, x: &[f32], r: usize, columns: usize) -> &[f32] {
        &x[r * columns + self.first..][..self.len]
    }
}

/// What is summed: terms of a row of a piece of columns, `out[q][j]` += term q of row `r` at column `first + j`.
pub(crate) trait Terms<const Q: usize>: Sync {
    /// Implementations are marked `inline(always)`, to be compiled for the instruction set in use.
    fn add<const W: usize>(&self, r: usize, piece: Piece, out: &mut [[f32; W]; Q]);
}

/// Writes Q sums down each of `columns` columns of `rows` rows; `store` gets a column and its sums.
pub(crate) fn sums<const Q: usize>(
    cpu: &Cpu,
    rows: usize,
    terms: &impl Terms<Q>,
    out: [&mut [f32]; Q],
    store: impl Fn(usize, [f64; Q]) -> [f32; Q] + Sync,
) {
    let columns = out.first().map_or(0, |o| o.len());
    let parts = cpu.threads.parts(rows * columns, GRAIN);
    let width = columns.div_ceil(parts).next_multiple_of(16).clamp(1, WIDTH);
    let mut pieces: Vec<(usize, [&mut [f32]; Q])> = Vec::new();
    let mut left = out;
    for first in (0..columns).step_by(width) {
        let now = left.each_mut().map(|o| {
            let all = std::mem::take(o);
            let (a, b) = all.split_at_mut(width.min(all.len()));
            *o = b;
            a
        });
        pieces.push((first, now));
    }
    let each = pieces.len().div_ceil(parts).max(1);
    cpu.threads.over(pieces.chunks_mut(each), |pieces| {
        for (first, out) in pieces {
            let piece = Piece { first: *first, len: out[0].len() };
            let mut total = [[0.0f64; WIDTH]; Q];
            for r0 in (0..rows).step_by(ROWS) {
                let sums = cpu.simd.run(Block { terms, from: r0, to: rows.min(r0 + ROWS), piece });
                for (t, s) in total.iter_mut().zip(&sums) {
                    t.iter_mut().zip(s).for_each(|(t, &s)| *t += f64::from(s));
                }
            }
            for j in 0..piece.len {
                let sums = store(piece.first + j, total.each_ref().map(|t| t[j]));
                out.iter_mut().zip(sums).for_each(|(o, s)| o[j] = s);
            }
        }
    });
}

/// The sums over the rows from..to.
struct Block<'a, T, const Q: usize> {
    terms: &'a T,
    from: usize,
    to: usize,
    piece: Piece,
}

impl<T: Terms<Q>, const Q: usize> Job for Block<'_, T, Q> {
    type Out = [[f32; WIDTH]; Q];
    #[inline(always)]
    fn run(self) -> Self::Out {
        let mut sums = [[0.0; WIDTH]; Q];
        for r in self.from..self.to {
            self.terms.add(r, self.piece, &mut sums);
        }
        sums
    }
}

/// The elements of x[rows, columns] themselves.
pub(crate) struct Plain<'a> {
    pub x: &'a [f32],
    pub columns: usize,
}

impl Terms<1> for Plain<'_> {
    #[inline(always)]
    fn add<const W: usize>(&self, r: usize, p: Piece, [out]: &mut [[f32; W]; 1]) {
        out.iter_mut().zip(p.of(self.x, r, self.columns)).for_each(|(o, x)| *o += x);
    }
}
