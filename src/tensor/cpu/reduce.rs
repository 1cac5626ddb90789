//! Folding an axis away: x[o,m,i] to y[o,i].
use super::{
    Cpu,
    columns::{self, Plain},
    elementwise::GRAIN,
    isa::{Job, VectorJob},
    lanes::{Lanes, Vectors},
    math,
};
use crate::{
    Result,
    tensor::{View, ViewMut, backend::Reduce},
};

/// Elements of a row that a thread adds up at a time, before their sums are added in order.
const BLOCK: usize = 4096;

pub(crate) fn reduce(cpu: &Cpu, op: Reduce, dims: [usize; 3], x: View, mut y: ViewMut) -> Result<()> {
    let (x, y) = (x.slice::<f32>()?, y.slice::<f32>()?);
    let [outer, mid, inner] = dims;
    if y.is_empty() {
        return Ok(());
    }
    match op {
        Reduce::Sum if inner == 1 => row_sums(cpu, x, mid, y),
        Reduce::Sum => {
            for (o, y) in y.chunks_mut(inner).enumerate() {
                let part = Plain { x: &x[o * mid * inner..][..mid * inner], columns: inner };
                columns::sums(cpu, mid, &part, [y], |_, [s]| [s as f32]);
            }
        }
        Reduce::Max => {
            let piece = cpu.threads.piece(outer, 1, GRAIN / (mid * inner).max(1));
            cpu.threads.over(y.chunks_mut(piece * inner).enumerate(), |(i, y)| {
                for (o, y) in y.chunks_mut(inner).enumerate() {
                    let rows = &x[(i * piece + o) * mid * inner..][..mid * inner];
                    cpu.simd.run(Largest { rows, y });
                }
            });
        }
    }
    Ok(())
}

/// y[o] = Σ x[o,*]. Rows are cut into blocks, and those over the threads, so that one long row uses all of them.
fn row_sums(cpu: &Cpu, x: &[f32], mid: usize, y: &mut [f32]) {
    if mid == 0 {
        return y.fill(0.0);
    }
    let piece = cpu.threads.piece(y.len(), 1, GRAIN / mid);
    let part = cpu.threads.piece(mid.div_ceil(BLOCK), 1, GRAIN / BLOCK);
    if y.len() > 1 || part * BLOCK >= mid {
        let rows = x.chunks(piece * mid).zip(y.chunks_mut(piece));
        return cpu.threads.over(rows, |(x, y)| {
            for (row, y) in x.chunks(mid).zip(y) {
                *y = row.chunks(BLOCK).map(|b| cpu.simd.vectors(Sum { x: b })).sum::<f64>() as f32;
            }
        });
    }
    let mut blocks = vec![0.0; mid.div_ceil(BLOCK)];
    cpu.threads.over(x.chunks(part * BLOCK).zip(blocks.chunks_mut(part)), |(x, sums)| {
        for (b, s) in x.chunks(BLOCK).zip(sums) {
            *s = cpu.simd.vectors(Sum { x: b });
        }
    });
    y[0] = blocks.iter().sum::<f64>() as f32;
}

struct Sum<'a> {
    x: &'a [f32],
}

impl VectorJob for Sum<'_> {
    type Out = f64;
    #[inline(always)]
    fn run<L: Lanes>(self, v: Vectors<L>) -> f64 {
        math::sum(v, self.x)
    }
}

/// The largest of each column of a matrix as wide as y.
struct Largest<'a> {
    rows: &'a [f32],
    y: &'a mut [f32],
}

impl Job for Largest<'_> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let Largest { rows, y } = self;
        if let [y] = y {
            // A column is read as if it were 32 side by side.
            let mut columns = [f32::NEG_INFINITY; 32];
            largest_of_columns(rows, &mut columns);
            *y = columns.into_iter().fold(f32::NEG_INFINITY, math::max);
        } else {
            y.fill(f32::NEG_INFINITY);
            largest_of_columns(rows, y);
        }
    }
}

#[inline(always)]
fn largest_of_columns(rows: &[f32], y: &mut [f32]) {
    for row in rows.chunks(y.len()) {
        y.iter_mut().zip(row).for_each(|(y, &x)| *y = math::max(*y, x));
    }
}
