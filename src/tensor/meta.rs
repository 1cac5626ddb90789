//! Shapes without data: counts the floating-point operations and the bytes of operands that work would take.
//!
//! A multiply-add counts as two operations, a transcendental function as one; each operand's bytes count once.
use super::{
    Backend, InOut, Machine, Pool, View, ViewMut,
    backend::{
        AdamStep, Attention, Binary, Conv2d, Counted, CrossEntropy, Dropout, Gemm, Lstm, Pool2d, Reduce, SgdStep,
        Unary, operations,
    },
};
use crate::Result;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub(crate) struct Meta {
    pool: Arc<Pool>,
    machine: Option<Machine>,
    counted: Mutex<Counted>,
}

impl Meta {
    /// `machine` tells what kernels take.
    pub(crate) fn new(machine: Option<Machine>) -> Meta {
        Meta { pool: Pool::new(false), machine, counted: Mutex::default() }
    }

    /// A count stays whole whatever panics beside it.
    fn so_far(&self) -> MutexGuard<'_, Counted> {
        self.counted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A kernel.
    fn count(&self, flops: u64, operands: &[u64]) -> Result<()> {
        self.count_products(0, flops, operands)
    }

    /// A kernel with as many operations in products of matrices, and some others.
    fn count_products(&self, products: u64, others: u64, operands: &[u64]) -> Result<()> {
        let (flops, bytes) = (products.saturating_add(others), operands.iter().sum());
        let mut all = self.so_far();
        all.flops = all.flops.saturating_add(flops);
        all.products = all.products.saturating_add(products);
        all.bytes = all.bytes.saturating_add(bytes);
        all.seconds += self.machine.map_or(0.0, |m| m.seconds(flops, bytes));
        Ok(())
    }
}

/// Elements of an operand.
fn len(v: &View) -> u64 {
    v.layout.len() as u64
}
fn read(v: &View) -> u64 {
    len(v) * v.dtype.size() as u64
}
fn written(v: &ViewMut) -> u64 {
    (v.layout.len() * v.dtype.size()) as u64
}
/// Read and written.
fn both(v: &InOut) -> u64 {
    2 * written(&v.dst)
}

impl Backend for Meta {
    fn name(&self) -> &str {
        "meta"
    }
    fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }
    fn has_data(&self) -> bool {
        false
    }
    fn counted(&self) -> Counted {
        *self.so_far()
    }
    fn fill(&self, _value: f64, y: ViewMut) -> Result<()> {
        self.count(0, &[written(&y)])
    }
    fn copy(&self, x: View, y: ViewMut) -> Result<()> {
        self.count(0, &[read(&x), written(&y)])
    }
    fn unary(&self, _op: Unary, x: View, y: ViewMut) -> Result<()> {
        self.count(len(&x), &[read(&x), written(&y)])
    }
    fn unary_grad(&self, _op: Unary, saved: View, dy: View, dx: ViewMut) -> Result<()> {
        self.count(2 * len(&dy), &[read(&saved), read(&dy), written(&dx)])
    }
    fn binary(&self, _op: Binary, a: View, b: View, y: ViewMut) -> Result<()> {
        self.count(len(&a), &[read(&a), read(&b), written(&y)])
    }
    fn axpy(&self, _alpha: f64, x: View, y: InOut) -> Result<()> {
        self.count(2 * len(&x), &[read(&x), both(&y)])
    }
    fn reduce(&self, _op: Reduce, _dims: [usize; 3], x: View, y: ViewMut) -> Result<()> {
        self.count(len(&x), &[read(&x), written(&y)])
    }
    fn all_finite(&self, x: View) -> Result<bool> {
        self.count(0, &[read(&x)])?;
        Ok(true)
    }
    fn gemm(&self, g: Gemm, a: View, b: View, bias: Option<View>, y: ViewMut) -> Result<()> {
        self.count_products(
            operations(&[g.batch, g.m, g.n, g.k]),
            0,
            &[read(&a), read(&b), bias.map_or(0, |v| read(&v)), written(&y)],
        )
    }
    fn conv2d(&self, c: Conv2d, x: View, w: View, bias: Option<View>, y: ViewMut) -> Result<()> {
        self.count_products(c.flops(), 0, &[read(&x), read(&w), bias.map_or(0, |v| read(&v)), written(&y)])
    }
    fn conv2d_input_grad(&self, c: Conv2d, w: View, dy: View, dx: ViewMut) -> Result<()> {
        self.count_products(c.flops(), 0, &[read(&w), read(&dy), written(&dx)])
    }
    fn conv2d_weight_grad(&self, c: Conv2d, x: View, dy: View, dw: ViewMut) -> Result<()> {
        self.count_products(c.flops(), 0, &[read(&x), read(&dy), written(&dw)])
    }
    fn max_pool2d(&self, _p: Pool2d, x: View, y: ViewMut, arg: ViewMut) -> Result<()> {
        self.count(len(&x), &[read(&x), written(&y), written(&arg)])
    }
    fn max_pool2d_grad(&self, _p: Pool2d, arg: View, dy: View, dx: ViewMut) -> Result<()> {
        self.count(len(&dy), &[read(&arg), read(&dy), written(&dx)])
    }
    fn avg_pool2d(&self, _p: Pool2d, x: View, y: ViewMut) -> Result<()> {
        self.count(len(&x), &[read(&x), written(&y)])
    }
    fn avg_pool2d_grad(&self, _p: Pool2d, dy: View, dx: ViewMut) -> Result<()> {
        self.count(len(&dy), &[read(&dy), written(&dx)])
    }
    fn batch_stats(&self, x: View, mean: ViewMut, var: ViewMut) -> Result<()> {
        self.count(4 * len(&x), &[read(&x), written(&mean), written(&var)])
    }
    fn batch_norm(&self, _eps: f64, x: View, stats: [View; 2], gamma: View, beta: View, y: ViewMut) -> Result<()> {
        self.count(2 * len(&x), &[read(&x), read(&stats[0]), read(&stats[1]), read(&gamma), read(&beta), written(&y)])
    }
    fn batch_norm_weight_grad(
        &self,
        _eps: f64,
        x: View,
        stats: [View; 2],
        dy: View,
        dgamma: ViewMut,
        dbeta: ViewMut,
    ) -> Result<()> {
        self.count(
            4 * len(&x),
            &[read(&x), read(&stats[0]), read(&stats[1]), read(&dy), written(&dgamma), written(&dbeta)],
        )
    }
    fn batch_norm_input_grad(
        &self,
        _eps: f64,
        x: View,
        stats: [View; 2],
        gamma: View,
        sums: [View; 2],
        dy: View,
        dx: ViewMut,
    ) -> Result<()> {
        self.count(
            5 * len(&x),
            &[
                read(&x),
                read(&stats[0]),
                read(&stats[1]),
                read(&gamma),
                read(&sums[0]),
                read(&sums[1]),
                read(&dy),
                written(&dx),
            ],
        )
    }
    fn layer_norm(
        &self,
        _eps: f64,
        x: View,
        gamma: View,
        beta: View,
        y: ViewMut,
        mean: ViewMut,
        rstd: ViewMut,
    ) -> Result<()> {
        self.count(7 * len(&x), &[read(&x), read(&gamma), read(&beta), written(&y), written(&mean), written(&rstd)])
    }
    fn layer_norm_input_grad(&self, x: View, stats: [View; 2], gamma: View, dy: View, dx: ViewMut) -> Result<()> {
        self.count(8 * len(&x), &[read(&x), read(&stats[0]), read(&stats[1]), read(&gamma), read(&dy), written(&dx)])
    }
    fn layer_norm_weight_grad(
        &self,
        x: View,
        stats: [View; 2],
        dy: View,
        dgamma: ViewMut,
        dbeta: ViewMut,
    ) -> Result<()> {
        self.count(
            4 * len(&x),
            &[read(&x), read(&stats[0]), read(&stats[1]), read(&dy), written(&dgamma), written(&dbeta)],
        )
    }
    fn softmax(&self, x: View, y: ViewMut) -> Result<()> {
        self.count(4 * len(&x), &[read(&x), written(&y)])
    }
    fn softmax_grad(&self, y: View, dy: View, dx: ViewMut) -> Result<()> {
        self.count(4 * len(&y), &[read(&y), read(&dy), written(&dx)])
    }
    fn attention(&self, a: Attention, qkv: View, y: ViewMut, lse: ViewMut) -> Result<()> {
        self.count_products(a.flops().saturating_mul(2), 0, &[read(&qkv), written(&y), written(&lse)])
    }
    fn attention_grad(&self, a: Attention, qkv: View, [y, lse]: [View; 2], dy: View, dqkv: ViewMut) -> Result<()> {
        self.count_products(
            a.flops().saturating_mul(5),
            0,
            &[read(&qkv), read(&y), read(&lse), read(&dy), written(&dqkv)],
        )
    }
    fn lstm(&self, l: Lstm, w: View, start: Option<[View; 2]>, gates: InOut, y: ViewMut, c: ViewMut) -> Result<()> {
        let start = start.map_or(0, |[h, c]| read(&h) + read(&c));
        let pointwise = 5 * written(&y) / y.dtype.size() as u64;
        self.count_products(l.flops(), pointwise, &[read(&w), start, both(&gates), written(&y), written(&c)])
    }
    fn lstm_grad(
        &self,
        l: Lstm,
        w: View,
        [gates, c]: [View; 2],
        c0: Option<View>,
        dy: View,
        dlast: Option<[View; 2]>,
        [da, dh0, dc0]: [ViewMut; 3],
    ) -> Result<()> {
        let states = dlast.map_or(0, |[h, c]| read(&h) + read(&c)) + c0.map_or(0, |c| read(&c));
        let kept = [read(&w), read(&gates), read(&c), states, read(&dy)];
        self.count_products(
            l.flops(),
            20 * len(&dy),
            &[&kept[..], &[written(&da), written(&dh0), written(&dc0)]].concat(),
        )
    }
    fn cross_entropy(
        &self,
        _c: CrossEntropy,
        logits: View,
        classes: View,
        loss: ViewMut,
        correct: ViewMut,
        prob: ViewMut,
    ) -> Result<()> {
        self.count(
            5 * len(&logits),
            &[read(&logits), read(&classes), written(&loss), written(&correct), written(&prob)],
        )
    }
    fn cross_entropy_grad(&self, _c: CrossEntropy, prob: View, classes: View, dy: View, dx: ViewMut) -> Result<()> {
        self.count(2 * len(&prob), &[read(&prob), read(&classes), read(&dy), written(&dx)])
    }
    fn embedding(&self, table: View, ids: View, y: ViewMut) -> Result<()> {
        self.count(0, &[read(&table), read(&ids), written(&y)])
    }
    fn embedding_grad(&self, ids: View, dy: View, dtable: ViewMut) -> Result<()> {
        self.count(len(&dy), &[read(&ids), read(&dy), written(&dtable)])
    }
    fn dropout(&self, _d: Dropout, x: View, y: ViewMut) -> Result<()> {
        self.count(2 * len(&x), &[read(&x), written(&y)])
    }
    fn sgd(&self, _s: SgdStep, g: View, w: InOut, v: Option<InOut>) -> Result<()> {
        self.count(4 * len(&g), &[read(&g), both(&w), v.map_or(0, |v| both(&v))])
    }
    fn adam(&self, _s: AdamStep, g: View, w: InOut, m: InOut, v: InOut) -> Result<()> {
        self.count(12 * len(&g), &[read(&g), both(&w), both(&m), both(&v)])
    }
}
