//! This machine's cores, in f32. What has no kernel of its own here, and arithmetic in f64, goes to the reference backend.
//!
//! Every kernel cuts its *outputs* over the threads, or a reduction into blocks that depend on the shapes only: the same bits
//! for any number of threads.
mod ahead;
mod attention;
mod columns;
mod conv2d;
mod copy;
mod elementwise;
mod gemm;
mod index;
mod isa;
mod lanes;
mod lstm;
mod math;
mod micro;
mod norm;
mod optim;
mod pack;
mod par;
mod patches;
mod peak;
mod pool2d;
mod reduce;
mod softmax;
mod team;
mod winograd;

use super::{
    Backend, Buffer, CpuOptions, DType, InOut, Pool, View, ViewMut,
    backend::{AdamStep, Attention, Binary, Conv2d, CrossEntropy, Dropout, Gemm, Lstm, Pool2d, Reduce, SgdStep, Unary},
    reference::Reference,
};
use crate::{Result, memory};
pub use isa::Isa;
use isa::Simd;
use par::Threads;
pub(crate) use par::{MOST_THREADS, check_threads};
use std::sync::Arc;

pub(crate) struct Cpu {
    plain: Reference,
    simd: Simd,
    threads: Threads,
    winograd: bool,
}

impl Cpu {
    pub(crate) fn new(CpuOptions { threads, isa, winograd }: CpuOptions) -> Result<Cpu> {
        Ok(Cpu { plain: Reference::new(), simd: Simd::new(isa)?, threads: Threads::new(threads)?, winograd })
    }

    /// Memory for `len` elements of f32 that a kernel needs while it runs, where it grows with what the kernel is of.
    ///
    /// # Errors
    /// If this machine has no such memory.
    fn memory(&self, op: &str, len: usize) -> Result<Buffer> {
        memory::check(|| format!("what {op} needs while it runs"), len as u128 * size_of::<f32>() as u128)?;
        Ok(self.scratch(len))
    }

    /// The same, for what does not grow: a few megabytes for each thread.
    fn scratch(&self, len: usize) -> Buffer {
        self.plain.pool().scratch(len * size_of::<f32>())
    }
}

impl Backend for Cpu {
    fn name(&self) -> &str {
        "cpu"
    }
    fn pool(&self) -> &Arc<Pool> {
        self.plain.pool()
    }
    fn threads(&self) -> usize {
        self.threads.count()
    }
    fn fill(&self, value: f64, y: ViewMut) -> Result<()> {
        self.plain.fill(value, y)
    }
    fn copy(&self, x: View, y: ViewMut) -> Result<()> {
        let again = ViewMut { buf: &mut *y.buf, ..y };
        if copy::copy(self, x, again)? { Ok(()) } else { self.plain.copy(x, y) }
    }
    fn unary(&self, op: Unary, x: View, y: ViewMut) -> Result<()> {
        if y.dtype != DType::F32 {
            return self.plain.unary(op, x, y);
        }
        elementwise::unary(self, op, x, y)
    }
    fn unary_grad(&self, op: Unary, saved: View, dy: View, dx: ViewMut) -> Result<()> {
        if dx.dtype != DType::F32 {
            return self.plain.unary_grad(op, saved, dy, dx);
        }
        elementwise::unary_grad(self, op, saved, dy, dx)
    }
    fn binary(&self, op: Binary, a: View, b: View, y: ViewMut) -> Result<()> {
        if y.dtype != DType::F32 {
            return self.plain.binary(op, a, b, y);
        }
        elementwise::binary(self, op, a, b, y)
    }
    fn axpy(&self, alpha: f64, x: View, y: InOut) -> Result<()> {
        if x.dtype != DType::F32 {
            return self.plain.axpy(alpha, x, y);
        }
        elementwise::axpy(self, alpha, x, y)
    }
    fn reduce(&self, op: Reduce, dims: [usize; 3], x: View, y: ViewMut) -> Result<()> {
        if y.dtype != DType::F32 {
            return self.plain.reduce(op, dims, x, y);
        }
        reduce::reduce(self, op, dims, x, y)
    }
    fn all_finite(&self, x: View) -> Result<bool> {
        if x.dtype != DType::F32 {
            return self.plain.all_finite(x);
        }
        elementwise::all_finite(self, x)
    }
    fn gemm(&self, g: Gemm, a: View, b: View, bias: Option<View>, y: ViewMut) -> Result<()> {
        if y.dtype != DType::F32 {
            return self.plain.gemm(g, a, b, bias, y);
        }
        gemm::gemm(self, g, a, b, bias, y)
    }
    fn conv2d(&self, c: Conv2d, x: View, w: View, bias: Option<View>, y: ViewMut) -> Result<()> {
        if y.dtype != DType::F32 {
            return self.plain.conv2d(c, x, w, bias, y);
        }
        if self.winograd && winograd::suits(&c) {
            return winograd::forward(self, c, x, w, bias, y);
        }
        conv2d::forward(self, c, x, w, bias, y)
    }
    fn conv2d_input_grad(&self, c: Conv2d, w: View, dy: View, dx: ViewMut) -> Result<()> {
        if dx.dtype != DType::F32 {
            return self.plain.conv2d_input_grad(c, w, dy, dx);
        }
        if self.winograd && winograd::suits(&c) {
            return winograd::input_grad(self, c, w, dy, dx);
        }
        conv2d::input_grad(self, c, w, dy, dx)
    }
    fn conv2d_weight_grad(&self, c: Conv2d, x: View, dy: View, dw: ViewMut) -> Result<()> {
        if dw.dtype != DType::F32 {
            return self.plain.conv2d_weight_grad(c, x, dy, dw);
        }
        if self.winograd && winograd::suits(&c) {
            return winograd::weight_grad(self, c, x, dy, dw);
        }
        conv2d::weight_grad(self, c, x, dy, dw)
    }
    fn max_pool2d(&self, p: Pool2d, x: View, y: ViewMut, arg: ViewMut) -> Result<()> {
        if y.dtype != DType::F32 {
            return self.plain.max_pool2d(p, x, y, arg);
        }
        pool2d::max_pool(self, p, x, y, arg)
    }
    fn max_pool2d_grad(&self, p: Pool2d, arg: View, dy: View, dx: ViewMut) -> Result<()> {
        if dx.dtype != DType::F32 {
            return self.plain.max_pool2d_grad(p, arg, dy, dx);
        }
        pool2d::max_pool_grad(self, p, arg, dy, dx)
    }
    fn avg_pool2d(&self, p: Pool2d, x: View, y: ViewMut) -> Result<()> {
        if y.dtype != DType::F32 {
            return self.plain.avg_pool2d(p, x, y);
        }
        pool2d::avg_pool(self, p, x, y)
    }
    fn avg_pool2d_grad(&self, p: Pool2d, dy: View, dx: ViewMut) -> Result<()> {
        if dx.dtype != DType::F32 {
            return self.plain.avg_pool2d_grad(p, dy, dx);
        }
        pool2d::avg_pool_grad(self, p, dy, dx)
    }
    fn batch_stats(&self, x: View, mean: ViewMut, var: ViewMut) -> Result<()> {
        if x.dtype != DType::F32 {
            return self.plain.batch_stats(x, mean, var);
        }
        norm::batch_stats(self, x, mean, var)
    }
    fn batch_norm(&self, eps: f64, x: View, stats: [View; 2], gamma: View, beta: View, y: ViewMut) -> Result<()> {
        if x.dtype != DType::F32 {
            return self.plain.batch_norm(eps, x, stats, gamma, beta, y);
        }
        norm::batch_norm(self, eps, x, stats, [gamma, beta], y)
    }
    fn batch_norm_weight_grad(
        &self,
        eps: f64,
        x: View,
        stats: [View; 2],
        dy: View,
        dgamma: ViewMut,
        dbeta: ViewMut,
    ) -> Result<()> {
        if x.dtype != DType::F32 {
            return self.plain.batch_norm_weight_grad(eps, x, stats, dy, dgamma, dbeta);
        }
        norm::batch_norm_weight_grad(self, eps, x, stats, dy, [dgamma, dbeta])
    }
    fn batch_norm_input_grad(
        &self,
        eps: f64,
        x: View,
        stats: [View; 2],
        gamma: View,
        sums: [View; 2],
        dy: View,
        dx: ViewMut,
    ) -> Result<()> {
        if x.dtype != DType::F32 {
            return self.plain.batch_norm_input_grad(eps, x, stats, gamma, sums, dy, dx);
        }
        norm::batch_norm_input_grad(self, eps, x, stats, gamma, sums, dy, dx)
    }
    fn layer_norm(
        &self,
        eps: f64,
        x: View,
        gamma: View,
        beta: View,
        y: ViewMut,
        mean: ViewMut,
        rstd: ViewMut,
    ) -> Result<()> {
        if x.dtype != DType::F32 {
            return self.plain.layer_norm(eps, x, gamma, beta, y, mean, rstd);
        }
        norm::layer_norm(self, eps, x, [gamma, beta], y, [mean, rstd])
    }
    fn layer_norm_input_grad(&self, x: View, stats: [View; 2], gamma: View, dy: View, dx: ViewMut) -> Result<()> {
        if x.dtype != DType::F32 {
            return self.plain.layer_norm_input_grad(x, stats, gamma, dy, dx);
        }
        norm::layer_norm_input_grad(self, x, stats, gamma, dy, dx)
    }
    fn layer_norm_weight_grad(
        &self,
        x: View,
        stats: [View; 2],
        dy: View,
        dgamma: ViewMut,
        dbeta: ViewMut,
    ) -> Result<()> {
        if x.dtype != DType::F32 {
            return self.plain.layer_norm_weight_grad(x, stats, dy, dgamma, dbeta);
        }
        norm::layer_norm_weight_grad(self, x, stats, dy, [dgamma, dbeta])
    }
    fn softmax(&self, x: View, y: ViewMut) -> Result<()> {
        if x.dtype != DType::F32 {
            return self.plain.softmax(x, y);
        }
        softmax::softmax(self, x, y)
    }
    fn softmax_grad(&self, y: View, dy: View, dx: ViewMut) -> Result<()> {
        if y.dtype != DType::F32 {
            return self.plain.softmax_grad(y, dy, dx);
        }
        softmax::softmax_grad(self, y, dy, dx)
    }
    fn attention(&self, a: Attention, qkv: View, y: ViewMut, lse: ViewMut) -> Result<()> {
        if qkv.dtype != DType::F32 {
            return self.plain.attention(a, qkv, y, lse);
        }
        attention::forward(self, a, qkv, y, lse)
    }
    fn attention_grad(&self, a: Attention, qkv: View, kept: [View; 2], dy: View, dqkv: ViewMut) -> Result<()> {
        if qkv.dtype != DType::F32 {
            return self.plain.attention_grad(a, qkv, kept, dy, dqkv);
        }
        attention::backward(self, a, qkv, kept, dy, dqkv)
    }
    fn lstm(&self, l: Lstm, w: View, start: Option<[View; 2]>, gates: InOut, y: ViewMut, c: ViewMut) -> Result<()> {
        if w.dtype != DType::F32 {
            return self.plain.lstm(l, w, start, gates, y, c);
        }
        lstm::forward(self, l, w, start, gates, [y, c])
    }
    fn lstm_grad(
        &self,
        l: Lstm,
        w: View,
        kept: [View; 2],
        c0: Option<View>,
        dy: View,
        dlast: Option<[View; 2]>,
        out: [ViewMut; 3],
    ) -> Result<()> {
        if w.dtype != DType::F32 {
            return self.plain.lstm_grad(l, w, kept, c0, dy, dlast, out);
        }
        lstm::backward(self, l, w, kept, c0, dy, dlast, out)
    }
    fn cross_entropy(
        &self,
        c: CrossEntropy,
        logits: View,
        classes: View,
        loss: ViewMut,
        correct: ViewMut,
        prob: ViewMut,
    ) -> Result<()> {
        if logits.dtype != DType::F32 {
            return self.plain.cross_entropy(c, logits, classes, loss, correct, prob);
        }
        softmax::cross_entropy(self, c, logits, classes, [loss, correct], prob)
    }
    fn cross_entropy_grad(&self, c: CrossEntropy, prob: View, classes: View, dy: View, dx: ViewMut) -> Result<()> {
        if prob.dtype != DType::F32 {
            return self.plain.cross_entropy_grad(c, prob, classes, dy, dx);
        }
        softmax::cross_entropy_grad(self, c, prob, classes, dy, dx)
    }
    fn embedding(&self, table: View, ids: View, y: ViewMut) -> Result<()> {
        if table.dtype != DType::F32 {
            return self.plain.embedding(table, ids, y);
        }
        index::embedding(self, table, ids, y)
    }
    fn embedding_grad(&self, ids: View, dy: View, dtable: ViewMut) -> Result<()> {
        if dy.dtype != DType::F32 {
            return self.plain.embedding_grad(ids, dy, dtable);
        }
        index::embedding_grad(self, ids, dy, dtable)
    }
    fn dropout(&self, d: Dropout, x: View, y: ViewMut) -> Result<()> {
        if x.dtype != DType::F32 {
            return self.plain.dropout(d, x, y);
        }
        elementwise::dropout(self, d, x, y)
    }
    fn sgd(&self, s: SgdStep, g: View, w: InOut, v: Option<InOut>) -> Result<()> {
        if g.dtype != DType::F32 {
            return self.plain.sgd(s, g, w, v);
        }
        optim::sgd(self, s, g, w, v)
    }
    fn adam(&self, s: AdamStep, g: View, w: InOut, m: InOut, v: InOut) -> Result<()> {
        if g.dtype != DType::F32 {
            return self.plain.adam(s, g, w, m, v);
        }
        optim::adam(self, s, g, w, m, v)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_machine_lacks_is_not_asked_for() {
        let cpu = Cpu::new(CpuOptions::new(Isa::Portable)).unwrap();
        assert_eq!(cpu.memory("it", 5).unwrap().len(), 20);
        for len in [1 << 50, usize::MAX] {
            let e = cpu.memory("it", len).err().unwrap().to_string();
            assert!(e.contains("what it needs while it runs takes ") && e.contains("this machine has"), "{e}");
        }
    }
}
