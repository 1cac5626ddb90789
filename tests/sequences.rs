//! Attention and LSTM as PyTorch computes them, with their gradients; golden/make_sequences.py made the files and says what is in
//! them.
mod safetensor;

use pipewright::{
    autograd::{Mode, check},
    prelude::*,
};
use safetensor::{Golden, off};

/// Element i is sin(0.37·i + 1.3·k + 0.5)·scale.
fn formula(k: usize, shape: &[usize], scale: f64, dtype: DType, device: &Device) -> Result<Tensor> {
    let n = shape.iter().product::<usize>();
    device.from_f64((0..n).map(|i| scale * (0.37 * i as f64 + 1.3 * k as f64 + 0.5).sin()), shape, dtype)
}

/// Outputs and gradients of a layer on inputs of these shapes.
fn compare(case: &str, layer: impl Layer, shapes: &[&[usize]]) -> Result<()> {
    let example = Example::new(case, layer, shapes);
    let specs = example.layer.params();
    for (dtype, tolerance) in [(DType::F64, 1e-9), (DType::F32, 1e-5)] {
        let golden = Golden::read(&format!("sequences_{dtype}"));
        for device in [Device::reference(), Device::cpu(1)?, Device::cpu(2)?] {
            let mut values = Vec::new();
            for (k, shape) in shapes.iter().enumerate() {
                values.push(formula(k, shape, 1.0, dtype, &device)?);
            }
            for (k, spec) in specs.iter().enumerate() {
                values.push(formula(10 + k, &spec.shape, 0.5, dtype, &device)?);
            }
            let cx = Cx::recording(Mode::Train, check::key(&values));
            let (outputs, grads) = check::forward(&example, cx, &values, |cx, outputs, vars| {
                let mut seeds = Vec::new();
                for (k, y) in outputs.iter().enumerate() {
                    seeds.push((y, formula(20 + k, y.shape(), 1.0, dtype, &device)?));
                }
                let grads = check::backward_of(cx, &seeds, &vars, false)?;
                Ok((outputs.iter().map(|y| y.value().clone()).collect::<Vec<_>>(), grads))
            })?;
            let outputs = outputs.iter().enumerate().map(|(k, y)| (format!("output{k}"), y));
            let names =
                (0..shapes.len()).map(|k| format!("dinput{k}")).chain(specs.iter().map(|s| format!("d{}", s.name)));
            for (name, t) in outputs.chain(names.zip(&grads)) {
                let off = off(golden.values(&format!("{case}.{name}")), &t.to_f64()?);
                assert!(off <= tolerance, "{case} {dtype} on {device:?}: {name} is off by {off:e}");
            }
        }
    }
    Ok(())
}

#[test]
fn attention() -> Result<()> {
    compare("attention", MultiHeadAttention::new(12, 3), &[&[2, 7, 12]])?;
    compare("causal", MultiHeadAttention::new(12, 3).causal(true), &[&[2, 7, 12]])
}

#[test]
fn lstm() -> Result<()> {
    compare("lstm", Lstm::new(5, 4), &[&[2, 7, 5]])?;
    compare("lstm_with_a_state", Lstm::new(5, 4), &[&[2, 7, 5], &[2, 4], &[2, 4]])
}
