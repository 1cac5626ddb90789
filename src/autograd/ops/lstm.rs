//! Long short-term memory. Letters: n samples, t tokens, i inputs, d units.
use crate::{
    Error, Result,
    autograd::{Cx, Mask, Op, Outputs, Saved, Sink, Var},
    tensor::{
        Tensor,
        backend::{Lstm, Reduce},
    },
};

const X: usize = 0;
const W_IH: usize = 1;
const W_HH: usize = 2;
const B_IH: usize = 3;
const B_HH: usize = 4;
const H0: usize = 5;
const C0: usize = 6;

/// Saved: x, w_ih, w_hh, gates, c, y, and, where the sequence starts with a state, h0 and c0. I keeps for W the gradient of
/// what the inputs give to the gates, of which W makes all of its own, and that of the state.
struct Recurrence {
    l: Lstm,
    /// Whether a state was given.
    started: bool,
}

impl Recurrence {
    /// da and, where the sequence started with a state, dh0 and dc0.
    fn through_time(&self, saved: &mut Saved, dy: &[Option<Tensor>]) -> Result<(Tensor, Option<[Tensor; 2]>)> {
        if let Some(da) = saved.kept(0) {
            let start = saved.kept(1).cloned().zip(saved.kept(2).cloned());
            return Ok((da.clone(), start.map(|(h, c)| [h, c])));
        }
        let (kept, w) = ([saved.get(3)?, saved.get(4)?], saved.get(2)?);
        let or_zeros = |g: &Option<Tensor>, shape: &[usize]| match g {
            Some(g) => Ok(g.clone()),
            None => Tensor::zeros(shape, w.dtype(), w.device()),
        };
        let state = self.l.state_shape();
        let all = or_zeros(&dy[0], &self.l.y_shape())?;
        let last = match (&dy[1], &dy[2]) {
            (None, None) => None,
            (h, c) => Some([or_zeros(h, &state)?, or_zeros(c, &state)?]),
        };
        let c0 = if self.started { Some(saved.get(7)?) } else { None };
        let (da, dstart) = all.lstm_grad(self.l, w, kept, c0, last.as_ref().map(|s| s.each_ref()))?;
        saved.keep(0, da.clone());
        if let Some([h, c]) = &dstart {
            saved.keep(1, h.clone());
            saved.keep(2, c.clone());
        }
        Ok((da, dstart))
    }

    /// The h that each token started from, [n·t,d].
    fn before(&self, saved: &Saved) -> Result<Tensor> {
        let (y, Lstm { n, t, d }) = (saved.get(5)?, self.l);
        let h0 = if self.started { saved.get(6)?.clone() } else { Tensor::zeros(&[n, d], y.dtype(), y.device())? };
        Tensor::concat(&[h0.reshape(&[n, 1, d])?, y.slice(1, 0, t - 1)?], 1)?.reshape(&[n * t, d])
    }
}

impl Op for Recurrence {
    fn name(&self) -> &'static str {
        "lstm"
    }

    fn backward(&self, saved: &mut Saved, dy: &[Option<Tensor>], wrt: Mask, dx: &mut Sink) -> Result<()> {
        let Lstm { n, t, d } = self.l;
        let (da, dstart) = self.through_time(saved, dy)?;
        let da = da.reshape(&[n * t, 4 * d])?;
        if wrt.has(X) {
            let w = saved.get(1)?;
            dx.put(X, da.gemm(false, w, false, None)?.reshape(&[n, t, w.shape()[1]])?)?; // dx[n,t,i] = da[n,t,4d] w_ih[4d,i]
        }
        if wrt.has(W_IH) {
            let x = saved.get(0)?;
            let x = x.reshape(&[n * t, x.shape()[2]])?;
            dx.put(W_IH, da.gemm(true, &x, false, None)?)?; // dw_ih[4d,i] = da[n·t,4d]ᵀ x[n·t,i]
        }
        if wrt.has(W_HH) {
            dx.put(W_HH, da.gemm(true, &self.before(saved)?, false, None)?)?;
        }
        if wrt.has(B_IH) || wrt.has(B_HH) {
            let sum = da.reduce(Reduce::Sum, 0)?;
            for b in [B_IH, B_HH].into_iter().filter(|&b| wrt.has(b)) {
                dx.put(b, sum.clone())?;
            }
        }
        for (i, g) in [H0, C0].into_iter().zip(dstart.into_iter().flatten()) {
            if wrt.has(i) {
                dx.put(i, g)?;
            }
        }
        Ok(())
    }
}

impl Cx<'_> {
    /// A layer of long short-term memory over the sequence `x[n,t,i]`: `y[n,t,d]`, and `h[n,d]` and `c[n,d]` after the last token.
    /// `params` are `w_ih[4d,i]`, `w_hh[4d,d]`, `b_ih[4d]` and `b_hh[4d]` of the gates i, f, g, o; `start` is the state `[h, c]` to start
    /// with, each `[n,d]`, zeros without.
    pub fn lstm(&mut self, x: &Var, params: [&Var; 4], start: Option<[&Var; 2]>) -> Result<Outputs> {
        let [w_ih, w_hh, b_ih, b_hh] = params;
        let d = w_hh.shape().last().copied().unwrap_or(0);
        let &[n, t, i] = x.shape() else {
            return Err(Error::shape(format!("lstm: x[n,t,i] expected, got {:?}", x.shape())));
        };
        if t == 0 || d == 0 || w_ih.shape() != [4 * d, i] || [b_ih, b_hh].iter().any(|b| b.shape() != [4 * d]) {
            let shapes: Vec<_> = [x].into_iter().chain(params).map(Var::shape).collect();
            return Err(Error::shape(format!(
                "lstm: x[n,t,i] of one token or more, w_ih[4d,i], w_hh[4d,d], b_ih[4d] and b_hh[4d] expected, got {shapes:?}"
            )));
        }
        let l = Lstm { n, t, d };
        let bias = b_ih.value().add(b_hh.value())?;
        let rows = x.value().reshape(&[n * t, i])?;
        let given = rows.gemm(false, w_ih.value(), true, Some(&bias))?.reshape(&l.gates_shape())?;
        let [gates, y, c] = given.lstm(l, w_hh.value(), start.map(|s| s.map(Var::value)))?;
        let last = |all: &Tensor| all.slice(1, t - 1, 1)?.contiguous()?.reshape(&l.state_shape());
        let outputs = vec![y.clone(), last(&y)?, last(&c)?];
        let mut inputs = vec![x, w_ih, w_hh, b_ih, b_hh];
        inputs.extend(start.into_iter().flatten());
        // What goes back through time: done by I, unless I has nothing to do.
        let data: Mask = [X, H0, C0].into_iter().filter(|&v| inputs.get(v).is_some_and(|v| v.needs_grad())).collect();
        let first = if data.is_empty() { Mask::ALL } else { data };
        let mut save = vec![
            (x.value(), Mask::only(W_IH)),
            (w_ih.value(), Mask::only(X)),
            (w_hh.value(), first),
            (&gates, first),
            (&c, first),
            (&y, Mask::only(W_HH)),
        ];
        if let Some([h0, c0]) = start {
            save.extend([(h0.value(), Mask::only(W_HH)), (c0.value(), first)]);
        }
        self.record(Recurrence { l, started: start.is_some() }, &inputs, outputs, &save)
    }
}
