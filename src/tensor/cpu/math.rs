//! Functions of vectors without branches or calls, and sums of rows; their errors are tested below.
//!
//! Multiply-adds are fused where the instructions are there: results are the same bits on one set of instructions, not across.
use super::{
    isa::VectorJob,
    lanes::{Lanes, Vectors},
};

/// A function of each element.
pub(crate) trait Function: Copy + Sync {
    /// Implementations are marked `inline(always)`, to be compiled for the instruction set in use.
    fn of<L: Lanes>(self, v: Vectors<L>, x: L) -> L;
}

/// y[*] = f(x[*])
pub(crate) struct Apply<'a, F> {
    pub f: F,
    pub x: &'a [f32],
    pub y: &'a mut [f32],
}

impl<F: Function> VectorJob for Apply<'_, F> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self, v: Vectors<L>) {
        let Apply { f, x, y } = self;
        let n = x.len().min(y.len());
        for at in (0..n).step_by(L::N) {
            let x = v.load_first(x, at, n - at);
            v.store_first(f.of(v, x), y, at, n - at);
        }
    }
}

/// x[*] = f(x[*])
#[inline(always)]
pub(crate) fn apply<L: Lanes>(v: Vectors<L>, f: impl Function, x: &mut [f32]) {
    let n = x.len();
    for at in (0..n).step_by(L::N) {
        let y = f.of(v, v.load_first(x, at, n - at));
        v.store_first(y, x, at, n - at);
    }
}

/// See [`exp`].
#[derive(Clone, Copy)]
pub(crate) struct Exp;
/// See [`sigmoid`].
#[derive(Clone, Copy)]
pub(crate) struct Sigmoid;
/// See [`tanh`].
#[derive(Clone, Copy)]
pub(crate) struct Tanh;
/// x·Φ(x)
#[derive(Clone, Copy)]
pub(crate) struct Gelu;

impl Function for Exp {
    #[inline(always)]
    fn of<L: Lanes>(self, v: Vectors<L>, x: L) -> L {
        exp(v, x)
    }
}

impl Function for Sigmoid {
    #[inline(always)]
    fn of<L: Lanes>(self, v: Vectors<L>, x: L) -> L {
        sigmoid(v, x)
    }
}

impl Function for Tanh {
    #[inline(always)]
    fn of<L: Lanes>(self, v: Vectors<L>, x: L) -> L {
        tanh(v, x)
    }
}

impl Function for Gelu {
    #[inline(always)]
    fn of<L: Lanes>(self, v: Vectors<L>, x: L) -> L {
        v.mul(x, normal(v, x)[0])
    }
}

/// x·c₀ⁿ + … + cₙ by Horner's rule.
#[inline(always)]
fn polynomial<L: Lanes, const N: usize>(v: Vectors<L>, x: L, c: [f32; N]) -> L {
    let mut y = v.splat(c[0]);
    for &c in &c[1..] {
        y = v.fma(v.splat(c), y, x);
    }
    y
}

/// eˣ = 2ⁿ·eʳ with |r| ≤ ln 2 / 2 (coefficients from Cephes); 2 ulp.
#[inline(always)]
pub(crate) fn exp<L: Lanes>(v: Vectors<L>, x: L) -> L {
    // Beyond these bounds the result is infinite or zero; a NaN, which stands second, stays.
    let x = v.min(v.splat(89.0), v.max(v.splat(-104.0), x));
    // Adding 1.5·2²³ rounds to an integer.
    let round = v.splat(12_582_912.0);
    let n = v.sub(v.fma(round, x, v.splat(std::f32::consts::LOG2_E)), round);
    // ln 2 in two parts; n times the first is exact.
    let r = v.fma(v.fma(x, n, v.splat(-0.693_359_4)), n, v.splat(2.121_944_4e-4));
    let c = [1.987_569_2e-4, 1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];
    let y = v.fma(r, polynomial(v, r, c), v.mul(r, r));
    v.times_power(v.add(y, v.splat(1.0)), n)
}

/// 1/(1 + e⁻ˣ)
#[inline(always)]
pub(crate) fn sigmoid<L: Lanes>(v: Vectors<L>, x: L) -> L {
    let one = v.splat(1.0);
    v.div(one, v.add(one, exp(v, v.sub(v.zero(), x))))
}

/// A polynomial near 0 (Cephes), 1 − 2/(e²ˣ + 1) elsewhere.
#[inline(always)]
pub(crate) fn tanh<L: Lanes>(v: Vectors<L>, x: L) -> L {
    let (a, s, one) = (v.abs(x), v.mul(x, x), v.splat(1.0));
    let c = [-5.704_988_7e-3, 2.063_909e-2, -5.373_971_6e-2, 1.333_144_2e-1, -3.333_328e-1];
    let near = v.fma(x, v.mul(polynomial(v, s, c), s), x);
    let far = v.sub(one, v.div(v.splat(2.0), v.add(exp(v, v.add(a, a)), one)));
    v.if_below(a, v.splat(0.625), [near, v.with_sign(far, x)])
}

/// The distribution function Φ of the standard normal distribution, and its density φ; the smaller of Φ(x) and Φ(−x) has a small
/// relative error, so that nothing but rounding is lost far to the left.
///
/// Φ(−|x|) = e^(−x²/2)·t·P(t) with t = 1/(1 + 0.27·|x|), P interpolated at Chebyshev's nodes: 3e-8 of the value.
#[inline(always)]
fn normal<L: Lanes>(v: Vectors<L>, x: L) -> [L; 2] {
    const ONE_OVER_ROOT_TAU: f32 = 0.398_942_3;
    let one = v.splat(1.0);
    let bell = exp(v, v.mul(v.mul(v.splat(-0.5), x), x));
    let t = v.div(one, v.fma(one, v.splat(0.27), v.abs(x)));
    let c = [
        0.029_408_783,
        -0.128_689_88,
        0.174_386_54,
        -0.074_509_66,
        0.111_495_85,
        0.070_490_29,
        0.102_205_97,
        0.107_488_35,
        0.107_723_78,
    ];
    let tail = v.mul(bell, v.mul(t, polynomial(v, t, c)));
    let phi = v.if_below(x, v.zero(), [tail, v.sub(one, tail)]);
    [phi, v.mul(bell, v.splat(ONE_OVER_ROOT_TAU))]
}

/// The derivative Φ(x) + x·φ(x) of x·Φ(x).
#[inline(always)]
pub(crate) fn gelu_slope<L: Lanes>(v: Vectors<L>, x: L) -> L {
    let [phi, density] = normal(v, x);
    v.fma(phi, x, density)
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

/// Elements that are added up in f32 before their sum is added in f64: rounding does not grow with the length of a row.
const BLOCK: usize = 1024;

/// Σ x
#[inline(always)]
pub(crate) fn sum<L: Lanes>(v: Vectors<L>, x: &[f32]) -> f64 {
    let mut total = 0.0;
    for x in x.chunks(BLOCK) {
        let (mut a, mut b, n) = (v.zero(), v.zero(), x.len());
        for at in (0..n).step_by(2 * L::N) {
            a = v.add(a, v.load_first(x, at, n - at));
            if at + L::N < n {
                b = v.add(b, v.load_first(x, at + L::N, n - at - L::N));
            }
        }
        total += f64::from(v.sum(v.add(a, b)));
    }
    total
}

/// Σ (x − centre) and Σ (x − centre)²
#[inline(always)]
pub(crate) fn moments<L: Lanes>(v: Vectors<L>, x: &[f32], centre: f32) -> [f64; 2] {
    let mut total = [0.0; 2];
    for x in x.chunks(BLOCK) {
        let (mut sum, mut squares, n) = (v.zero(), v.zero(), x.len());
        for at in (0..n).step_by(L::N) {
            // Zeros minus zeros beyond the end.
            let centre = if n - at >= L::N { v.splat(centre) } else { v.load_first(&[centre; 16], 0, n - at) };
            let x = v.sub(v.load_first(x, at, n - at), centre);
            (sum, squares) = (v.add(sum, x), v.fma(squares, x, x));
        }
        total[0] += f64::from(v.sum(sum));
        total[1] += f64::from(v.sum(squares));
    }
    total
}

/// Σ x·y of two rows of equal length.
#[inline(always)]
pub(crate) fn dot<L: Lanes>(v: Vectors<L>, x: &[f32], y: &[f32]) -> f32 {
    let mut total = 0.0;
    for (x, y) in x.chunks(BLOCK).zip(y.chunks(BLOCK)) {
        let (mut sum, n) = (v.zero(), x.len());
        for at in (0..n).step_by(L::N) {
            sum = v.fma(sum, v.load_first(x, at, n - at), v.load_first(y, at, n - at));
        }
        total += f64::from(v.sum(sum));
    }
    total as f32
}

/// The largest number of a row; −∞ if there is none.
#[inline(always)]
pub(crate) fn largest<L: Lanes>(v: Vectors<L>, x: &[f32]) -> f32 {
    let mut found = v.splat(f32::NEG_INFINITY);
    let whole = x.len() / L::N * L::N;
    for at in (0..whole).step_by(L::N) {
        found = v.max(v.load(x, at), found);
    }
    let rest = x[whole..].iter().fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a });
    v.largest(v.max(found, v.splat(rest)))
}

/// Replaces x by the softmax of its multiples by `scale` > 0; gives the largest of those that is a number, and the sum of their
/// exponentials relative to it, which is a NaN if one of them is.
#[inline(always)]
pub(crate) fn softmax<L: Lanes>(v: Vectors<L>, x: &mut [f32], scale: f32) -> (f32, f64) {
    let (max, mut total) = (scale * largest(v, x), 0.0);
    let (factor, minus_max) = (v.splat(scale), v.splat(-max));
    for x in x.chunks_mut(BLOCK) {
        let (n, mut sum) = (x.len(), v.zero());
        for at in (0..n).step_by(L::N) {
            let e = exp(v, v.fma(minus_max, v.load_first(x, at, n - at), factor));
            v.store_first(e, x, at, n - at);
            sum = v.add(sum, v.load_first(x, at, n - at));
        }
        total += f64::from(v.sum(sum));
    }
    let (n, share) = (x.len(), v.splat((1.0 / total) as f32));
    for at in (0..n).step_by(L::N) {
        v.store_first(v.mul(v.load_first(x, at, n - at), share), x, at, n - at);
    }
    (max, total)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::{Isa, backend::Unary, cpu::isa::Simd, reference};

    #[derive(Clone, Copy)]
    struct GeluSlope;
    impl Function for GeluSlope {
        #[inline(always)]
        fn of<L: Lanes>(self, v: Vectors<L>, x: L) -> L {
            gelu_slope(v, x)
        }
    }

    fn of(isa: Isa, f: impl Function, x: &[f32]) -> Vec<f32> {
        let mut y = vec![0.0; x.len()];
        Simd::new(isa).unwrap().vectors(Apply { f, x, y: &mut y });
        y
    }

    /// The largest distance of `f` from `exact`, in units in the last place of max(|exact|, floor), over lo..hi.
    fn worst(isa: Isa, f: impl Function, exact: impl Fn(f64) -> f64, [lo, hi]: [f32; 2], floor: f64) -> f64 {
        let xs: Vec<f32> = (0..=1_000_000).map(|i| lo + (hi - lo) * (i as f32 / 1e6)).collect();
        let ys = of(isa, f, &xs);
        let ulps = xs.into_iter().zip(ys).map(|(x, y)| {
            let e = exact(f64::from(x));
            (f64::from(y) - e).abs() / (e.abs().max(floor) * f64::from(f32::EPSILON))
        });
        ulps.fold(0.0, f64::max)
    }

    #[test]
    fn errors_are_small() {
        let tiny = f64::from(f32::MIN_POSITIVE);
        let gelu = |x: f64| reference::unary(Unary::Gelu, x);
        let slope = |x: f64| reference::derivative(Unary::Gelu, x);
        for isa in Isa::available() {
            let cases = [
                ("exp", worst(isa, Exp, f64::exp, [-87.0, 88.7], tiny)),
                ("tanh", worst(isa, Tanh, f64::tanh, [-12.0, 12.0], tiny)),
                ("sigmoid", worst(isa, Sigmoid, |x| 1.0 / (1.0 + (-x).exp()), [-80.0, 30.0], tiny)),
                ("gelu", worst(isa, Gelu, gelu, [-1.0, 20.0], tiny)),
                ("slope of gelu", worst(isa, GeluSlope, slope, [-20.0, 20.0], 1.0)),
            ];
            for (name, ulps) in cases {
                assert!(ulps < 4.0, "{isa}, {name}: {ulps} units in the last place");
            }
        }
    }

    /// Far to the left, where Φ is what e^(−x²/2) makes of the rounding of x².
    #[test]
    fn gelu_ends_in_zero() {
        let gelu = |x: f64| reference::unary(Unary::Gelu, x);
        for isa in Isa::available() {
            for (lo, hi) in [(-2.0f32, -1.0), (-5.0, -2.0), (-13.0, -5.0)] {
                let ulps = worst(isa, Gelu, gelu, [lo, hi], f64::from(f32::MIN_POSITIVE));
                assert!(ulps < f64::from(4.0 + lo * lo / 2.0), "{isa}, {lo} to {hi}: {ulps} units in the last place");
            }
            // Every 40009th of all numbers, of both signs.
            let all = (0..u32::MAX).step_by(40_009).map(f32::from_bits).filter(|x| x.is_finite());
            let all: Vec<f32> = all.chain([1e10, 1e30, f32::MAX].into_iter().flat_map(|x| [x, -x])).collect();
            let (ys, slopes) = (of(isa, Gelu, &all), of(isa, GeluSlope, &all));
            for ((&x, &y), &slope) in all.iter().zip(&ys).zip(&slopes) {
                let exact = gelu(f64::from(x));
                let near = (f64::from(y) - exact).abs() <= 1e-4 * exact.abs() + f64::from(f32::MIN_POSITIVE);
                assert!(near && y.is_sign_negative() == x.is_sign_negative(), "{isa}: {y} of {x}");
                let exact = reference::derivative(Unary::Gelu, f64::from(x));
                assert!((f64::from(slope) - exact).abs() <= 1e-6, "{isa}: slope {slope} of {x}");
                assert!(x > -15.0 || (y, slope) == (0.0, 0.0), "{isa}: {y} and {slope} of {x}");
            }
            let inf = f32::INFINITY;
            let ends = of(isa, Gelu, &[inf, -inf]);
            assert!(ends[0] == inf && ends[1].is_nan() && gelu(f64::NEG_INFINITY).is_nan(), "{isa}: {ends:?}");
            assert!(of(isa, GeluSlope, &[inf, -inf]).iter().all(|s| s.is_nan()), "{isa}");
        }
    }

    #[test]
    fn extremes() {
        let (nan, inf) = (f32::NAN, f32::INFINITY);
        for isa in Isa::available() {
            let all = [of(isa, Exp, &[nan]), of(isa, Tanh, &[nan]), of(isa, Sigmoid, &[nan]), of(isa, Gelu, &[nan])];
            assert!(all.into_iter().chain([of(isa, GeluSlope, &[nan])]).all(|y| y[0].is_nan()));
            assert_eq!(of(isa, Exp, &[inf, -inf, 0.0]), [inf, 0.0, 1.0]);
            assert_eq!(of(isa, Tanh, &[inf, -inf, -0.0]), [1.0, -1.0, -0.0]);
            assert_eq!(of(isa, Sigmoid, &[inf, -inf]), [1.0, 0.0]);
            assert!((of(isa, Exp, &[-100.0])[0] / 3.8e-44 - 1.0).abs() < 0.05, "denormal results");
        }
        assert_eq!([max(1.0, 2.0), max(-0.5, -1.0)], [2.0, -0.5]);
        assert!(max(nan, 1.0).is_nan() && max(1.0, nan).is_nan() && relu(nan).is_nan());
    }

    /// What is added up and looked for.
    struct Rows<'a>(&'a [f32]);
    impl VectorJob for Rows<'_> {
        type Out = [f32; 3];
        #[inline(always)]
        fn run<L: Lanes>(self, v: Vectors<L>) -> [f32; 3] {
            [sum(v, self.0) as f32, dot(v, self.0, self.0), largest(v, self.0)]
        }
    }

    #[test]
    fn rows_of_every_length() {
        for isa in Isa::available() {
            for n in 0..70usize {
                // Numbers whose sums are exact; the largest one is negative, and stands everywhere once.
                let x: Vec<f32> = (0..n).map(|i| -1.0 - ((i * 29 + n) % n) as f32).collect();
                let exact = |f: fn(f32) -> f32| x.iter().map(|&x| f(x)).sum::<f32>();
                let largest = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let found = Simd::new(isa).unwrap().vectors(Rows(&x));
                assert_eq!(found, [exact(|x| x), exact(|x| x * x), largest], "{isa}, {n}");
            }
        }
    }
}
