//! Kernels at the edges of what they are for: numbers that are large, alike or not finite, and shapes of nothing or too much.
use pipewright::{
    Result,
    tensor::{
        CpuOptions, DType, Device, Isa, Tensor,
        backend::{Attention, Conv2d, CrossEntropy, Lstm, Pool2d, Reduce, SgdStep, Unary},
    },
};

/// The reference, and each set of instructions with one thread and with two.
fn all_devices() -> Result<Vec<Device>> {
    let kinds = Isa::available().into_iter().flat_map(|isa| [1, 2].map(|threads| (isa, threads)));
    let cpus = kinds.map(|(isa, threads)| Device::cpu_with(CpuOptions { threads, ..CpuOptions::new(isa) }));
    [Ok(Device::reference())].into_iter().chain(cpus).collect()
}

/// What `f` gives, as the reference has it, is given everywhere: to `relative` of its size, and to `absolute`.
fn same_everywhere(what: &str, relative: f64, absolute: f64, f: impl Fn(&Device) -> Result<Vec<Tensor>>) -> Result<()> {
    let values = |device: &Device| f(device)?.iter().map(Tensor::to_f64).collect::<Result<Vec<_>>>();
    let want = values(&Device::reference())?;
    for device in all_devices()? {
        let got = values(&device)?;
        for (w, g) in want.iter().flatten().zip(got.iter().flatten()) {
            let near = w == g || w.is_nan() && g.is_nan() || (w - g).abs() <= relative * w.abs() + absolute;
            assert!(near, "{what}, {device:?}: {g} instead of {w}");
        }
    }
    Ok(())
}

/// The block whose products need most memory is not the longest one, which sees more than half of what is packed at a time.
#[test]
fn causal_attention_of_wide_heads() -> Result<()> {
    for (t, d) in [(513, 1025), (600, 1280), (520, 60)] {
        let a = Attention { n: 1, t, heads: 1, d, causal: true };
        for isa in Isa::available() {
            let device = Device::cpu_with(CpuOptions::new(isa))?;
            let qkv = Tensor::full(0.5, &a.qkv_shape(), DType::F32, &device)?;
            let (y, lse) = qkv.attention(a)?;
            let dqkv = y.attention_grad(a, &qkv, &y, &lse)?;
            // Every token is the mean of equal ones.
            assert!(y.to_f64()?.iter().all(|y| (y - 0.5).abs() < 1e-5), "{isa}, {a:?}");
            assert!(dqkv.all_finite()?, "{isa}, {a:?}");
        }
    }
    Ok(())
}

/// Columns and rows that are nearly constant, far from zero, with one far away, too large for sums, or not finite.
fn hard_numbers() -> Vec<(&'static str, Vec<f32>)> {
    let one_off = |n: usize, first: f32, other: f32| [vec![first], vec![other; n - 1]].concat();
    let (max, inf) = (f32::MAX, f32::INFINITY);
    vec![
        ("a constant", vec![1000.1; 256]),
        ("half a block", vec![255.3; 128]),
        ("a long constant", vec![100.3; 4096]),
        ("a longer constant", vec![-1e6 / 3.0; 20_001]),
        ("two neighbours", vec![16_777_216.0, 16_777_218.0]),
        ("neighbours", (0..700).map(|i| 16_777_216.0 + 2.0 * (i % 3) as f32).collect()),
        ("one apart", one_off(300, 1.0, 1000.1)),
        ("one far away", one_off(300, 1e6, 0.25)),
        ("large", vec![3e38; 4]),
        ("large of both signs", vec![max, -max, max, -max]),
        ("many large", one_off(300, -2e37, 3e38)),
        ("infinite", one_off(3, inf, 1.0)),
        ("not a number", one_off(3, f32::NAN, 1.0)),
        ("tiny", vec![1e-45, 3e-45, 1e-45]),
        ("nothing", vec![0.0; 70]),
    ]
}

#[test]
fn statistics_of_hard_numbers() -> Result<()> {
    for (what, x) in hard_numbers() {
        let n = x.len();
        let finite = || x.iter().filter(|x| x.is_finite()).map(|&x| f64::from(x));
        let spread = finite().fold(f64::MIN, f64::max) - finite().fold(f64::MAX, f64::min);
        let columns = |device: &Device| {
            // Three columns of the same, so that they are no whole vectors.
            let x: Vec<f32> = x.iter().flat_map(|&x| [x; 3]).collect();
            Tensor::from_host(&x, &[n, 3], device)
        };
        same_everywhere(what, 1e-7, 1e-6 * spread, |device| Ok(vec![columns(device)?.batch_stats()?.0]))?;
        same_everywhere(what, 1e-5, 1e-9, |device| Ok(vec![columns(device)?.batch_stats()?.1]))?;
        same_everywhere(what, 1e-4, 1e-4, |device| {
            let (x, one) = (columns(device)?, Tensor::full(1.0, &[3], DType::F32, device)?);
            let (mean, var) = x.batch_stats()?;
            Ok(vec![x.batch_norm(1e-5, [&mean, &var], &one, &one)?])
        })?;
        same_everywhere(what, 1e-4, 1e-4, |device| {
            let row = Tensor::from_host(&[&x[..], &x[..]].concat(), &[2, n], device)?;
            let (gamma, beta) =
                (Tensor::full(1.0, &[n], DType::F32, device)?, Tensor::zeros(&[n], DType::F32, device)?);
            Ok(vec![row.layer_norm(1e-5, &gamma, &beta)?.0])
        })?;
    }
    Ok(())
}

/// Rounding does not grow with the length of what is added up.
#[test]
fn long_sums_of_constants() -> Result<()> {
    let n = 100_001;
    same_everywhere("sums", 2e-6, 0.0, |device| {
        let x = Tensor::full(100.3, &[n], DType::F32, device)?;
        Ok(vec![
            x.reshape(&[1, n])?.reduce(Reduce::Sum, 1)?,
            x.reshape(&[n, 1])?.broadcast_to(&[n, 2])?.contiguous()?.reduce(Reduce::Sum, 0)?,
        ])
    })?;
    same_everywhere("softmax", 1e-5, 0.0, |device| {
        let x: Vec<f32> = (0..n).map(|i| if i == 5 { 0.1 } else { 0.0 }).collect();
        let x = Tensor::from_host(&x, &[1, n], device)?;
        let class = Tensor::from_host(&[7i64], &[1], device)?;
        let (loss, ..) = x.cross_entropy(CrossEntropy { m: 1, v: n, smoothing: 0.0, ignore: None }, &class)?;
        Ok(vec![loss, x.softmax()?])
    })
}

#[test]
fn losses_of_infinite_logits_and_of_no_rows() -> Result<()> {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    for (row, class) in
        [([inf, 0.0], 0), ([0.0, inf], 0), ([-inf, -inf], 0), ([inf, nan], 0), ([nan, 0.0], 1), ([-inf, 1.0], 1)]
    {
        same_everywhere(&format!("{row:?}"), 0.0, 1e-6, |device| {
            let (x, class) =
                (Tensor::from_host(&row, &[1, 2], device)?, Tensor::from_host(&[class as i64], &[1], device)?);
            let (loss, correct, prob) =
                x.cross_entropy(CrossEntropy { m: 1, v: 2, smoothing: 0.0, ignore: None }, &class)?;
            Ok(vec![loss, correct, prob])
        })?;
    }
    for device in all_devices()? {
        let (x, class) = (Tensor::zeros(&[0, 2], DType::F32, &device)?, Tensor::zeros(&[0], DType::I64, &device)?);
        let (loss, ..) = x.cross_entropy(CrossEntropy { m: 0, v: 2, smoothing: 0.0, ignore: None }, &class)?;
        let sums = Tensor::zeros(&[2, 0], DType::F32, &device)?.reduce(Reduce::Sum, 1)?;
        let all = [loss.to_f64()?, sums.to_f64()?].concat();
        assert!(all.iter().all(|s| s.to_bits() == 0), "{device:?}: {all:?}");
    }
    Ok(())
}

#[test]
fn infinite_gradients_move_weights_to_infinity() -> Result<()> {
    for nesterov in [false, true] {
        same_everywhere("momentum", 1e-6, 0.0, |device| {
            let g = Tensor::from_host(&[f32::INFINITY, 1.0, f32::NEG_INFINITY], &[3], device)?;
            let (mut w, mut v) =
                (Tensor::full(1.0, &[3], DType::F32, device)?, Tensor::zeros(&[3], DType::F32, device)?);
            w.sgd_step(SgdStep { lr: 0.1, momentum: 0.9, decay: 0.0, nesterov }, &g, Some(&mut v))?;
            Ok(vec![w, v])
        })?;
    }
    Ok(())
}

/// As many as there is no memory for, if anything were kept of each; and so many that counting them takes for ever.
const MANY: usize = 1 << 44;

#[test]
fn nothing_takes_no_memory_and_no_time() -> Result<()> {
    let conv = |n, ci, co, kernel| Conv2d {
        n,
        hw: [2, MANY >> 14],
        ci,
        co,
        kernel,
        stride: [1, 1],
        padding: [0, 0],
        dilation: [1, 1],
        groups: 1,
    };
    for device in all_devices()? {
        let none = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &device);
        assert!(none(&[MANY, 0, 0])?.gemm(false, &none(&[MANY, 0, 0])?, false, None)?.is_empty());
        assert!(none(&[MANY, 0, 3])?.gemm(false, &none(&[MANY, 3, 0])?, true, None).is_err());
        assert!(none(&[MANY, 0, 3])?.gemm(false, &none(&[MANY, 3, 0])?, false, None)?.is_empty());
        let bias = Tensor::full(2.0, &[3], DType::F32, &device)?;
        let biases = none(&[5000, 1, 0])?.gemm(false, &none(&[5000, 0, 3])?, false, Some(&bias))?;
        assert!(biases.to_f64()?.iter().all(|&y| y == 2.0) && biases.len() == 15_000, "{device:?}");
        // No input channels: outputs are biases, one pixel high.
        let c = Conv2d { hw: [1, MANY >> 14], ..conv(1, 0, 3, [1, MANY >> 14]) };
        let y = none(&c.x_shape())?.conv2d(c, &none(&c.w_shape())?, Some(&bias))?;
        assert_eq!(y.to_f64()?, [2.0; 3], "{device:?}");
        assert!(y.conv2d_weight_grad(c, &none(&c.x_shape())?)?.is_empty());
        assert!(y.conv2d_input_grad(c, &none(&c.w_shape())?)?.is_empty());
        // No output channels.
        let c = Conv2d { hw: [1, 4], padding: [0, MANY >> 14], ..conv(1, 3, 0, [1, MANY >> 14]) };
        let (x, w) = (none(&c.x_shape())?, none(&c.w_shape())?);
        let y = x.conv2d(c, &w, None)?;
        assert!(y.is_empty() && y.conv2d_weight_grad(c, &x)?.is_empty());
        assert_eq!(y.conv2d_input_grad(c, &w)?.to_f64()?, [0.0; 12], "{device:?}");
        // Neither samples nor channels, and sizes whose product is no number.
        for (n, c, hw) in [(0, 1, [1 << 40, 1 << 40]), (1, 0, [4, MANY])] {
            let p = Pool2d { n, hw, c, kernel: [2, 2], stride: [2, 2], padding: [0, 0] };
            let x = none(&p.x_shape())?;
            let (y, arg) = x.max_pool2d(p)?;
            assert!(y.is_empty() && y.max_pool2d_grad(p, &arg)?.is_empty());
            assert!(x.avg_pool2d(p)?.avg_pool2d_grad(p)?.is_empty());
        }
        let nothing = none(&[0, 1 << 40, 1 << 40])?.permute(&[1, 2, 0])?;
        assert!(nothing.is_empty() && nothing.add(&nothing).is_err());
        assert!(none(&[1])?.broadcast_to(&[1 << 40, 1 << 40]).is_err());
        let a = Attention { n: 0, t: MANY, heads: 1, d: MANY, causal: true };
        assert!(none(&a.qkv_shape())?.attention(a)?.0.is_empty());
        assert!(none(&[MANY, 5, 0])?.reduce(Reduce::Sum, 1)?.is_empty());
        let l = Lstm { n: 0, t: MANY, d: 3 };
        assert!(none(&l.gates_shape())?.lstm(l, &none(&l.w_shape())?, None)?[0].is_empty());
    }
    Ok(())
}

#[test]
fn windows_without_number_are_refused() -> Result<()> {
    let wide = 1 << 33;
    for kernel in [[wide, wide], [wide, 1], [1 << 16, 1 << 16], [usize::MAX, usize::MAX]] {
        let p = Pool2d { n: 1, hw: [wide, wide], c: 0, kernel, stride: [1, 1], padding: [0, 0] };
        let c = Conv2d {
            n: 1,
            hw: [wide, wide],
            ci: 0,
            co: 1,
            kernel,
            stride: [1, 1],
            padding: [0, 0],
            dilation: [1, 1],
            groups: 1,
        };
        for e in [p.out().expect_err("a window").to_string(), c.out().expect_err("a kernel").to_string()] {
            assert!(e.contains("at most 2147483647 positions") && e.contains(&format!("{kernel:?}")), "{e}");
        }
    }
    let far = 1 << 62;
    let c = Conv2d {
        n: 1,
        hw: [4, 4],
        ci: 1,
        co: 1,
        kernel: [2, 1],
        stride: [far, 1],
        padding: [far, 0],
        dilation: [2 * far, 1],
        groups: 1,
    };
    let e = c.out().expect_err("places beyond all numbers").to_string();
    assert!(e.contains("does not fit the input [4, 4]"), "{e}");
    Ok(())
}

#[test]
fn statistics_of_nothing_are_refused() -> Result<()> {
    for device in all_devices()?.into_iter().chain([Device::meta()]) {
        let e = Tensor::zeros(&[0, 3], DType::F32, &device)?.batch_stats().expect_err("no rows").to_string();
        assert!(e.contains("batch_stats: one row or more expected, got x [0, 3]"), "{e}");
    }
    Ok(())
}

#[test]
fn devices_have_a_number_of_threads() {
    for (threads, words) in [(0, "at least one thread"), (4097, "at most 4096"), (usize::MAX, "at most 4096")] {
        let e = Device::cpu(threads).expect_err("no such device").to_string();
        assert!(e.contains(words), "{e}");
    }
}

/// Numbers below the smallest normal one are numbers: no kernel takes them for zeros.
#[test]
fn denormals_are_numbers() -> Result<()> {
    for (isa, threads) in Isa::available().into_iter().flat_map(|isa| [1, 2].map(|t| (isa, t))) {
        let device = Device::cpu_with(CpuOptions { threads, ..CpuOptions::new(isa) })?;
        let tiny = |shape: &[usize]| Tensor::full(1e-40, shape, DType::F32, &device);
        let all = |x: &Tensor, value: f32| -> Result<bool> { Ok(x.to_host::<f32>()?.iter().all(|&x| x == value)) };
        let n = 100_000;
        assert!(all(&tiny(&[n])?.add(&tiny(&[n])?)?, 2.0 * 1e-40f32)?, "{isa}: sums");
        assert!(all(&tiny(&[n])?.unary(Unary::Relu)?, 1e-40)?, "{isa}: relu");
        assert!(all(&tiny(&[n])?.affine(0.5, 0.0)?, 0.5 * 1e-40f32)?, "{isa}: products");
        let ones = Tensor::full(1.0, &[64, 64], DType::F32, &device)?;
        assert!(all(&tiny(&[200, 64])?.gemm(false, &ones, true, None)?, 64.0 * 1e-40f32)?, "{isa}: gemm");
        let exp: Vec<f32> = Tensor::full(-100.0, &[n], DType::F32, &device)?.unary(Unary::Exp)?.to_host()?;
        assert!(exp.iter().all(|&y| y > 3.7e-44 && y < 3.9e-44), "{isa}: exp");
    }
    Ok(())
}

#[test]
fn wrong_ids_are_errors() -> Result<()> {
    for device in [Device::cpu(2)?, Device::reference()] {
        let table = Tensor::zeros(&[3, 2], DType::F32, &device)?;
        let ids = Tensor::from_host(&[0i64, 3], &[2], &device)?;
        let e = table.embedding(&ids).expect_err("an id outside").to_string();
        assert!(e.contains("embedding: id 3 at row 1 is outside 0..3"), "{e}");
        for (wrong, says) in [([0i64, 3], "id 3 at row 1"), ([-1, 0], "id -1 at row 0")] {
            let wrong = Tensor::from_host(&wrong, &[2], &device)?;
            let dy = Tensor::zeros(&[2, 2], DType::F32, &device)?;
            let e = dy.embedding_grad(3, &wrong).expect_err("an id outside").to_string();
            assert!(e.contains(&format!("embedding_grad: {says} is outside 0..3")), "{e}");
        }
        let c = CrossEntropy { m: 2, v: 3, smoothing: 0.0, ignore: None };
        let e = Tensor::zeros(&[2, 3], DType::F32, &device)?.cross_entropy(c, &ids).expect_err("a class outside");
        assert!(e.to_string().contains("class 3 at row 1 is outside 0..3"), "{e}");
    }
    Ok(())
}
