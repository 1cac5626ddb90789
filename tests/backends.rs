//! Every kernel of the CPU backend, for each set of vector instructions that this machine has, against the reference.
//!
//! The bound of the products is |Δ| ≤ 4·k·ε·Σ|a||b| + 1 ulp, k the number of summands. One and two threads give the same bits.
mod common;
use common::*;
use pipewright::{
    Result,
    tensor::{
        CpuOptions, DType, Device, Isa, Philox, Tensor,
        backend::{AdamStep, Attention, Binary, Conv2d, CrossEntropy, Dropout, Lstm, Pool2d, Reduce, SgdStep, Unary},
    },
};
use proptest::prelude::*;

/// A size with 0, 1 and odd ones in it.
fn size(max: usize) -> impl Strategy<Value = usize> {
    prop_oneof![1 => Just(0), 2 => Just(1), 12 => 2..=max]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn gemm(m in size(70), n in size(90), k in size(600), batch in 0..4usize, ta: bool, tb: bool, biased: bool) {
        let (sa, sb) = (if ta { [batch, k, m] } else { [batch, m, k] }, if tb { [batch, n, k] } else { [batch, k, n] });
        agree_linear(k + 1, |x| {
            let bias = biased.then(|| x.get("bias", &[n]));
            Ok(vec![x.get("a", &sa).gemm(ta, &x.get("b", &sb), tb, bias.as_ref())?])
        })?;
    }

    #[test]
    fn conv2d(
        n in size(3), hw in [size(12), size(12)], kernel in [1..4usize, 1..4usize], stride in [1..4usize, 1..4usize],
        padding in [0..3usize, 0..3usize], dilation in [1..3usize, 1..3usize], groups in 1..4usize,
        cig in size(9), cog in size(35), biased: bool,
    ) {
        let c = Conv2d { n, hw, ci: cig * groups, co: cog * groups, kernel, stride, padding, dilation, groups };
        prop_assume!(c.out().is_ok());
        convolution(c, biased)?;
    }

    /// Channels and tiles enough for 4 products instead of 9.
    #[test]
    fn winograd(
        n in 1..4usize, hw in [4..30usize, 4..30usize], padding in [0..3usize, 0..3usize], ci in 16..70usize,
        co in 16..70usize, biased: bool,
    ) {
        convolution(Conv2d { hw, padding, ..square(n, 0, ci, co, 3, 1) }, biased)?;
    }

    #[test]
    fn pooling(
        n in size(4), hw in [size(12), size(12)], c in size(40), kernel in [1..4usize, 1..4usize],
        stride in [1..4usize, 1..4usize], padding in [0..2usize, 0..2usize],
    ) {
        let p = Pool2d { n, hw, c, kernel, stride, padding };
        prop_assume!(p.out().is_ok());
        pool(p)?;
    }

    #[test]
    fn elementwise(shape in [size(9), size(9), size(50)], suffix in 0..4usize) {
        elements(&shape, suffix)?;
    }

    #[test]
    fn reductions(dims in [size(20), size(300), size(70)]) {
        reduce(dims)?;
    }

    #[test]
    fn normalisation(m in size(300), d in size(90)) {
        prop_assume!(m > 0);
        norms(m, d)?;
    }

    #[test]
    fn softmax_and_loss(m in size(60), v in size(70), smoothing in prop_oneof![Just(0.0), Just(0.1)], ignore: bool) {
        losses(m, v, smoothing, ignore)?;
    }

    #[test]
    fn attention(n in size(3), t in 1..150usize, heads in 1..4usize, d in 1..40usize, causal: bool) {
        attend(Attention { n, t, heads, d, causal })?;
    }

    #[test]
    fn lstm(n in size(20), t in 1..6usize, d in 1..50usize, started: bool, last: bool) {
        recur(Lstm { n, t, d }, started, last)?;
    }

    #[test]
    fn embedding(m in size(60), v in 1..50usize, d in size(70)) {
        embed(m, v, d)?;
    }

    #[test]
    fn dropout(samples in 1..6u64, rows in 1..3usize, d in size(90), rate in 0.0..0.9f64) {
        drop_out(samples, rows, d, rate)?;
    }

    #[test]
    fn optimizers(n in size(3000), shared: bool, nesterov: bool, decoupled: bool) {
        steps(n, shared, nesterov, decoupled)?;
    }

    #[test]
    fn copies(shape in [size(5), size(6), size(7), size(8)], order in Just([0, 1, 2, 3]).prop_shuffle(), to in 0..7usize) {
        copy(&shape, &order, DType::ALL[to])?;
    }
}

fn convolution(c: Conv2d, biased: bool) -> TestResult {
    let (y, taps) = (c.y_shape()?, c.kernel[0] * c.kernel[1]);
    let pixels = y[0] * y[1] * y[2];
    agree_linear(taps * c.ci / c.groups + 1, |x| {
        let bias = biased.then(|| x.get("bias", &[c.co]));
        Ok(vec![x.get("x", &c.x_shape()).conv2d(c, &x.get("w", &c.w_shape()), bias.as_ref())?])
    })?;
    agree_linear(taps * c.co / c.groups, |x| {
        Ok(vec![x.get("dy", &y).conv2d_input_grad(c, &x.get("w", &c.w_shape()))?])
    })?;
    agree_linear(pixels, |x| Ok(vec![x.get("dy", &y).conv2d_weight_grad(c, &x.get("x", &c.x_shape()))?]))
}

/// Shapes that reach every way through the product: several blocks in each direction, threads, few rows and many.
#[test]
fn large_products() -> Result<(), TestCaseError> {
    for (m, n, k) in [(530, 70, 300), (4, 1100, 1030), (33, 600, 700), (15, 550, 600), (61, 1050, 90)] {
        for (ta, tb) in [(false, false), (true, false), (false, true), (true, true)] {
            let (sa, sb) = (if ta { [k, m] } else { [m, k] }, if tb { [n, k] } else { [k, n] });
            agree_linear(k, |x| Ok(vec![x.get("a", &sa).gemm(ta, &x.get("b", &sb), tb, None)?]))?;
        }
    }
    Ok(())
}

/// Whole numbers, whose sums are exact in any order: every block in its place, whoever computes it.
#[test]
fn products_of_whole_numbers_are_exact_on_any_number_of_threads() -> Result<()> {
    let whole = |lane: &str, len: usize| -> Vec<i32> {
        let rng = Philox::new(3, 0, lane);
        (0..len as u64).map(|i| rng.below(0, i, 7) as i32 - 3).collect()
    };
    // Rows divided among threads, columns, and few rows; more than one block in every direction.
    for (m, n, k) in [(620, 580, 1100), (150, 1150, 1100), (40, 1150, 600)] {
        let (a, b) = (whole("a", m * k), whole("b", k * n));
        let mut exact = vec![0i32; m * n];
        for (i, row) in exact.chunks_mut(n).enumerate() {
            for (a, b) in a[i * k..][..k].iter().zip(b.chunks(n)) {
                row.iter_mut().zip(b).for_each(|(y, b)| *y += a * b);
            }
        }
        let exact: Vec<f32> = exact.into_iter().map(|y| y as f32).collect();
        for (isa, threads) in Isa::available().into_iter().flat_map(|isa| [1, 2, 3, 5].map(|t| (isa, t))) {
            let device = Device::cpu_with(CpuOptions { threads, ..CpuOptions::new(isa) })?;
            let tensor = |x: &[i32], shape: [usize; 2]| {
                Tensor::from_host(&x.iter().map(|&x| x as f32).collect::<Vec<_>>(), &shape, &device)
            };
            let (a, b) = (tensor(&a, [m, k])?, tensor(&b, [k, n])?);
            let (turned_a, turned_b) = (a.transpose()?.contiguous()?, b.transpose()?.contiguous()?);
            for (ta, tb) in [(false, false), (true, false), (false, true), (true, true)] {
                let (a, b) = (if ta { &turned_a } else { &a }, if tb { &turned_b } else { &b });
                let y: Vec<f32> = a.gemm(ta, b, tb, None)?.to_host()?;
                assert!(y == exact, "{isa}, {threads} threads, {m}x{n}x{k}, turned {ta} {tb}");
            }
        }
    }
    Ok(())
}

fn square(n: usize, hw: usize, ci: usize, co: usize, kernel: usize, stride: usize) -> Conv2d {
    Conv2d {
        n,
        hw: [hw; 2],
        ci,
        co,
        kernel: [kernel; 2],
        stride: [stride; 2],
        padding: [kernel / 2; 2],
        dilation: [1; 2],
        groups: 1,
    }
}

#[test]
fn large_convolutions() -> Result<(), TestCaseError> {
    convolution(square(3, 13, 40, 70, 3, 1), true)?;
    convolution(square(2, 9, 3, 64, 5, 2), false)?;
    convolution(square(2, 10, 48, 40, 1, 1), true)?;
    convolution(Conv2d { groups: 48, ..square(2, 16, 48, 48, 3, 1) }, true)?;
    // Several blocks of channels, several strips.
    convolution(square(3, 9, 300, 33, 3, 1), true)?;
    convolution(square(5, 31, 20, 280, 3, 1), false)
}

/// The root mean square of the error of the three convolutions, on data of unit scale.
fn errors(c: Conv2d, device: &Device) -> Result<[f64; 3]> {
    let normal =
        |device: &Device, name, shape: &[usize]| device.normal(Philox::new(3, 0, name), 1.0, shape, DType::F32);
    let all = |device: &Device| -> Result<[Tensor; 3]> {
        let (x, w) = (normal(device, "x", &c.x_shape())?, normal(device, "w", &c.w_shape())?);
        let dy = normal(device, "dy", &c.y_shape()?)?;
        Ok([x.conv2d(c, &w, None)?, dy.conv2d_input_grad(c, &w)?, dy.conv2d_weight_grad(c, &x)?])
    };
    let (got, want) = (all(device)?, all(&Device::reference())?);
    let mut found = [0.0; 3];
    for (f, (got, want)) in found.iter_mut().zip(got.iter().zip(&want)) {
        let (got, want) = (got.to_f64()?, want.to_f64()?);
        let squares: f64 = got.iter().zip(&want).map(|(g, w)| (g - w).powi(2)).sum();
        *f = (squares / want.len() as f64).sqrt();
    }
    Ok(found)
}

/// Four products for nine cost at most a factor of four in accuracy.
#[test]
fn the_error_of_winograd_is_bounded() -> Result<()> {
    for isa in Isa::available() {
        for c in [square(4, 16, 64, 64, 3, 1), square(2, 28, 32, 48, 3, 1), square(16, 4, 256, 128, 3, 1)] {
            let error = |winograd| errors(c, &Device::cpu_with(CpuOptions { winograd, ..CpuOptions::new(isa) })?);
            let (with, without) = (error(true)?, error(false)?);
            for (pass, (with, without)) in ["forward", "input", "weight"].iter().zip(with.iter().zip(without)) {
                assert!(*with != without, "{isa} {c:?} {pass}: not done with fewer products");
                assert!(*with <= 4.0 * without, "{isa} {c:?} {pass}: {with:e}, plain sums {without:e}");
                println!("{isa} {pass}: {:.2} times the error of plain sums", with / without);
            }
        }
    }
    Ok(())
}

fn pool(p: Pool2d) -> TestResult {
    let taps = p.kernel[0] * p.kernel[1];
    let y = p.y_shape()?;
    agree_within(
        |x| {
            // Few distinct values, so that several are the largest; and a NaN.
            let x = x.range("x", &p.x_shape(), -4.0, 4.0).cast(DType::I32)?.cast(DType::F32)?;
            let (y, arg) = x.affine(-1.0, 0.0)?.unary(Unary::Log)?.max_pool2d(p)?;
            let (y2, arg2) = x.max_pool2d(p)?;
            Ok(vec![y, arg, y2, arg2])
        },
        |_, _, w| 4.0 * EPS * w.abs(),
    )?;
    agree_linear(taps, |x| {
        let arg = x.range("x", &p.x_shape(), -1.0, 1.0).max_pool2d(p)?.1;
        Ok(vec![x.get("dy", &y).max_pool2d_grad(p, &arg)?])
    })?;
    agree_linear(taps, |x| Ok(vec![x.get("x", &p.x_shape()).avg_pool2d(p)?, x.get("dy", &y).avg_pool2d_grad(p)?]))
}

const UNARY: [Unary; 12] = [
    Unary::Neg,
    Unary::Exp,
    Unary::Log,
    Unary::Sqrt,
    Unary::Recip,
    Unary::Square,
    Unary::Abs,
    Unary::Relu,
    Unary::Gelu,
    Unary::Tanh,
    Unary::Sigmoid,
    Unary::Affine { scale: 0.7, shift: -0.2 },
];

fn elements(shape: &[usize], suffix: usize) -> TestResult {
    for op in UNARY {
        agree_within(
            |x| {
                let (x, dy) = (x.range("x", shape, -5.5, 6.5), x.get("dy", shape));
                let y = x.unary(op)?;
                Ok(vec![dy.unary_grad(op, if op.saves_result() { &y } else { &x })?, y])
            },
            // Φ and the logistic function are near 1 where 1 − them is lost; y·(1 − y) inherits it.
            |_, _, w| 8.0 * EPS * w.abs() + if w.is_finite() { 8.0 * EPS } else { 0.0 },
        )?;
    }
    for op in [Binary::Add, Binary::Sub, Binary::Mul, Binary::Div, Binary::Max] {
        agree_within(|x| Ok(vec![x.get("a", shape).binary(op, &x.get("b", &shape[suffix..]))?]), |_, _, _| 0.0)?;
    }
    agree_linear(2, |x| {
        let (mut y, g) = (x.get("y", shape), x.get("g", shape));
        let old = y.clone();
        y.axpy(0.3, &g)?;
        let mut in_place = x.get("y", shape);
        in_place.axpy(0.3, &g)?;
        Ok(vec![y, in_place, old])
    })
}

fn reduce(dims: [usize; 3]) -> TestResult {
    agree_linear(dims[1], |x| Ok(vec![x.get("x", &dims).reduce(Reduce::Sum, 1)?]))?;
    agree_linear(dims[1] * dims[2], |x| Ok(vec![x.get("x", &[dims[0], dims[1] * dims[2]]).reduce(Reduce::Sum, 1)?]))?;
    agree_within(
        |x| {
            let x = x.get("x", &dims);
            Ok(vec![x.reduce(Reduce::Max, 1)?, x.reduce(Reduce::Max, 2)?, x.unary(Unary::Log)?.reduce(Reduce::Max, 1)?])
        },
        |_, _, w| 4.0 * EPS * w.abs(),
    )?;
    agree_within(
        |x| {
            let t = x.get("x", &dims);
            let log = t.unary(Unary::Log)?;
            let finite = [t.all_finite()?, log.all_finite()?].map(|f| f64::from(u8::from(f)));
            Ok(vec![x.device.from_f64(finite.into_iter(), &[2], DType::F32)?])
        },
        |_, _, _| 0.0,
    )
}

/// Everything about the rows and columns of x[m,d]: values of size 1, sums of m or d of them; d = 1 has no variance.
fn norms(m: usize, d: usize) -> TestResult {
    let eps = 1e-3;
    let bound = move |k: usize| move |_: usize, _: usize, w: f64| 4.0 * EPS * (k as f64 + 30.0) * (w.abs() + 4.0);
    agree_within(
        |x| {
            let (x, dy) = (x.range("x", &[m, d], -1.0, 3.0), x.get("dy", &[m, d]));
            let (mean, var) = x.batch_stats()?;
            Ok(vec![mean, var, dy])
        },
        bound(m),
    )?;
    agree_within(
        |x| {
            let (gamma, beta, dy) = (x.get("gamma", &[d]), x.get("beta", &[d]), x.get("dy", &[m, d]));
            let (mean, var) = (x.get("mean", &[d]), x.range("var", &[d], 0.2, 1.0));
            let (x, stats) = (x.get("x", &[m, d]), [&mean, &var]);
            let (dgamma, dbeta) = dy.batch_norm_weight_grad(eps, &x, stats)?;
            let scale = 1.0 / m as f64;
            let dx = dy.batch_norm_input_grad(eps, &x, stats, &gamma, [&mean, &beta])?;
            let y = x.batch_norm(eps, stats, &gamma, &beta)?;
            Ok(vec![y, dx, dgamma.affine(scale, 0.0)?, dbeta.affine(scale, 0.0)?])
        },
        bound(m),
    )?;
    agree_within(
        |x| {
            let (gamma, beta, dy) = (x.get("gamma", &[d]), x.get("beta", &[d]), x.get("dy", &[m, d]));
            let x = x.get("x", &[m, d]);
            let (y, mean, rstd) = x.layer_norm(0.1, &gamma, &beta)?;
            let dx = dy.layer_norm_input_grad(&x, [&mean, &rstd], &gamma)?;
            let (dgamma, dbeta) = dy.layer_norm_weight_grad(&x, [&mean, &rstd])?;
            let scale = 1.0 / m as f64;
            Ok(vec![y, mean, rstd, dx, dgamma.affine(scale, 0.0)?, dbeta.affine(scale, 0.0)?])
        },
        bound(m + d),
    )
}

/// The integers 0..v in random order, as a tensor of a random integer type.
fn ids(x: &Inputs, m: usize, v: usize) -> pipewright::Result<Tensor> {
    let rng = Philox::new(3, 0, "ids");
    let dtype = [DType::I64, DType::I32, DType::U8][m % 3];
    x.device.from_f64((0..m).map(|i| rng.below(0, i as u64, v as u64) as f64), &[m], dtype)
}

fn losses(m: usize, v: usize, smoothing: f64, ignore: bool) -> TestResult {
    agree_within(
        |x| {
            let y = x.range("x", &[m, v], -5.0, 5.0).softmax()?;
            Ok(vec![x.get("dy", &[m, v]).softmax_grad(&y)?, y])
        },
        |_, _, w| 4.0 * EPS * (v as f64 + 8.0) * (w.abs() + 0.1),
    )?;
    if v == 0 {
        return Ok(());
    }
    let c = CrossEntropy { m, v, smoothing, ignore: ignore.then_some(0) };
    agree_within(
        |x| {
            let classes = ids(x, m, v)?;
            let (loss, correct, prob) = x.range("x", &[m, v], -5.0, 5.0).cross_entropy(c, &classes)?;
            let dx = x.get("dy", &[]).cross_entropy_grad(c, &prob, &classes)?;
            Ok(vec![loss, correct, prob, dx])
        },
        |_, _, w| 4.0 * EPS * (v as f64 + 8.0) * (w.abs() + 0.1),
    )
}

/// Sums over features and tokens of values of size 1.
fn attend(a: Attention) -> TestResult {
    let k = (a.d + a.t) as f64;
    agree_within(
        |x| {
            let (qkv, dy) = (x.range("qkv", &a.qkv_shape(), -2.0, 2.0), x.get("dy", &a.y_shape()));
            let (y, lse) = qkv.attention(a)?;
            Ok(vec![dy.attention_grad(a, &qkv, &y, &lse)?, y, lse])
        },
        |_, _, w| EPS * (4.0 * k + 100.0) * (w.abs() + 1.0),
    )
}

/// Few tokens: what each adds to the error the next ones pass on.
fn recur(l: Lstm, started: bool, last: bool) -> TestResult {
    agree_within(
        |x| {
            let state = |name: &str| x.get(name, &l.state_shape());
            let w = x.range("w", &l.w_shape(), -0.3, 0.3);
            let (start, dlast) = (started.then(|| [state("h"), state("c")]), last.then(|| [state("dh"), state("dc")]));
            let given = x.range("gates", &l.gates_shape(), -2.0, 2.0);
            let kept = given.clone();
            let [gates, y, c] = given.lstm(l, &w, start.as_ref().map(|s| s.each_ref()))?;
            let (c0, dlast) = (start.as_ref().map(|[_, c]| c), dlast.as_ref().map(|d| d.each_ref()));
            let (da, dstart) = x.get("dy", &l.y_shape()).lstm_grad(l, &w, [&gates, &c], c0, dlast)?;
            Ok([vec![da, gates, y, c, kept], dstart.into_iter().flatten().collect()].concat())
        },
        |_, _, w| EPS * (8.0 * l.d as f64 + 100.0) * (w.abs() + 1.0),
    )
}

fn embed(m: usize, v: usize, d: usize) -> TestResult {
    agree_within(|x| Ok(vec![x.get("table", &[v, d]).embedding(&ids(x, m, v)?)?]), |_, _, _| 0.0)?;
    agree_linear(m, |x| Ok(vec![x.get("dy", &[m, d]).embedding_grad(v, &ids(x, m, v)?)?]))
}

fn drop_out(samples: u64, rows: usize, d: usize, rate: f64) -> TestResult {
    let samples: Vec<u64> = (0..samples).map(|s| s * s + 5).collect();
    agree_within(
        |x| {
            let drop = Dropout { rate, rng: Philox::new(1, 2, "drop"), samples: &samples };
            let x = x.range("x", &[samples.len() * rows, d], 1.5, 2.5);
            Ok(vec![x.dropout(drop)?])
        },
        |_, _, w| EPS * w.abs(),
    )
}

fn steps(n: usize, shared: bool, nesterov: bool, decoupled: bool) -> TestResult {
    let adam = AdamStep { lr: 0.01, betas: [0.9, 0.99], eps: 1e-6, decay: 0.1, decoupled, t: 3 };
    agree_within(
        |x| {
            let (mut w, mut v, g) = (x.get("w", &[n]), x.get("v", &[n]), x.get("g", &[n]));
            let (mut plain, mut m, mut s) = (x.get("w", &[n]), x.get("v", &[n]), x.range("s", &[n], 0.0, 1.0));
            let mut adamed = x.get("w", &[n]);
            let held = shared.then(|| [&w, &plain, &adamed, &m].map(Tensor::clone));
            let sgd = SgdStep { lr: 0.1, momentum: 0.9, decay: 0.01, nesterov };
            w.sgd_step(sgd, &g, Some(&mut v))?;
            plain.sgd_step(SgdStep { momentum: 0.0, nesterov: false, ..sgd }, &g, None)?;
            adamed.adam_step(adam, &g, &mut m, &mut s)?;
            Ok([vec![w, v, plain, adamed, m, s], held.into_iter().flatten().collect()].concat())
        },
        |_, _, w| 8.0 * EPS * (w.abs() + 1.0),
    )
}

/// Copies of a permuted, cut and repeated tensor, conversions, and joins of tensors.
fn copy(shape: &[usize; 4], order: &[usize; 4], to: DType) -> TestResult {
    agree_within(
        |x| {
            let t = x.range("x", shape, 0.0, 200.0);
            let permuted = t.permute(order)?;
            let half = permuted.shape()[1] / 2;
            let cut = permuted.slice(1, half / 2, half)?;
            let joined = Tensor::concat(&[permuted.clone(), cut.clone(), permuted.clone()], 1)?;
            let repeated = t.reshape(&[&[1], &shape[..]].concat())?.broadcast_to(&[&[3], &shape[..]].concat())?;
            let there = permuted.contiguous()?.cast(to)?;
            let back = there.cast(DType::F32)?;
            Ok(vec![
                permuted.contiguous()?,
                cut.contiguous()?,
                joined,
                repeated.contiguous()?,
                there,
                back,
                permuted.cast(to)?,
            ])
        },
        |_, _, _| 0.0,
    )
}

/// Sizes at which two threads really share the work.
#[test]
fn large_everything() -> Result<(), TestCaseError> {
    pool(Pool2d { n: 4, hw: [20, 20], c: 64, kernel: [2, 2], stride: [2, 2], padding: [0, 0] })?;
    elements(&[40, 30, 101], 1)?;
    reduce([3, 700, 130])?;
    reduce([1, 90_000, 1])?;
    norms(1500, 70)?;
    losses(700, 130, 0.1, true)?;
    attend(Attention { n: 2, t: 300, heads: 3, d: 33, causal: true })?;
    attend(Attention { n: 1, t: 270, heads: 1, d: 64, causal: false })?;
    recur(Lstm { n: 33, t: 3, d: 290 }, true, true)?;
    recur(Lstm { n: 5, t: 4, d: 300 }, false, false)?;
    embed(900, 300, 120)?;
    drop_out(7, 100, 150, 0.3)?;
    steps(90_001, true, false, true)?;
    copy(&[20, 21, 22, 23], &[0, 2, 1, 3], DType::BF16)
}

#[test]
fn sequences_are_the_same_bits_on_any_number_of_threads() -> pipewright::Result<()> {
    let a = Attention { n: 3, t: 75, heads: 3, d: 17, causal: true };
    let l = Lstm { n: 7, t: 4, d: 130 };
    let mut first: Option<Vec<Vec<f32>>> = None;
    for threads in 1..=5 {
        let device = Device::cpu(threads)?;
        let get = |name: &str, shape: &[usize]| device.uniform(Philox::new(7, 0, name), -1.0, 1.0, shape, DType::F32);
        let (qkv, w) = (get("qkv", &a.qkv_shape())?, get("w", &l.w_shape())?);
        let (y, lse) = qkv.attention(a)?;
        let dqkv = get("dy", &a.y_shape())?.attention_grad(a, &qkv, &y, &lse)?;
        let [gates, h, c] = get("gates", &l.gates_shape())?.lstm(l, &w, None)?;
        let (da, _) = get("dh", &l.y_shape())?.lstm_grad(l, &w, [&gates, &c], None, None)?;
        let all =
            [y, lse, dqkv, gates, h, c, da].iter().map(Tensor::to_host).collect::<pipewright::Result<Vec<_>>>()?;
        assert_eq!(&all, first.get_or_insert_with(|| all.clone()), "{threads} threads");
    }
    Ok(())
}
