//! Running one computation on the reference and on every kind of CPU device, and comparing.
use pipewright::{
    Result,
    tensor::{CpuOptions, DType, Device, Isa, Philox, Tensor, backend::Unary},
};
use proptest::prelude::TestCaseError;
use std::sync::OnceLock;

pub const EPS: f64 = f32::EPSILON as f64;

pub type TestResult = std::result::Result<(), TestCaseError>;

/// Operands by name: the same values on every device.
pub struct Inputs {
    pub device: Device,
    absolute: bool,
}

impl Inputs {
    /// Uniform in [−1, 1); for the scale of a sum of products the absolute values of those.
    pub fn get(&self, name: &str, shape: &[usize]) -> Tensor {
        let t = self.range(name, shape, -1.0, 1.0);
        if self.absolute { t.unary(Unary::Abs).expect("numbers for a test") } else { t }
    }

    /// Uniform in [lo, hi).
    pub fn range(&self, name: &str, shape: &[usize], lo: f64, hi: f64) -> Tensor {
        self.device.uniform(Philox::new(7, 0, name), lo, hi, shape, DType::F32).expect("numbers for a test")
    }
}

/// For each set of instructions a device with one thread and one with two.
fn devices() -> &'static [(Isa, [Device; 2])] {
    static ALL: OnceLock<Vec<(Isa, [Device; 2])>> = OnceLock::new();
    ALL.get_or_init(|| {
        let pair = |isa| {
            [1, 2].map(|t| Device::cpu_with(CpuOptions { threads: t, ..CpuOptions::new(isa) }).expect("a device"))
        };
        Isa::available().into_iter().map(|isa| (isa, pair(isa))).collect()
    })
}

fn values(tensors: &[Tensor]) -> Result<Vec<Vec<f64>>> {
    tensors.iter().map(Tensor::to_f64).collect()
}

/// Results of `f`, a sum of at most `k` products, against the reference.
pub fn agree_linear(k: usize, f: impl Fn(&Inputs) -> Result<Vec<Tensor>>) -> TestResult {
    let scale = values(&f(&Inputs { device: Device::reference(), absolute: true })?)?;
    agree_within(&f, |i, j, _| 4.0 * k as f64 * EPS * scale[i][j])
}

/// Results of `f` against the reference, with `bound(output, element, expected)` besides one unit in the last place.
pub fn agree_within(
    f: impl Fn(&Inputs) -> Result<Vec<Tensor>>,
    bound: impl Fn(usize, usize, f64) -> f64,
) -> TestResult {
    let run = |device: &Device| values(&f(&Inputs { device: device.clone(), absolute: false })?);
    let want = run(&Device::reference())?;
    for (isa, [one, two]) in devices() {
        let (one, two) = (run(one)?, run(two)?);
        for (i, (want, got)) in want.iter().zip(&one).enumerate() {
            for (j, (&w, &g)) in want.iter().zip(got).enumerate() {
                let ulp = EPS * w.abs() + f64::from(f32::MIN_POSITIVE);
                let same = w == g || w.is_nan() && g.is_nan() || (w - g).abs() <= bound(i, j, w) + ulp;
                if !same {
                    return Err(TestCaseError::fail(format!("{isa}: output {i} element {j}: {g} instead of {w}")));
                }
            }
        }
        let bits = |v: &[Vec<f64>]| -> Vec<u64> { v.iter().flatten().map(|x| x.to_bits()).collect() };
        if bits(&one) != bits(&two) {
            return Err(TestCaseError::fail(format!("{isa}: one and two threads differ")));
        }
    }
    Ok(())
}
