//! Optimizer steps in one pass over memory, in place or into a fresh buffer.
use super::{Cpu, elementwise::GRAIN, isa::Job};
use crate::{
    Result,
    tensor::{
        InOut, View,
        backend::{AdamStep, SgdStep},
    },
};

/// Elements that are copied from an old value to its fresh buffer just before they are updated there, while they are in the
/// first-level cache: so that one loop serves both kinds of update.
const BLOCK: usize = 1024;

/// An operand in pieces: the old value, if it is apart, and the place of the new one.
type Piece<'a> = (Option<&'a [f32]>, &'a mut [f32]);

fn pieces<'a>((old, new): Piece<'a>, piece: usize) -> Vec<Piece<'a>> {
    let old = |i: usize, n: usize| old.map(|o| &o[i * piece..][..n]);
    new.chunks_mut(piece).enumerate().map(|(i, new)| (old(i, new.len()), new)).collect()
}

/// The block from `at` on of an operand, holding the old value.
fn block<'a>((old, new): &'a mut Piece, at: usize) -> &'a mut [f32] {
    let end = new.len().min(at + BLOCK);
    let new = &mut new[at..end];
    old.iter().for_each(|old| new.copy_from_slice(&old[at..end]));
    new
}

pub(crate) fn sgd(cpu: &Cpu, s: SgdStep, g: View, mut w: InOut, v: Option<InOut>) -> Result<()> {
    let g = g.slice::<f32>()?;
    let piece = cpu.threads.piece(g.len(), BLOCK, GRAIN);
    let w = pieces(w.slices::<f32>()?, piece).into_iter();
    let Some(mut v) = v else {
        cpu.threads.over(g.chunks(piece).zip(w), |(g, mut w)| {
            for at in (0..g.len()).step_by(BLOCK) {
                cpu.simd.run(Sgd { s, g: &g[at..], w: block(&mut w, at) });
            }
        });
        return Ok(());
    };
    let v = pieces(v.slices::<f32>()?, piece).into_iter();
    cpu.threads.over(g.chunks(piece).zip(w).zip(v), |((g, mut w), mut v)| {
        for at in (0..g.len()).step_by(BLOCK) {
            cpu.simd.run(Momentum { s, g: &g[at..], w: block(&mut w, at), v: block(&mut v, at) });
        }
    });
    Ok(())
}

struct Sgd<'a> {
    s: SgdStep,
    g: &'a [f32],
    w: &'a mut [f32],
}

impl Job for Sgd<'_> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let Sgd { s, g, w } = self;
        let (lr, decay) = (s.lr as f32, s.decay as f32);
        for (w, g) in w.iter_mut().zip(g) {
            *w -= lr * (g + decay * *w);
        }
    }
}

struct Momentum<'a> {
    s: SgdStep,
    g: &'a [f32],
    w: &'a mut [f32],
    v: &'a mut [f32],
}

impl Job for Momentum<'_> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let Momentum { s, g, w, v } = self;
        let (lr, decay, momentum) = (s.lr as f32, s.decay as f32, s.momentum as f32);
        for ((w, v), g) in w.iter_mut().zip(v).zip(g) {
            let g = g + decay * *w;
            *v = momentum * *v + g;
            *w -= lr * if s.nesterov { g + momentum * *v } else { *v };
        }
    }
}

pub(crate) fn adam(cpu: &Cpu, s: AdamStep, g: View, mut w: InOut, mut m: InOut, mut v: InOut) -> Result<()> {
    let g = g.slice::<f32>()?;
    let piece = cpu.threads.piece(g.len(), BLOCK, GRAIN / 4);
    let [w, m, v] = [w.slices::<f32>()?, m.slices::<f32>()?, v.slices::<f32>()?].map(|p| pieces(p, piece).into_iter());
    cpu.threads.over(g.chunks(piece).zip(w).zip(m).zip(v), |(((g, mut w), mut m), mut v)| {
        for at in (0..g.len()).step_by(BLOCK) {
            let [w, m, v] = [&mut w, &mut m, &mut v].map(|p| block(p, at));
            cpu.simd.run(Adam { s, g: &g[at..], w, m, v });
        }
    });
    Ok(())
}

struct Adam<'a> {
    s: AdamStep,
    g: &'a [f32],
    w: &'a mut [f32],
    m: &'a mut [f32],
    v: &'a mut [f32],
}

impl Job for Adam<'_> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let Adam { s, g, w, m, v } = self;
        let [b1, b2] = s.betas.map(|b| b as f32);
        let [a1, a2] = s.betas.map(|b| (1.0 - b) as f32);
        let [c1, c2] = s.betas.map(|b| (1.0 / (1.0 - b.powf(s.t as f64))) as f32);
        let (lr, eps) = (s.lr as f32, s.eps as f32);
        // Decay goes either into the gradient or straight off the weight.
        let (l2, off) = if s.decoupled { (0.0, (s.lr * s.decay) as f32) } else { (s.decay as f32, 0.0) };
        for (((w, m), v), g) in w.iter_mut().zip(m).zip(v).zip(g) {
            let g = g + l2 * *w;
            *m = b1 * *m + a1 * g;
            *v = b2 * *v + a2 * g * g;
            *w = (*w - off * *w) - lr * (*m * c1) / ((*v * c2).sqrt() + eps);
        }
    }
}
