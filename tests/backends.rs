//! Every kernel of the CPU backend, for each set of vector instructions that this machine has, against the reference.
//!
//! The bound of the products is |Δ| ≤ 4·k·ε·Σ|a||b| + 1 ulp, k the number of summands. One and two threads give the same bits.
mod common;
use common::*;
use pipewright::tensor::backend::Conv2d;
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

#[test]
fn large_convolutions() -> Result<(), TestCaseError> {
    let square = |n, hw, ci, co, kernel, stride| Conv2d {
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
    convolution(square(3, 13, 40, 70, 3, 1), true)?;
    convolution(square(2, 9, 3, 64, 5, 2), false)?;
    convolution(square(2, 10, 48, 40, 1, 1), true)?;
    convolution(Conv2d { groups: 48, ..square(2, 16, 48, 48, 3, 1) }, true)
}
