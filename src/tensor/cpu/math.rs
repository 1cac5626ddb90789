//! Functions of one f32 without branches or calls, so that loops over them become vector code; their errors are tested below.
//!
//! No fused multiply-add: a function gives the same bits whatever the instruction set.

/// x·c₀ⁿ + … + cₙ by Horner's rule.
#[inline(always)]
fn polynomial<const N: usize>(x: f32, c: [f32; N]) -> f32 {
    let mut y = c[0];
    for &c in &c[1..] {
        y = y * x + c;
    }
    y
}

/// eˣ = 2ⁿ·eʳ with |r| ≤ ln 2 / 2 (coefficients from Cephes); 2 ulp.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // Beyond these bounds the result is infinite or zero; written so that a NaN stays.
    let x = if x < -104.0 { -104.0 } else { x };
    let x = if x > 89.0 { 89.0 } else { x };
    // Adding 1.5·2²³ rounds to an integer and leaves it in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    // ln 2 in two parts; n times the first is exact.
    let r = x - n * 0.693_359_4 - n * -2.121_944_4e-4;
    let c = [1.987_569_2e-4, 1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];
    let y = polynomial(r, c) * r * r + r + 1.0;
    // Two factors, since 2ⁿ alone may be too large or too small.
    let n = shifted.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let half = n >> 1;
    let power = |n: i32| f32::from_bits(((n + 127) << 23) as u32);
    y * power(half) * power(n - half)
}

/// 1/(1 + e⁻ˣ)
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// A polynomial near 0 (Cephes), 1 − 2/(e²ˣ + 1) elsewhere.
#[inline(always)]
pub(crate) fn tanh(x: f32) -> f32 {
    let a = x.abs();
    let s = x * x;
    let c = [-5.704_988_7e-3, 2.063_909e-2, -5.373_971_6e-2, 1.333_144_2e-1, -3.333_328e-1];
    let near = polynomial(s, c) * s * x + x;
    let far = (1.0 - 2.0 / (exp(a + a) + 1.0)).copysign(x);
    if a < 0.625 { near } else { far }
}

/// The error function: an odd rational function up to where it is ±1 (coefficients as in Eigen and XLA).
#[inline(always)]
fn erf(x: f32) -> f32 {
    const END: f32 = 3.832_507;
    let x = if x < -END { -END } else { x };
    let x = if x > END { END } else { x };
    let s = x * x;
    let p =
        [-2.726_142_3e-10, 2.770_681_4e-8, -2.101_024e-6, -5.692_506_4e-5, -7.349_906e-4, -2.954_6e-3, -1.609_603_3e-2];
    let q = [-1.456_607_2e-5, -2.133_740_6e-4, -1.682_827e-3, -7.373_329e-3, -1.426_473_9e-2];
    x * polynomial(s, p) / polynomial(s, q)
}

/// The distribution function of the standard normal distribution.
#[inline(always)]
fn normal(x: f32) -> f32 {
    0.5 + 0.5 * erf(x * std::f32::consts::FRAC_1_SQRT_2)
}

/// x·Φ(x)
#[inline(always)]
pub(crate) fn gelu(x: f32) -> f32 {
    x * normal(x)
}

/// Its derivative Φ(x) + x·φ(x), times dy.
#[inline(always)]
pub(crate) fn gelu_grad(x: f32, dy: f32) -> f32 {
    const ONE_OVER_ROOT_TAU: f32 = 0.398_942_3;
    (normal(x) + x * (exp(-0.5 * x * x) * ONE_OVER_ROOT_TAU)) * dy
}

/// max(a, b); a NaN stays.
#[inline(always)]
pub(crate) fn max(a: f32, b: f32) -> f32 {
    if a > b || a.is_nan() { a } else { b }
}

/// max(x, 0); a NaN stays.
#[inline(always)]
pub(crate) fn relu(x: f32) -> f32 {
    if x > 0.0 || x.is_nan() { x } else { 0.0 }
}

/// Sums of this many neighbouring elements run side by side in one vector or two.
const LANES: usize = 32;

/// Folds `row` in a fixed order that suits vectors: LANES interleaved folds, then those.
#[inline(always)]
pub(crate) fn fold(row: &[f32], start: f32, f: impl Fn(f32, f32) -> f32, join: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [start; LANES];
    let chunks = row.chunks_exact(LANES);
    let rest = chunks.remainder();
    for c in chunks {
        for (l, &x) in lanes.iter_mut().zip(c) {
            *l = f(*l, x);
        }
    }
    for (l, &x) in lanes.iter_mut().zip(rest) {
        *l = f(*l, x);
    }
    let lanes = halved::<LANES, 16>(&lanes, &join);
    let lanes = halved::<16, 8>(&lanes, &join);
    let lanes = halved::<8, 4>(&lanes, &join);
    let [a, b] = halved::<4, 2>(&lanes, &join);
    join(a, b)
}

/// The upper half of some folds joined to the lower one, in as many steps as vectors need.
#[inline(always)]
fn halved<const N: usize, const HALF: usize>(lanes: &[f32; N], join: impl Fn(f32, f32) -> f32) -> [f32; HALF] {
    // A loop, since a closure handed to a function of the library is not inlined for sure.
    let (low, high) = lanes.split_at(HALF);
    let mut joined = [0.0; HALF];
    for ((j, &a), &b) in joined.iter_mut().zip(low).zip(high) {
        *j = join(a, b);
    }
    joined
}

/// The sum of `f(a, b)` over two rows of equal length, in the order of [`fold`].
#[inline(always)]
pub(crate) fn sum2(a: &[f32], b: &[f32], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let (ca, cb) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest = ca.remainder().iter().zip(cb.remainder());
    for (a, b) in ca.zip(cb) {
        for ((l, &a), &b) in lanes.iter_mut().zip(a).zip(b) {
            *l += f(a, b);
        }
    }
    for (l, (&a, &b)) in lanes.iter_mut().zip(rest) {
        *l += f(a, b);
    }
    fold(&lanes, 0.0, |a, b| a + b, |a, b| a + b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::reference;

    /// The largest distance of `f` from `exact`, in units in the last place of max(|exact|, floor), over lo..hi.
    fn worst(f: fn(f32) -> f32, exact: impl Fn(f64) -> f64, lo: f32, hi: f32, floor: f64) -> f64 {
        let at = |i: u32| lo + (hi - lo) * (i as f32 / 1e6);
        let ulps = (0..=1_000_000).map(at).map(|x| {
            let e = exact(f64::from(x));
            (f64::from(f(x)) - e).abs() / (e.abs().max(floor) * f64::from(f32::EPSILON))
        });
        ulps.fold(0.0, f64::max)
    }

    #[test]
    fn errors_are_small() {
        let tiny = f64::from(f32::MIN_POSITIVE);
        let cases = [
            ("exp", worst(exp, f64::exp, -87.0, 88.7, tiny)),
            ("tanh", worst(tanh, f64::tanh, -12.0, 12.0, tiny)),
            ("sigmoid", worst(sigmoid, |x| 1.0 / (1.0 + (-x).exp()), -80.0, 30.0, tiny)),
            ("erf", worst(erf, reference::erf, -5.0, 5.0, tiny)),
            ("gelu", worst(gelu, |x| x * 0.5 * (1.0 + reference::erf(x / 2f64.sqrt())), -6.0, 6.0, 4.0)),
        ];
        for (name, ulps) in cases {
            assert!(ulps < 4.0, "{name}: {ulps} units in the last place");
        }
    }

    #[test]
    fn extremes() {
        for f in [exp, tanh, sigmoid, erf, gelu, |x| gelu_grad(x, 1.0), relu] {
            assert!(f(f32::NAN).is_nan());
        }
        assert_eq!([exp(f32::INFINITY), exp(f32::NEG_INFINITY), exp(0.0)], [f32::INFINITY, 0.0, 1.0]);
        assert_eq!([tanh(f32::INFINITY), tanh(f32::NEG_INFINITY), tanh(-0.0)], [1.0, -1.0, -0.0]);
        assert_eq!([sigmoid(f32::INFINITY), sigmoid(f32::NEG_INFINITY)], [1.0, 0.0]);
        assert!((exp(-100.0) / 3.8e-44 - 1.0).abs() < 0.05, "denormal results");
        assert_eq!([max(1.0, 2.0), max(-0.5, -1.0)], [2.0, -0.5]);
        assert!(max(f32::NAN, 1.0).is_nan() && max(1.0, f32::NAN).is_nan());
    }
}
