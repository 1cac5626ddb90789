//! How fast the kernels of the CPU backend are: products in GFLOP/s, the others in GB/s of what they must read and write.
//!
//! `cargo bench --bench kernels [-- FILTER]`; the least of several times, since other work on the machine only ever adds.
use pipewright::{
    Result,
    tensor::{
        DType, Device, Philox, Tensor,
        backend::{Conv2d, Dropout, Pool2d, Reduce, SgdStep, Unary},
    },
};
use std::time::{Duration, Instant};

/// The least time of one call, of those that fit into about 0.4 s.
fn least(mut f: impl FnMut() -> Result<Tensor>) -> Result<f64> {
    f()?;
    let (mut best, start) = (Duration::MAX, Instant::now());
    while start.elapsed() < Duration::from_millis(400) {
        let t = Instant::now();
        std::hint::black_box(f()?);
        best = best.min(t.elapsed());
    }
    Ok(best.as_secs_f64())
}

struct Bench {
    device: Device,
    filter: String,
}

impl Bench {
    fn random(&self, shape: &[usize]) -> Result<Tensor> {
        self.device.uniform(Philox::new(1, 0, "bench"), -1.0, 1.0, shape, DType::F32)
    }

    fn report(&self, name: &str, flops: u64, f: impl FnMut() -> Result<Tensor>) -> Result<()> {
        if !name.contains(&self.filter) {
            return Ok(());
        }
        let t = least(f)?;
        println!("{name:44} {:9.3} ms {:7.1} GFLOP/s", t * 1e3, flops as f64 / t / 1e9);
        Ok(())
    }

    /// A kernel whose limit is memory: bytes that it must read and write.
    fn stream(&self, name: &str, bytes: usize, f: impl FnMut() -> Result<Tensor>) -> Result<()> {
        if !name.contains(&self.filter) {
            return Ok(());
        }
        let t = least(f)?;
        println!("{name:44} {:9.3} ms {:7.1} GB/s", t * 1e3, bytes as f64 / t / 1e9);
        Ok(())
    }

    /// Everything but products, on activations of 32 images of 16×16 with 128 channels (4 MiB).
    fn streams(&self) -> Result<()> {
        let (n, hw, c) = (32, 16, 128);
        let x = self.random(&[n, hw, hw, c])?;
        let size = x.byte_len();
        for op in [Unary::Relu, Unary::Exp, Unary::Tanh, Unary::Sigmoid, Unary::Gelu] {
            self.stream(&format!("{op:?}"), 2 * size, || x.unary(op))?;
            self.stream(&format!("{op:?} gradient"), 3 * size, || x.unary_grad(op, &x))?;
        }
        let row = self.random(&[c])?;
        self.stream("add", 3 * size, || x.add(&x))?;
        self.stream("add a row", 2 * size, || x.add(&row))?;
        self.stream("sum of rows", size, || x.reshape(&[n * hw * hw, c])?.reduce(Reduce::Sum, 0))?;
        self.stream("sum of all", size, || x.sum())?;
        self.stream("slice of channels", size, || x.slice(3, 1, c / 2)?.contiguous())?;
        self.stream("transpose", 2 * size, || x.permute(&[0, 3, 1, 2])?.contiguous())?;
        self.stream("to bf16", size * 3 / 2, || x.cast(DType::BF16))?;
        let samples: Vec<u64> = (0..n as u64).collect();
        let drop = Dropout { rate: 0.5, rng: Philox::new(1, 0, "drop"), samples: &samples };
        self.stream("dropout", 2 * size, || x.dropout(drop))?;
        let p = Pool2d { n, hw: [hw; 2], c, kernel: [2; 2], stride: [2; 2], padding: [0; 2] };
        let (y, arg) = x.max_pool2d(p)?;
        self.stream("max pool", size * 3 / 2, || Ok(x.max_pool2d(p)?.0))?;
        self.stream("max pool gradient", size * 3 / 2, || y.max_pool2d_grad(p, &arg))?;
        let (mean, var) = x.batch_stats()?;
        let stats = [&mean, &var];
        let (dgamma, dbeta) = x.batch_norm_weight_grad(1e-5, &x, stats)?;
        self.stream("batch statistics", 2 * size, || Ok(x.batch_stats()?.0))?;
        self.stream("batch norm", 2 * size, || x.batch_norm(1e-5, stats, &row, &row))?;
        self.stream("batch norm weight", 2 * size, || Ok(x.batch_norm_weight_grad(1e-5, &x, stats)?.0))?;
        self.stream("batch norm input", 3 * size, || {
            x.batch_norm_input_grad(1e-5, &x, stats, &row, [&dgamma, &dbeta])
        })?;
        let (_, mean, rstd) = x.layer_norm(1e-5, &row, &row)?;
        self.stream("layer norm", 2 * size, || Ok(x.layer_norm(1e-5, &row, &row)?.0))?;
        self.stream("layer norm input", 3 * size, || x.layer_norm_input_grad(&x, [&mean, &rstd], &row))?;
        self.stream("softmax", 2 * size, || x.softmax())?;
        let mut w = self.random(&[1 << 20])?;
        let (mut v, g) = (w.add(&w)?, w.add(&w)?);
        let sgd = SgdStep { lr: 1e-3, momentum: 0.9, decay: 1e-4, nesterov: false };
        self.stream("sgd in place", 5 * w.byte_len(), || w.sgd_step(sgd, &g, Some(&mut v)).map(|()| g.clone()))?;
        self.stream("sgd to a fresh buffer", 5 * w.byte_len(), || {
            let _old = w.clone();
            w.sgd_step(sgd, &g, Some(&mut v)).map(|()| g.clone())
        })
    }

    fn gemm(&self, m: usize, n: usize, k: usize) -> Result<()> {
        for (ta, tb) in [(false, false), (false, true), (true, false)] {
            let a = self.random(&if ta { [k, m] } else { [m, k] })?;
            let b = self.random(&if tb { [n, k] } else { [k, n] })?;
            let name = format!("gemm {m}x{n}x{k}{}{}", if ta { " ta" } else { "" }, if tb { " tb" } else { "" });
            self.report(&name, 2 * (m * n * k) as u64, || a.gemm(ta, &b, tb, None))?;
        }
        Ok(())
    }

    fn conv(&self, n: usize, hw: usize, ci: usize, co: usize, kernel: usize, stride: usize) -> Result<()> {
        let c = Conv2d {
            n,
            hw: [hw; 2],
            ci,
            co,
            kernel: [kernel; 2],
            stride: [stride; 2],
            padding: [kernel / 2; 2],
            dilation: [1; 2],
            groups: 1,
        };
        let (x, w) = (self.random(&c.x_shape())?, self.random(&c.w_shape())?);
        let dy = self.random(&c.y_shape()?)?;
        let name = format!("conv {n}x{hw}x{hw} {ci}-{co} k{kernel} s{stride}");
        self.report(&format!("{name} forward"), c.flops(), || x.conv2d(c, &w, None))?;
        self.report(&format!("{name} input"), c.flops(), || dy.conv2d_input_grad(c, &w))?;
        self.report(&format!("{name} weight"), c.flops(), || dy.conv2d_weight_grad(c, &x))
    }
}

fn main() -> Result<()> {
    let filter = std::env::args().skip(1).find(|a| !a.starts_with('-')).unwrap_or_default();
    let threads = std::env::var("THREADS").ok().and_then(|t| t.parse().ok()).unwrap_or(1);
    let bench = Bench { device: Device::cpu(threads)?, filter };
    bench.streams()?;
    let products = [(1024, 1024, 1024), (4, 512, 512), (4, 4096, 4096), (32, 512, 512), (28, 4096, 4096)];
    for (m, n, k) in products.into_iter().chain([(128, 1024, 784), (1024, 256, 256)]) {
        bench.gemm(m, n, k)?;
    }
    for n in [4, 32] {
        let layers = [(32, 3, 64), (32, 64, 64), (16, 64, 128), (16, 128, 128), (8, 128, 256), (8, 256, 256)];
        for (hw, ci, co) in layers.into_iter().chain([(4, 256, 512), (4, 512, 512), (2, 512, 512)]) {
            bench.conv(n, hw, ci, co, 3, 1)?;
        }
    }
    bench.conv(32, 28, 1, 32, 3, 1)?;
    bench.conv(32, 14, 32, 64, 3, 1)?;
    bench.conv(32, 32, 64, 128, 3, 2)?;
    bench.conv(32, 32, 64, 128, 1, 2)?;
    bench.conv(32, 16, 256, 64, 1, 1)
}
