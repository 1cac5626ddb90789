//! Sums down the columns of matrices: bias gradients, statistics over a batch.
use super::{Cpu, elementwise::GRAIN, isa::Job};
use std::ops::Range;

/// Columns whose sums run side by side.
const WIDTH: usize = 64;
/// Rows that are summed in f32 before their sums are added in f64.
const ROWS: usize = 64;

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

/// Takes Q sums down each of some columns of `rows` rows and writes R numbers of each column; `store` gets a column and its sums.
pub(crate) fn sums<const Q: usize, const R: usize>(
    cpu: &Cpu,
    rows: usize,
    terms: &impl Terms<Q>,
    out: [&mut [f32]; R],
    store: impl Fn(usize, [f64; Q]) -> [f32; R] + Sync,
) {
    let columns = out.first().map_or(0, |o| o.len());
    let parts = cpu.threads.parts(rows * columns, GRAIN);
    let width = columns.div_ceil(parts).next_multiple_of(16).clamp(1, WIDTH);
    let mut pieces: Vec<(usize, [&mut [f32]; R])> = Vec::new();
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
            let total = cpu.simd.run(Down { terms, rows, piece });
            for j in 0..piece.len {
                let found = store(piece.first + j, total.each_ref().map(|t| t[j]));
                out.iter_mut().zip(found).for_each(|(o, f)| o[j] = f);
            }
        }
    });
}

/// The sums down a piece of columns.
struct Down<'a, T, const Q: usize> {
    terms: &'a T,
    rows: usize,
    piece: Piece,
}

impl<T: Terms<Q>, const Q: usize> Job for Down<'_, T, Q> {
    type Out = [[f64; WIDTH]; Q];
    #[inline(always)]
    fn run(self) -> Self::Out {
        let mut total = [[0.0; WIDTH]; Q];
        for from in (0..self.rows).step_by(ROWS) {
            let rows = from..self.rows.min(from + ROWS);
            // A length that is known when this is compiled keeps the sums in registers.
            let sums = match self.piece {
                Piece { first, len: WIDTH } => self.block(rows, Piece { first, len: WIDTH }),
                piece => self.block(rows, piece),
            };
            for (t, s) in total.iter_mut().zip(&sums) {
                t.iter_mut().zip(s).for_each(|(t, &s)| *t += f64::from(s));
            }
        }
        total
    }
}

impl<T: Terms<Q>, const Q: usize> Down<'_, T, Q> {
    #[inline(always)]
    fn block(&self, rows: Range<usize>, piece: Piece) -> [[f32; WIDTH]; Q] {
        let mut sums = [[0.0; WIDTH]; Q];
        for r in rows {
            self.terms.add(r, piece, &mut sums);
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
