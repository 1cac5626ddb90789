//! Operations of neural networks on tensors, without gradients: checks of device, type and shape, then one kernel.
//!
//! Letters as in [`backend`](super::backend). Errors name the operand, what was expected, and what came.
use super::{
    DType, Tensor,
    backend::{AdamStep, Attention, Conv2d, CrossEntropy, Dropout, Lstm, Pool2d, SgdStep},
    ops::{contiguous_all, view_of},
    same_device, update_many,
};
use crate::{Error, Result};

impl Tensor {
    /// An error unless `self` is a `dtype` of `shape` on `like`'s device.
    fn expect(&self, op: &str, operand: &str, like: &Tensor, dtype: DType, shape: &[usize]) -> Result<()> {
        same_device(&like.device, self).map_err(|e| e.context(format!("{op}, operand {operand}")))?;
        if self.shape() == shape && self.dtype == dtype {
            return Ok(());
        }
        let message = format!("{op}: {operand} must be {dtype}{shape:?}, got {}{:?}", self.dtype, self.shape());
        Err(if self.dtype == dtype { Error::shape(message) } else { Error::dtype(message) })
    }

    /// The length of the last axis, which kernels treat as channels or features.
    fn last(&self, op: &str) -> Result<usize> {
        self.shape()
            .last()
            .copied()
            .ok_or_else(|| Error::shape(format!("{op}: one axis or more expected, got a scalar")))
    }

    /// How many rows of the last axis there are.
    fn rows(&self) -> usize {
        self.shape()[..self.rank().saturating_sub(1)].iter().product()
    }

    // ---- convolution and pooling ----

    /// `y[n,oh,ow,co]` from `x[n,h,w,ci]` (self), `w[kh,kw,ci/groups,co]` and `bias[co]`.
    pub fn conv2d(&self, c: Conv2d, w: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let y = c.y_shape()?;
        self.expect("conv2d", "x", self, self.dtype, &c.x_shape())?;
        w.expect("conv2d", "w", self, self.dtype, &c.w_shape())?;
        if let Some(b) = bias {
            b.expect("conv2d", "bias", self, self.dtype, &[c.co])?;
        }
        let [x, w] = contiguous_all([self, w])?;
        let bias = bias.map(Tensor::contiguous).transpose()?;
        Tensor::build(&self.device, self.dtype, &y, |b, y| b.conv2d(c, x.view(), w.view(), view_of(&bias), y))
    }

    /// `dx[n,h,w,ci]` from `w[kh,kw,ci/groups,co]` and `dy[n,oh,ow,co]` (self).
    pub fn conv2d_input_grad(&self, c: Conv2d, w: &Tensor) -> Result<Tensor> {
        self.expect("conv2d_input_grad", "dy", self, self.dtype, &c.y_shape()?)?;
        w.expect("conv2d_input_grad", "w", self, self.dtype, &c.w_shape())?;
        let [dy, w] = contiguous_all([self, w])?;
        Tensor::build(&self.device, self.dtype, &c.x_shape(), |b, dx| b.conv2d_input_grad(c, w.view(), dy.view(), dx))
    }

    /// `dw[kh,kw,ci/groups,co]` from `x[n,h,w,ci]` and `dy[n,oh,ow,co]` (self).
    pub fn conv2d_weight_grad(&self, c: Conv2d, x: &Tensor) -> Result<Tensor> {
        self.expect("conv2d_weight_grad", "dy", self, self.dtype, &c.y_shape()?)?;
        x.expect("conv2d_weight_grad", "x", self, self.dtype, &c.x_shape())?;
        let [dy, x] = contiguous_all([self, x])?;
        Tensor::build(&self.device, self.dtype, &c.w_shape(), |b, dw| b.conv2d_weight_grad(c, x.view(), dy.view(), dw))
    }

    /// The maximum of each window of `x[n,h,w,c]`, and its position in the window (i32), both `[n,oh,ow,c]`.
    pub fn max_pool2d(&self, p: Pool2d) -> Result<(Tensor, Tensor)> {
        let shape = p.y_shape()?;
        self.expect("max_pool2d", "x", self, self.dtype, &p.x_shape())?;
        let x = self.contiguous()?;
        let mut arg = Tensor::uninit(&self.device, DType::I32, &shape)?;
        let y = Tensor::build(&self.device, self.dtype, &shape, |b, y| b.max_pool2d(p, x.view(), y, arg.view_mut()?))?;
        Ok((y, arg))
    }

    /// `dx[n,h,w,c]` from `dy[n,oh,ow,c]` (self) and the positions that [`max_pool2d`](Tensor::max_pool2d) gave.
    pub fn max_pool2d_grad(&self, p: Pool2d, arg: &Tensor) -> Result<Tensor> {
        let shape = p.y_shape()?;
        self.expect("max_pool2d_grad", "dy", self, self.dtype, &shape)?;
        arg.expect("max_pool2d_grad", "arg", self, DType::I32, &shape)?;
        let [dy, arg] = contiguous_all([self, arg])?;
        Tensor::build(&self.device, self.dtype, &p.x_shape(), |b, dx| b.max_pool2d_grad(p, arg.view(), dy.view(), dx))
    }

    /// The mean of each window of `x[n,h,w,c]`.
    pub fn avg_pool2d(&self, p: Pool2d) -> Result<Tensor> {
        let shape = p.y_shape()?;
        self.expect("avg_pool2d", "x", self, self.dtype, &p.x_shape())?;
        let x = self.contiguous()?;
        Tensor::build(&self.device, self.dtype, &shape, |b, y| b.avg_pool2d(p, x.view(), y))
    }

    /// `dx[n,h,w,c]` from `dy[n,oh,ow,c]` (self).
    pub fn avg_pool2d_grad(&self, p: Pool2d) -> Result<Tensor> {
        self.expect("avg_pool2d_grad", "dy", self, self.dtype, &p.y_shape()?)?;
        let dy = self.contiguous()?;
        Tensor::build(&self.device, self.dtype, &p.x_shape(), |b, dx| b.avg_pool2d_grad(p, dy.view(), dx))
    }

    // ---- normalisation ----

    /// `mean[c]` and `var[c]` over all axes of `x[…,c]` but the last.
    ///
    /// # Errors
    /// If there are no rows, which have no mean.
    pub fn batch_stats(&self) -> Result<(Tensor, Tensor)> {
        let c = self.last("batch_stats")?;
        if self.rows() == 0 {
            return Err(Error::shape(format!("batch_stats: one row or more expected, got x {:?}", self.shape())));
        }
        let x = self.contiguous()?;
        let mut var = Tensor::uninit(&self.device, self.dtype, &[c])?;
        let mean = Tensor::build(&self.device, self.dtype, &[c], |b, m| b.batch_stats(x.view(), m, var.view_mut()?))?;
        Ok((mean, var))
    }

    /// (x − mean)/√(var + eps)·gamma + beta for each of the channels of x[…,c].
    pub fn batch_norm(&self, eps: f64, stats: [&Tensor; 2], gamma: &Tensor, beta: &Tensor) -> Result<Tensor> {
        let c = self.last("batch_norm")?;
        for (name, t) in [("mean", stats[0]), ("var", stats[1]), ("gamma", gamma), ("beta", beta)] {
            t.expect("batch_norm", name, self, self.dtype, &[c])?;
        }
        let [x, mean, var, gamma, beta] = contiguous_all([self, stats[0], stats[1], gamma, beta])?;
        Tensor::build(&self.device, self.dtype, self.shape(), |b, y| {
            b.batch_norm(eps, x.view(), [mean.view(), var.view()], gamma.view(), beta.view(), y)
        })
    }

    /// `dgamma[c]` and `dbeta[c]` from `dy[…,c]` (self), `x[…,c]` and its statistics.
    pub fn batch_norm_weight_grad(&self, eps: f64, x: &Tensor, stats: [&Tensor; 2]) -> Result<(Tensor, Tensor)> {
        let c = self.last("batch_norm_weight_grad")?;
        x.expect("batch_norm_weight_grad", "x", self, self.dtype, self.shape())?;
        for (name, t) in [("mean", stats[0]), ("var", stats[1])] {
            t.expect("batch_norm_weight_grad", name, self, self.dtype, &[c])?;
        }
        let [dy, x, mean, var] = contiguous_all([self, x, stats[0], stats[1]])?;
        let mut dbeta = Tensor::uninit(&self.device, self.dtype, &[c])?;
        let dgamma = Tensor::build(&self.device, self.dtype, &[c], |b, dgamma| {
            b.batch_norm_weight_grad(eps, x.view(), [mean.view(), var.view()], dy.view(), dgamma, dbeta.view_mut()?)
        })?;
        Ok((dgamma, dbeta))
    }

    /// dx from dy (self) through the batch's own statistics; `sums` = dgamma and dbeta of
    /// [`batch_norm_weight_grad`](Tensor::batch_norm_weight_grad).
    pub fn batch_norm_input_grad(
        &self,
        eps: f64,
        x: &Tensor,
        stats: [&Tensor; 2],
        gamma: &Tensor,
        sums: [&Tensor; 2],
    ) -> Result<Tensor> {
        let c = self.last("batch_norm_input_grad")?;
        x.expect("batch_norm_input_grad", "x", self, self.dtype, self.shape())?;
        let named = [("mean", stats[0]), ("var", stats[1]), ("gamma", gamma), ("dgamma", sums[0]), ("dbeta", sums[1])];
        for (name, t) in named {
            t.expect("batch_norm_input_grad", name, self, self.dtype, &[c])?;
        }
        let [dy, x, mean, var, gamma, dgamma, dbeta] =
            contiguous_all([self, x, stats[0], stats[1], gamma, sums[0], sums[1]])?;
        Tensor::build(&self.device, self.dtype, self.shape(), |b, dx| {
            let (stats, sums) = ([mean.view(), var.view()], [dgamma.view(), dbeta.view()]);
            b.batch_norm_input_grad(eps, x.view(), stats, gamma.view(), sums, dy.view(), dx)
        })
    }

    /// Each row of `x[…,d]` normalised, times `gamma[d]` plus `beta[d]`; and mean and 1/√(var + eps) of each row, kept for the gradients.
    pub fn layer_norm(&self, eps: f64, gamma: &Tensor, beta: &Tensor) -> Result<(Tensor, Tensor, Tensor)> {
        let d = self.last("layer_norm")?;
        gamma.expect("layer_norm", "gamma", self, self.dtype, &[d])?;
        beta.expect("layer_norm", "beta", self, self.dtype, &[d])?;
        let [x, gamma, beta] = contiguous_all([self, gamma, beta])?;
        let mut mean = Tensor::uninit(&self.device, self.dtype, &[self.rows()])?;
        let mut rstd = Tensor::uninit(&self.device, self.dtype, &[self.rows()])?;
        let y = Tensor::build(&self.device, self.dtype, self.shape(), |b, y| {
            b.layer_norm(eps, x.view(), gamma.view(), beta.view(), y, mean.view_mut()?, rstd.view_mut()?)
        })?;
        Ok((y, mean, rstd))
    }

    /// dx from dy[…,d] (self), x and what [`layer_norm`](Tensor::layer_norm) kept (mean and rstd).
    pub fn layer_norm_input_grad(&self, x: &Tensor, stats: [&Tensor; 2], gamma: &Tensor) -> Result<Tensor> {
        self.expect_layer_norm("layer_norm_input_grad", x, stats)?;
        gamma.expect("layer_norm_input_grad", "gamma", self, self.dtype, &[self.last("layer_norm_input_grad")?])?;
        let [dy, x, mean, rstd, gamma] = contiguous_all([self, x, stats[0], stats[1], gamma])?;
        Tensor::build(&self.device, self.dtype, self.shape(), |b, dx| {
            b.layer_norm_input_grad(x.view(), [mean.view(), rstd.view()], gamma.view(), dy.view(), dx)
        })
    }

    /// `dgamma[d]` and `dbeta[d]` from `dy[…,d]` (self), x and what [`layer_norm`](Tensor::layer_norm) kept (mean and rstd).
    pub fn layer_norm_weight_grad(&self, x: &Tensor, stats: [&Tensor; 2]) -> Result<(Tensor, Tensor)> {
        self.expect_layer_norm("layer_norm_weight_grad", x, stats)?;
        let d = self.last("layer_norm_weight_grad")?;
        let [dy, x, mean, rstd] = contiguous_all([self, x, stats[0], stats[1]])?;
        let mut dbeta = Tensor::uninit(&self.device, self.dtype, &[d])?;
        let dgamma = Tensor::build(&self.device, self.dtype, &[d], |b, dgamma| {
            b.layer_norm_weight_grad(x.view(), [mean.view(), rstd.view()], dy.view(), dgamma, dbeta.view_mut()?)
        })?;
        Ok((dgamma, dbeta))
    }

    fn expect_layer_norm(&self, op: &str, x: &Tensor, stats: [&Tensor; 2]) -> Result<()> {
        x.expect(op, "x", self, self.dtype, self.shape())?;
        stats[0].expect(op, "mean", self, self.dtype, &[self.rows()])?;
        stats[1].expect(op, "rstd", self, self.dtype, &[self.rows()])
    }

    // ---- softmax and losses ----

    /// The softmax of each row of x[…,d].
    pub fn softmax(&self) -> Result<Tensor> {
        self.last("softmax")?;
        let x = self.contiguous()?;
        Tensor::build(&self.device, self.dtype, self.shape(), |b, y| b.softmax(x.view(), y))
    }

    /// dx from dy (self) and the result y of [`softmax`](Tensor::softmax).
    pub fn softmax_grad(&self, y: &Tensor) -> Result<Tensor> {
        self.last("softmax_grad")?;
        y.expect("softmax_grad", "y", self, self.dtype, self.shape())?;
        let [dy, y] = contiguous_all([self, y])?;
        Tensor::build(&self.device, self.dtype, self.shape(), |b, dx| b.softmax_grad(y.view(), dy.view(), dx))
    }

    /// Of `logits[m,v]` (self) and `classes[m]` (an integer type): the loss summed over the rows and the number of rows whose
    /// largest logit is the class's, both of shape `[]`, and `prob[m,v]`, kept for the gradient.
    pub fn cross_entropy(&self, c: CrossEntropy, classes: &Tensor) -> Result<(Tensor, Tensor, Tensor)> {
        self.expect("cross_entropy", "logits", self, self.dtype, &[c.m, c.v])?;
        classes.expect("cross_entropy", "classes", self, integer("cross_entropy", "classes", classes)?, &[c.m])?;
        let [logits, classes] = contiguous_all([self, classes])?;
        let mut loss = Tensor::uninit(&self.device, self.dtype, &[])?;
        let mut correct = Tensor::uninit(&self.device, self.dtype, &[])?;
        let prob = Tensor::build(&self.device, self.dtype, &[c.m, c.v], |b, prob| {
            b.cross_entropy(c, logits.view(), classes.view(), loss.view_mut()?, correct.view_mut()?, prob)
        })?;
        Ok((loss, correct, prob))
    }

    /// `dx[m,v]` from dy of shape `[]` (self), and the prob that [`cross_entropy`](Tensor::cross_entropy) kept.
    pub fn cross_entropy_grad(&self, c: CrossEntropy, prob: &Tensor, classes: &Tensor) -> Result<Tensor> {
        self.expect("cross_entropy_grad", "dy", self, prob.dtype, &[])?;
        prob.expect("cross_entropy_grad", "prob", self, self.dtype, &[c.m, c.v])?;
        let ids = integer("cross_entropy_grad", "classes", classes)?;
        classes.expect("cross_entropy_grad", "classes", self, ids, &[c.m])?;
        let [dy, prob, classes] = contiguous_all([self, prob, classes])?;
        Tensor::build(&self.device, self.dtype, &[c.m, c.v], |b, dx| {
            b.cross_entropy_grad(c, prob.view(), classes.view(), dy.view(), dx)
        })
    }

    // ---- attention ----

    /// Of `qkv[n,t,3,heads,d]` (self, of any shape with as many elements): `y[n,t,heads·d]` and `lse[n,heads,t]`, kept for the gradient.
    pub fn attention(&self, a: Attention) -> Result<(Tensor, Tensor)> {
        if a.heads == 0 || a.d == 0 {
            return Err(Error::shape(format!("attention: a head of a feature or more expected, got {a:?}")));
        }
        let qkv = self.reshape(&a.qkv_shape())?;
        let mut lse = Tensor::uninit(&self.device, self.dtype, &a.lse_shape())?;
        let y = Tensor::build(&self.device, self.dtype, &a.y_shape(), |b, y| {
            b.attention(a, qkv.view(), y, lse.view_mut()?)
        })?;
        Ok((y, lse))
    }

    /// The gradient of `qkv`, in its shape, from dy (self), qkv, and y and lse of [`attention`](Tensor::attention).
    pub fn attention_grad(&self, a: Attention, qkv: &Tensor, y: &Tensor, lse: &Tensor) -> Result<Tensor> {
        if a.heads == 0 || a.d == 0 {
            return Err(Error::shape(format!("attention_grad: a head of a feature or more expected, got {a:?}")));
        }
        self.expect("attention_grad", "dy", self, self.dtype, &a.y_shape())?;
        y.expect("attention_grad", "y", self, self.dtype, &a.y_shape())?;
        lse.expect("attention_grad", "lse", self, self.dtype, &a.lse_shape())?;
        let split = qkv.reshape(&a.qkv_shape())?;
        split.expect("attention_grad", "qkv", self, self.dtype, &a.qkv_shape())?;
        let [dy, split, y, lse] = contiguous_all([self, &split, y, lse])?;
        Tensor::build(&self.device, self.dtype, qkv.shape(), |b, dqkv| {
            b.attention_grad(a, split.view(), [y.view(), lse.view()], dy.view(), dqkv)
        })
    }

    // ---- recurrence ----

    /// From what the inputs give to the gates (self, `[n,t,4d]`), `w[4d,d]` and the state `[h, c]` to start with (zeros without):
    /// the gates, `y[n,t,d]` and `c[n,t,d]`.
    pub fn lstm(mut self, l: Lstm, w: &Tensor, start: Option<[&Tensor; 2]>) -> Result<[Tensor; 3]> {
        self.expect("lstm", "gates", &self, self.dtype, &l.gates_shape())?;
        w.expect("lstm", "w", &self, self.dtype, &l.w_shape())?;
        let start = start.map(|[h, c]| self.state("lstm", l, [h, c])).transpose()?;
        let w = w.contiguous()?;
        let mut y = Tensor::uninit(&self.device, self.dtype, &l.y_shape())?;
        let mut c = Tensor::uninit(&self.device, self.dtype, &l.y_shape())?;
        self.update(|b, gates| {
            let start = start.as_ref().map(|s| s.each_ref().map(Tensor::view));
            b.lstm(l, w.view(), start, gates, y.view_mut()?, c.view_mut()?)
        })?;
        Ok([self, y, c])
    }

    /// From dy (self), the gradient of the last state `[h, c]`, and gates and c that [`lstm`](Tensor::lstm) gave: the gradient of
    /// what the inputs give to the gates, and that of the state to start with, which is nothing without c0.
    pub fn lstm_grad(
        &self,
        l: Lstm,
        w: &Tensor,
        kept: [&Tensor; 2],
        c0: Option<&Tensor>,
        dlast: Option<[&Tensor; 2]>,
    ) -> Result<(Tensor, Option<[Tensor; 2]>)> {
        self.expect("lstm_grad", "dy", self, self.dtype, &l.y_shape())?;
        w.expect("lstm_grad", "w", self, self.dtype, &l.w_shape())?;
        kept[0].expect("lstm_grad", "gates", self, self.dtype, &l.gates_shape())?;
        kept[1].expect("lstm_grad", "c", self, self.dtype, &l.y_shape())?;
        let [dy, w, gates, c] = contiguous_all([self, w, kept[0], kept[1]])?;
        let c0 = c0.map(|c| self.state("lstm_grad", l, [c])).transpose()?;
        let dlast = dlast.map(|d| self.state("lstm_grad", l, d)).transpose()?;
        let mut dh0 = Tensor::uninit(&self.device, self.dtype, &l.state_shape())?;
        let mut dc0 = Tensor::uninit(&self.device, self.dtype, &l.state_shape())?;
        let da = Tensor::build(&self.device, self.dtype, &l.gates_shape(), |b, da| {
            let dlast = dlast.as_ref().map(|s| s.each_ref().map(Tensor::view));
            let c0 = c0.as_ref().map(|[c]| c.view());
            let (kept, out) = ([gates.view(), c.view()], [da, dh0.view_mut()?, dc0.view_mut()?]);
            b.lstm_grad(l, w.view(), kept, c0, dy.view(), dlast, out)
        })?;
        Ok((da, c0.map(|_| [dh0, dc0])))
    }

    /// States of an [`lstm`](Tensor::lstm), contiguous; an error unless they are `[n,d]`.
    fn state<const N: usize>(&self, op: &str, l: Lstm, states: [&Tensor; N]) -> Result<[Tensor; N]> {
        for s in states {
            s.expect(op, "state", self, self.dtype, &l.state_shape())?;
        }
        contiguous_all(states)
    }

    // ---- embedding and dropout ----

    /// The rows of `table[v,d]` (self) at `ids` of any shape: `y[…,d]`.
    pub fn embedding(&self, ids: &Tensor) -> Result<Tensor> {
        let &[_, d] = self.shape() else {
            return Err(Error::shape(format!("embedding: table must be [v, d], got {:?}", self.shape())));
        };
        ids.expect("embedding", "ids", self, integer("embedding", "ids", ids)?, ids.shape())?;
        let [table, flat] = contiguous_all([self, ids])?;
        let shape = [ids.shape(), &[d]].concat();
        Tensor::build(&self.device, self.dtype, &shape, |b, y| b.embedding(table.view(), flat.view(), y))
    }

    /// `dtable[v,d]` from `dy[…,d]` (self) and the `ids` of the forward pass.
    pub fn embedding_grad(&self, v: usize, ids: &Tensor) -> Result<Tensor> {
        let d = self.last("embedding_grad")?;
        let expected = &self.shape()[..self.rank() - 1];
        ids.expect("embedding_grad", "ids", self, integer("embedding_grad", "ids", ids)?, expected)?;
        let [dy, ids] = contiguous_all([self, ids])?;
        Tensor::build(&self.device, self.dtype, &[v, d], |b, dt| b.embedding_grad(ids.view(), dy.view(), dt))
    }

    /// x·mask/(1 − rate); applied to dy it is the gradient. Axis 0 must be a multiple of the number of samples.
    pub fn dropout(&self, d: Dropout) -> Result<Tensor> {
        if !(0.0..1.0).contains(&d.rate) {
            return Err(Error::config(format!("dropout: rate must be in 0 ≤ rate < 1, got {}", d.rate)));
        }
        let rows = self.shape().first().copied().unwrap_or(1);
        if d.samples.is_empty() && rows > 0 || !rows.is_multiple_of(d.samples.len().max(1)) {
            let message = format!(
                "dropout: axis 0 of x {:?} must be a multiple of the {} samples",
                self.shape(),
                d.samples.len()
            );
            return Err(Error::shape(message));
        }
        let x = self.contiguous()?;
        Tensor::build(&self.device, self.dtype, self.shape(), |b, y| b.dropout(d, x.view(), y))
    }

    // ---- optimizer steps ----

    /// One step of SGD on `self` with gradient `g` and velocity `v`, which is there exactly with momentum.
    pub fn sgd_step(&mut self, s: SgdStep, g: &Tensor, v: Option<&mut Tensor>) -> Result<()> {
        g.expect("sgd", "g", self, self.dtype, self.shape())?;
        let g = g.contiguous()?;
        match v {
            Some(v) if s.momentum != 0.0 => {
                v.expect("sgd", "v", self, self.dtype, self.shape())?;
                update_many([self, v], |b, [w, v]| b.sgd(s, g.view(), w, Some(v)))
            }
            None if s.momentum == 0.0 => self.update(|b, w| b.sgd(s, g.view(), w, None)),
            other => Err(Error::config(format!(
                "sgd: a velocity goes with momentum, got momentum {} {} velocity",
                s.momentum,
                if other.is_some() { "and a" } else { "without" }
            ))),
        }
    }

    /// One step of Adam or AdamW on `self` with gradient `g` and first and second moments `m` and `v`.
    pub fn adam_step(&mut self, s: AdamStep, g: &Tensor, m: &mut Tensor, v: &mut Tensor) -> Result<()> {
        for (name, t) in [("g", g), ("m", &*m), ("v", &*v)] {
            t.expect("adam", name, self, self.dtype, self.shape())?;
        }
        if s.t == 0 {
            return Err(Error::config("adam: steps count from 1, got step 0"));
        }
        let g = g.contiguous()?;
        update_many([self, m, v], |b, [w, m, v]| b.adam(s, g.view(), w, m, v))
    }
}

/// The type of an operand that must be of an integer type.
fn integer(op: &str, operand: &str, t: &Tensor) -> Result<DType> {
    match t.dtype {
        DType::I64 | DType::I32 | DType::U8 => Ok(t.dtype),
        other => Err(Error::dtype(format!("{op}: {operand} must be i64, i32 or u8, got {other}"))),
    }
}
