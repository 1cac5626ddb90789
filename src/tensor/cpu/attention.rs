//! Self-attention, a block of rows at a time: the scores of a block are all that is stored of a head's.
//!
//! Letters: n samples, t tokens, d features of a head, s elements from token to token of qkv; q, k, v are [t,d] of one head.
use super::{
    Cpu,
    gemm::{Problem, alone, scratch},
    isa::VectorJob,
    lanes::{Lanes, Vectors},
    math,
    micro::Kernels,
    pack::{A, B},
    par::{Shared, part},
};
use crate::{
    Result,
    tensor::{View, ViewMut, backend::Attention},
};
use std::ops::Range;

/// Rows of a block, about: whole tiles.
const ROWS: usize = 56;
/// Rows of scores are as long as so many, or a multiple, so that vectors leave no rest.
const WIDTH: usize = 32;
/// Multiply-adds that are worth a thread.
const GRAIN: usize = 500_000;

/// What the threads share.
struct Shape<'a> {
    cpu: &'a Cpu,
    a: Attention,
    kernels: &'static Kernels,
    /// Rows of a block.
    rows: usize,
    /// Elements that the packed matrix [d, t] takes up, those from row to row of scores, and those of a block's scores.
    panels: usize,
    ld: usize,
    scores: usize,
    /// Elements that products need.
    products: usize,
    /// Factor of the scores.
    scale: f32,
}

impl<'a> Shape<'a> {
    fn new(cpu: &'a Cpu, a: Attention) -> Shape<'a> {
        let kernels = Kernels::of(cpu.simd);
        let rows = (ROWS / kernels.mr * kernels.mr).min(a.t).max(1);
        // The largest of each kind of product, of which the others are parts: scores, sums of rows, gradients of keys and values.
        let (none, place) = (&[][..], |_: usize| 0);
        let product = |m, n, k, a, b| scratch(cpu, &Problem { m, n, k, a, b, bias: None, row: Box::new(place) });
        let by_rows = || A::Rows { data: none, ld: 0 };
        let products = product(rows, a.t, a.d, by_rows(), B::Panels { data: none })
            .max(product(rows, a.d, a.t, by_rows(), B::Rows { data: none, ld: 0 }))
            .max(product(a.t, a.d, rows, A::Columns { data: none, ld: 0 }, B::Rows { data: none, ld: 0 }));
        Shape {
            cpu,
            a,
            kernels,
            rows,
            panels: a.d * a.t.next_multiple_of(kernels.nr),
            ld: a.t.next_multiple_of(WIDTH),
            scores: rows * a.t.next_multiple_of(WIDTH),
            products: products.next_multiple_of(16),
            scale: (1.0 / (a.d as f64).sqrt()) as f32,
        }
    }

    /// Heads of all samples.
    fn heads(&self) -> usize {
        self.a.n * self.a.heads
    }

    /// Into how many parts the heads are cut.
    fn parts(&self) -> usize {
        self.cpu.threads.parts(self.heads() * self.a.t * self.a.t * self.a.d, GRAIN).min(self.heads()).max(1)
    }

    /// Elements from token to token of qkv.
    fn step(&self) -> usize {
        3 * self.a.heads * self.a.d
    }

    /// Where token 0 of q (`which` 0), k (1) or v (2) of a head lies in qkv.
    fn at(&self, head: usize, which: usize) -> usize {
        let Attention { t, heads, d, .. } = self.a;
        head / heads * t * self.step() + (which * heads + head % heads) * d
    }

    /// Where token 0 of a head lies in y, whose tokens are `heads·d` apart.
    fn y_at(&self, head: usize) -> usize {
        let Attention { t, heads, d, .. } = self.a;
        (head / heads * t * heads + head % heads) * d
    }

    /// The blocks of rows, each with the number of columns that its rows see.
    fn blocks(&self) -> impl DoubleEndedIterator<Item = (Range<usize>, usize)> {
        let (t, causal, rows) = (self.a.t, self.a.causal, self.rows);
        let range = move |i: usize| i * rows..t.min((i + 1) * rows);
        (0..t.div_ceil(rows)).map(move |i| (range(i), if causal { range(i).end } else { t }))
    }

    /// Columns that row `i` sees.
    fn seen(&self, i: usize) -> usize {
        if self.a.causal { i + 1 } else { self.a.t }
    }

    /// Packs the transpose of the t rows of d elements, `ld` apart, that begin `data`.
    fn pack(&self, data: &[f32], ld: usize, out: &mut [f32]) {
        let Attention { t, d, .. } = self.a;
        let rows = B::Columns { data, ld, run: d, bases: vec![0] };
        rows.pack(self.cpu.simd, 0..d, 0..t, self.kernels.nr, out);
    }

    /// `scores[rows, columns]` = rows of d elements, `ld` apart, that begin `data`, times a packed matrix.
    fn score(&self, data: &[f32], ld: usize, panels: &[f32], [m, n]: [usize; 2], scores: &mut [f32], work: &mut [f32]) {
        let (a, b, apart) = (A::Rows { data, ld }, B::Panels { data: panels }, self.ld);
        let p = Problem { m, n, k: self.a.d, a, b, bias: None, row: Box::new(move |i| i * apart) };
        alone(self.cpu, &p, false, &Shared::new(scores), work);
    }
}

/// y[n,t,heads·d] and lse[n,heads,t] of qkv[n,t,3,heads,d].
pub(crate) fn forward(cpu: &Cpu, a: Attention, qkv: View, mut y: ViewMut, mut lse: ViewMut) -> Result<()> {
    let (qkv, y, lse) = (qkv.slice::<f32>()?, y.slice::<f32>()?, lse.slice::<f32>()?);
    if lse.is_empty() {
        return Ok(());
    }
    let shape = Shape::new(cpu, a);
    let Shape { panels, scores, products, .. } = shape;
    let (parts, y) = (shape.parts(), Shared::new(y));
    let need = panels + scores + products;
    let mut memory = cpu.memory("attention", need * parts)?;
    let memory: &mut [f32] = bytemuck::cast_slice_mut(memory.bytes_mut());
    let mut rest = lse;
    let mut items = Vec::new();
    for (i, memory) in memory.chunks_mut(need).take(parts).enumerate() {
        let heads = part(shape.heads(), 1, parts, i);
        let (lse, after) = rest.split_at_mut(heads.len() * a.t);
        rest = after;
        items.push((heads, memory, lse));
    }
    cpu.threads.over(items.into_iter(), |(heads, memory, lse)| {
        let (panels, memory) = memory.split_at_mut(panels);
        let (scores, work) = memory.split_at_mut(scores);
        for (head, lse) in heads.zip(lse.chunks_mut(a.t)) {
            let (step, ld, at) = (shape.step(), a.heads * a.d, shape.y_at(head));
            let [q, k, v] = [0, 1, 2].map(|which| &qkv[shape.at(head, which)..]);
            shape.pack(k, step, panels);
            for (rows, seen) in shape.blocks() {
                shape.score(&q[rows.start * step..], step, panels, [rows.len(), seen], scores, work);
                for (i, row) in rows.clone().zip(scores.chunks_mut(shape.ld)) {
                    let x = &mut row[..seen.next_multiple_of(WIDTH)];
                    lse[i] = cpu.simd.vectors(Softmax { x, seen: shape.seen(i), scale: shape.scale });
                }
                let (from, b) = (rows.start, B::Rows { data: v, ld: step });
                let row = Box::new(move |i| at + (from + i) * ld);
                let a = A::Rows { data: scores, ld: shape.ld };
                let p = Problem { m: rows.len(), n: shape.a.d, k: seen, a, b, bias: None, row };
                alone(cpu, &p, false, &y, work);
            }
        }
    });
    Ok(())
}

/// Replaces the first `seen` scores by the softmax of their multiples by `scale` and the others, whatever they are, by zeros; gives
/// the logarithm of the sum of their exponentials.
struct Softmax<'a> {
    x: &'a mut [f32],
    seen: usize,
    scale: f32,
}

impl VectorJob for Softmax<'_> {
    type Out = f32;
    #[inline(always)]
    fn run<L: Lanes>(self, v: Vectors<L>) -> f32 {
        let Softmax { x, seen, scale } = self;
        let (x, others) = x.split_at_mut(seen);
        others.fill(0.0);
        let (max, sum) = math::softmax(v, x, scale);
        (f64::from(max) + sum.ln()) as f32
    }
}

/// dqkv[n,t,3,heads,d] from what the forward pass read, gave and kept, and dy[n,t,heads·d].
pub(crate) fn backward(
    cpu: &Cpu,
    a: Attention,
    qkv: View,
    [y, lse]: [View; 2],
    dy: View,
    mut dqkv: ViewMut,
) -> Result<()> {
    let (qkv, y, lse) = (qkv.slice::<f32>()?, y.slice::<f32>()?, lse.slice::<f32>()?);
    let (dy, dqkv) = (dy.slice::<f32>()?, dqkv.slice::<f32>()?);
    if lse.is_empty() {
        return Ok(());
    }
    let shape = Shape::new(cpu, a);
    let (parts, dqkv) = (shape.parts(), Shared::new(dqkv));
    let need = 2 * (shape.panels + shape.scores) + shape.products;
    let mut memory = cpu.memory("attention_grad", need * parts)?;
    let memory: &mut [f32] = bytemuck::cast_slice_mut(memory.bytes_mut());
    cpu.threads.over(memory.chunks_mut(need).take(parts).enumerate(), |(i, memory)| {
        let (keys, memory) = memory.split_at_mut(shape.panels);
        let (values, memory) = memory.split_at_mut(shape.panels);
        let (probs, memory) = memory.split_at_mut(shape.scores);
        let (slopes, work) = memory.split_at_mut(shape.scores);
        for head in part(shape.heads(), 1, parts, i) {
            let (step, ld) = (shape.step(), a.heads * a.d);
            let [q, k, v] = [0, 1, 2].map(|which| &qkv[shape.at(head, which)..]);
            let [y, dy] = [y, dy].map(|x| &x[shape.y_at(head)..]);
            let lse = &lse[head * a.t..][..a.t];
            shape.pack(k, step, keys);
            shape.pack(v, step, values);
            // From the last one on, which sees all columns: it begins the sums that the others add to.
            for (rows, seen) in shape.blocks().rev() {
                let size = [rows.len(), seen];
                let (q, dy) = (&q[rows.start * step..], &dy[rows.start * ld..]);
                shape.score(q, step, keys, size, probs, work);
                shape.score(dy, ld, values, size, slopes, work);
                let scores = probs.chunks_mut(shape.ld).zip(slopes.chunks_mut(shape.ld));
                let width = seen.next_multiple_of(WIDTH);
                for ((i, row), (p, ds)) in rows.clone().enumerate().zip(scores) {
                    let (y, dy) = (&y[row * ld..][..a.d], &dy[i * ld..][..a.d]);
                    let (p, ds, lse) = (&mut p[..width], &mut ds[..width], lse[row]);
                    cpu.simd.vectors(Slopes { p, ds, y, dy, seen: shape.seen(row), scale: shape.scale, lse });
                }
                let product = |which, m, from, k, a, b, add, work: &mut [f32]| {
                    let at = shape.at(head, which);
                    let row = Box::new(move |i| at + (from + i) * step);
                    alone(cpu, &Problem { m, n: shape.a.d, k, a, b, bias: None, row }, add, &dqkv, work);
                };
                let (m, is_last) = (rows.len(), rows.end == a.t);
                // dq = ds·k, dk += dsᵀ·q, dv += pᵀ·dy
                let ds = A::Rows { data: slopes, ld: shape.ld };
                product(0, m, rows.start, seen, ds, B::Rows { data: k, ld: step }, false, work);
                let ds = A::Columns { data: slopes, ld: shape.ld };
                product(1, seen, 0, m, ds, B::Rows { data: q, ld: step }, !is_last, work);
                let p = A::Columns { data: probs, ld: shape.ld };
                product(2, seen, 0, m, p, B::Rows { data: dy, ld }, !is_last, work);
            }
        }
    });
    Ok(())
}

/// Replaces the first `seen` scores by their probabilities p and their gradients by the slopes ds = p·(ds − Σ dy·y)·scale, the
/// others, whatever they are, by zeros.
struct Slopes<'a> {
    p: &'a mut [f32],
    ds: &'a mut [f32],
    y: &'a [f32],
    dy: &'a [f32],
    seen: usize,
    scale: f32,
    lse: f32,
}

impl VectorJob for Slopes<'_> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self, v: Vectors<L>) {
        let Slopes { p, ds, y, dy, seen, scale, lse } = self;
        let mean = v.splat(math::dot(v, y, dy));
        let (factor, minus_lse) = (v.splat(scale), v.splat(-lse));
        for at in (0..seen).step_by(L::N) {
            let prob = math::exp(v, v.fma(minus_lse, v.load_first(p, at, seen - at), factor));
            v.store_first(prob, p, at, seen - at);
            let slope = v.mul(v.sub(v.load_first(ds, at, seen - at), mean), factor);
            v.store_first(v.mul(prob, slope), ds, at, seen - at);
        }
        p[seen..].fill(0.0);
        ds[seen..].fill(0.0);
    }
}
