//! Long short-term memory: the weights are packed once for all tokens; the samples of a token are one product, then their gates.
//!
//! Letters: n samples, t tokens, d units; a row is one token of one sample.
use super::{
    Cpu,
    gemm::{Problem, solve_into},
    isa::VectorJob,
    lanes::{Lanes, Vectors},
    math::{self, Sigmoid, Tanh},
    micro::Kernels,
    pack::{A, B},
};
use crate::{
    Result,
    tensor::{Buffer, InOut, View, ViewMut, backend::Lstm},
};

/// Gates that are worth a thread.
const GRAIN: usize = 1 << 12;

/// A whole b[k,n] in panels.
fn panels(cpu: &Cpu, op: &str, b: &B, k: usize, n: usize) -> Result<Buffer> {
    let nr = Kernels::of(cpu.simd).nr;
    let mut out = cpu.memory(op, k * n.next_multiple_of(nr))?;
    let part = cpu.threads.piece(n, nr, GRAIN / k.max(1) + 1);
    let parts = bytemuck::cast_slice_mut(out.bytes_mut()).chunks_mut((part * k).max(1));
    cpu.threads.over(parts.enumerate(), |(i, out)| b.pack(cpu.simd, 0..k, i * part..n.min((i + 1) * part), nr, out));
    Ok(out)
}

/// The state [h, c] to start with.
fn states(of: Option<[View<'_>; 2]>) -> Result<Option<[&[f32]; 2]>> {
    of.map(|[h, c]| Ok([h.slice::<f32>()?, c.slice::<f32>()?])).transpose()
}

pub(crate) fn forward(
    cpu: &Cpu,
    l: Lstm,
    w: View,
    start: Option<[View; 2]>,
    mut gates: InOut,
    [mut y, mut c]: [ViewMut; 2],
) -> Result<()> {
    let Lstm { n, t, d } = l;
    let (w, start, y, c) = (w.slice::<f32>()?, states(start)?, y.slice::<f32>()?, c.slice::<f32>()?);
    let (old, gates) = gates.slices::<f32>()?;
    old.iter().for_each(|old| gates.copy_from_slice(old));
    if y.is_empty() {
        return Ok(());
    }
    let w = panels(cpu, "lstm", &B::Columns { data: w, ld: d, run: d, bases: vec![0] }, d, 4 * d)?;
    let samples = cpu.threads.piece(n, 1, GRAIN / (4 * d) + 1);
    for step in 0..t {
        // What the state adds to the gates: gates[n,4d] += h[n,d]·wᵀ.
        let h = match (step, start) {
            (0, None) => None,
            (0, Some([h, _])) => Some(A::Rows { data: h, ld: d }),
            _ => Some(A::Rows { data: &y[(step - 1) * d..], ld: t * d }),
        };
        if let Some(a) = h {
            let b = B::Panels { data: bytemuck::cast_slice(w.bytes()) };
            let row = Box::new(|i| (i * t + step) * 4 * d);
            solve_into(cpu, &[Problem { m: n, n: 4 * d, k: d, a, b, bias: None, row }], true, gates);
        }
        let parts = gates.chunks_mut(samples * t * 4 * d).zip(y.chunks_mut(samples * t * d));
        cpu.threads.over(parts.zip(c.chunks_mut(samples * t * d)).enumerate(), |(i, ((gates, y), c))| {
            let rows = gates.chunks_mut(t * 4 * d).zip(y.chunks_mut(t * d)).zip(c.chunks_mut(t * d));
            for (s, ((gates, y), c)) in rows.enumerate() {
                let (before, c) = c.split_at_mut(step * d);
                let before = match start {
                    _ if step > 0 => Some(&before[(step - 1) * d..]),
                    Some([_, c0]) => Some(&c0[(i * samples + s) * d..][..d]),
                    None => None,
                };
                let gates = &mut gates[step * 4 * d..][..4 * d];
                cpu.simd.vectors(Gates { gates, before, c: &mut c[..d], y: &mut y[step * d..][..d] });
            }
        });
    }
    Ok(())
}

/// One row: activates the gates, and makes state and output of them; no state before counts as zeros.
struct Gates<'a> {
    gates: &'a mut [f32],
    before: Option<&'a [f32]>,
    c: &'a mut [f32],
    y: &'a mut [f32],
}

impl VectorJob for Gates<'_> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self, v: Vectors<L>) {
        let Gates { gates, before, c, y } = self;
        let d = c.len();
        let (input_forget, rest) = gates.split_at_mut(2 * d);
        let (g, o) = rest.split_at_mut(d);
        math::apply(v, Sigmoid, input_forget);
        math::apply(v, Tanh, g);
        math::apply(v, Sigmoid, o);
        let (i, f) = input_forget.split_at(d);
        for ((c, i), g) in c.iter_mut().zip(i).zip(&*g) {
            *c = i * g;
        }
        for ((c, f), before) in c.iter_mut().zip(f).zip(before.unwrap_or(&[])) {
            *c += f * before;
        }
        for at in (0..d).step_by(L::N) {
            let tanh = math::tanh(v, v.load_first(c, at, d - at));
            v.store_first(v.mul(v.load_first(o, at, d - at), tanh), y, at, d - at);
        }
    }
}

pub(crate) fn backward(
    cpu: &Cpu,
    l: Lstm,
    w: View,
    [gates, c]: [View; 2],
    c0: Option<View>,
    dy: View,
    dlast: Option<[View; 2]>,
    [mut da, mut dh, mut dc]: [ViewMut; 3],
) -> Result<()> {
    let Lstm { n, t, d } = l;
    let (w, gates, c, dy) = (w.slice::<f32>()?, gates.slice::<f32>()?, c.slice::<f32>()?, dy.slice::<f32>()?);
    let (c0, dlast) = (c0.map(|c| c.slice::<f32>()).transpose()?, states(dlast)?);
    // The gradient of the state on its way to the start.
    let (da, dh, dc) = (da.slice::<f32>()?, dh.slice::<f32>()?, dc.slice::<f32>()?);
    match dlast {
        Some([h, c]) => {
            dh.copy_from_slice(h);
            dc.copy_from_slice(c);
        }
        None => [&mut *dh, &mut *dc].into_iter().for_each(|s| s.fill(0.0)),
    }
    if dy.is_empty() {
        return Ok(());
    }
    let w = panels(cpu, "lstm_grad", &B::Rows { data: w, ld: d }, 4 * d, d)?;
    let samples = cpu.threads.piece(n, 1, GRAIN / (4 * d) + 1);
    for step in (0..t).rev() {
        let parts = da.chunks_mut(samples * t * 4 * d).zip(dh.chunks(samples * d)).zip(dc.chunks_mut(samples * d));
        cpu.threads.over(parts.enumerate(), |(i, ((da, dh), dc))| {
            let rows = da.chunks_mut(t * 4 * d).zip(dh.chunks(d)).zip(dc.chunks_mut(d));
            for (s, ((da, dh), dc)) in rows.enumerate() {
                let sample = i * samples + s;
                let at = (sample * t + step) * d;
                let before = if step > 0 { Some(&c[at - d..at]) } else { c0.map(|c| &c[sample * d..][..d]) };
                let (gates, c, dy) = (&gates[4 * at..][..4 * d], &c[at..][..d], &dy[at..][..d]);
                cpu.simd.vectors(Slopes { gates, before, c, dy, dh, dc, da: &mut da[step * 4 * d..][..4 * d] });
            }
        });
        if step > 0 || c0.is_some() {
            // dh[n,d] = da[n,4d]·w
            let (a, b) = (
                A::Rows { data: &da[step * 4 * d..], ld: t * 4 * d },
                B::Panels { data: bytemuck::cast_slice(w.bytes()) },
            );
            solve_into(cpu, &[Problem { m: n, n: d, k: 4 * d, a, b, bias: None, row: Box::new(|i| i * d) }], false, dh);
        }
    }
    Ok(())
}

/// One row backwards: da from the gradients dy + dh of its output and dc of its state; dc becomes that of the state before.
struct Slopes<'a> {
    gates: &'a [f32],
    before: Option<&'a [f32]>,
    c: &'a [f32],
    dy: &'a [f32],
    dh: &'a [f32],
    dc: &'a mut [f32],
    da: &'a mut [f32],
}

impl VectorJob for Slopes<'_> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self, v: Vectors<L>) {
        let Slopes { gates, before, c, dy, dh, dc, da } = self;
        let d = c.len();
        let (c, dy, dh, dc) = (&c[..d], &dy[..d], &dh[..d], &mut dc[..d]);
        let gate = |k: usize| &gates[k * d..][..d];
        let (i, f, g, o) = (gate(0), gate(1), gate(2), gate(3));
        let (di, rest) = da.split_at_mut(d);
        let (df, rest) = rest.split_at_mut(d);
        let (dg, rest) = rest.split_at_mut(d);
        let dout = &mut rest[..d];
        dout.copy_from_slice(c);
        math::apply(v, Tanh, dout);
        for j in 0..d {
            let (tanh, dh) = (dout[j], dy[j] + dh[j]);
            dout[j] = dh * tanh * o[j] * (1.0 - o[j]);
            let slope = dc[j] + dh * o[j] * (1.0 - tanh * tanh);
            di[j] = slope * g[j] * i[j] * (1.0 - i[j]);
            dg[j] = slope * i[j] * (1.0 - g[j] * g[j]);
            // The state before is a factor of this one.
            df[j] = slope * f[j] * (1.0 - f[j]);
            dc[j] = slope * f[j];
        }
        match before {
            Some(before) => df.iter_mut().zip(before).for_each(|(df, c)| *df *= c),
            None => df.fill(0.0),
        }
    }
}
