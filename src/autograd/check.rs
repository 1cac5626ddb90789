//! The gradient checker: central differences in f64, for unit tests of layers and functions.
//!
//! ```
//! use pipewright::{autograd::check, layers::Linear};
//! check::examples::<Linear>()?;
//! # Ok::<(), pipewright::Error>(())
//! ```
use super::{Cx, Grads, Mode, ParamRef, RunKey, Scope, Var};
use crate::{
    Context, Error, Result,
    layers::{Example, ExampleInput, ID_TYPE, Layer},
    tensor::{DType, Device, Philox, Tensor},
};

/// The largest relative error that passes.
const TOLERANCE: f64 = 1e-6;
/// The step of the differences: balances rounding (ε/h) against curvature (h²).
const STEP: f64 = 1e-5;
/// Arguments with more elements are checked along random directions only.
const EVERY: usize = 2000;

/// Checks the gradient of `f` by each of `args` (of type f64, on any device): along a random direction, and, where there are few
/// of them, by every element. All outputs count, each weighted at random.
///
/// # Errors
/// The argument and element that is worst, with both numbers; or that I and W differ from B.
pub fn gradients(f: impl Fn(&mut Cx, &[Var]) -> Result<Vec<Var>>, args: &[Tensor]) -> Result<()> {
    let names: Vec<String> = (0..args.len()).map(|i| format!("argument {i}")).collect();
    let run = |args: &[Tensor], work: &mut Work| {
        let mut cx = Cx::recording(Mode::Train, RunKey::default());
        let vars: Vec<Var> = args.iter().map(|t| cx.input(t.clone(), true)).collect();
        let outputs = f(&mut cx, &vars)?;
        work(cx, outputs, vars)
    };
    check(&run, &names, args)
}

/// Checks every example of a layer: the gradients of inputs and parameters.
///
/// # Errors
/// As [`gradients`], naming the example.
pub fn examples<L: Layer>() -> Result<()> {
    L::examples().iter().try_for_each(example)
}

/// Checks one example.
///
/// # Errors
/// As [`gradients`].
pub fn example(example: &Example) -> Result<()> {
    let place = || format!("example {:?} of layer {:?}", example.name, example.layer.kind());
    let (values, names) = arguments(example, &Device::reference(), DType::F64).context(place)?;
    let float: Vec<bool> = values.iter().map(|t| t.dtype().is_float()).collect();
    let specs = example.layer.params();
    let inputs = example.inputs.len();
    // Frozen parameters and ids are given, not differentiated.
    let checked: Vec<usize> =
        (0..values.len()).filter(|&i| float[i] && (i < inputs || specs[i - inputs].trainable)).collect();
    let args: Vec<Tensor> = checked.iter().map(|&i| values[i].clone()).collect();
    let names: Vec<String> = checked.iter().map(|&i| names[i].clone()).collect();
    let run = |args: &[Tensor], work: &mut Work| {
        let mut all = values.clone();
        checked.iter().zip(args).for_each(|(&i, t)| all[i] = t.clone());
        with_layer(example, &all, |cx, outputs, vars| {
            let vars = checked.iter().map(|&i| vars[i].clone()).collect();
            work(cx, outputs, vars)
        })
    };
    check(&run, &names, &args).context(place)
}

/// The inputs and then the parameters of an example, with their names: random, and apart enough from each other that no
/// difference steps over a kink of a maximum.
pub fn arguments(example: &Example, device: &Device, dtype: DType) -> Result<(Vec<Tensor>, Vec<String>)> {
    let (mut values, mut names) = (Vec::new(), Vec::new());
    for (i, input) in example.inputs.iter().enumerate() {
        names.push(format!("input {i}"));
        let rng = Philox::new(i as u64, 0, &example.name);
        values.push(match input {
            ExampleInput::Float(shape) => spread(rng, shape, dtype, device)?,
            ExampleInput::Ids(shape, bound) => {
                let n: usize = shape.iter().product();
                let ids: Vec<i64> = (0..n).map(|j| rng.below(0, j as u64, *bound as u64) as i64).collect();
                Tensor::from_host(&ids, shape, device)?.cast(ID_TYPE)?
            }
        });
    }
    for (i, spec) in example.layer.params().iter().enumerate() {
        names.push(format!("parameter {:?}", spec.name));
        values.push(spread(Philox::new(100 + i as u64, 0, &example.name), &spec.shape, dtype, device)?);
    }
    Ok((values, names))
}

/// Distinct numbers between −1 and 1 in random order, none at 0.
fn spread(rng: Philox, shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
    let n: usize = shape.iter().product();
    let order = rng.permutation(n);
    device.from_f64(order.into_iter().map(|i| (2 * i + 1) as f64 / n as f64 - 1.0 + 1e-3), shape, dtype)
}

/// Runs an example's layer on `values`, its inputs and parameters; `work` gets the context, the outputs and a variable for each
/// of the values.
pub fn with_layer<T>(
    example: &Example,
    values: &[Tensor],
    work: impl FnOnce(Cx, Vec<Var>, Vec<Var>) -> Result<T>,
) -> Result<T> {
    let inputs = example.inputs.len();
    let like =
        values.iter().find(|t| t.dtype().is_float()).ok_or_else(|| Error::graph("an example without numbers"))?;
    let params: Vec<ParamRef> = values[inputs..]
        .iter()
        .zip(example.layer.params())
        .enumerate()
        .map(|(i, (t, spec))| ParamRef { tensor: t.clone(), id: i, slot: i, trainable: spec.trainable })
        .collect();
    let state: Vec<Tensor> = example
        .layer
        .state()
        .iter()
        .map(|s| Tensor::full(s.start, &s.shape, like.dtype(), like.device()))
        .collect::<Result<_>>()?;
    let samples = values.first().and_then(|t| t.shape().first()).copied().unwrap_or(0) as u64;
    let mut cx = Cx::recording(Mode::Train, RunKey { samples: (0..samples).collect(), ..RunKey::default() });
    cx.enter(Scope { node: "example", index: 0, params: &params, state: &state });
    let mut vars: Vec<Var> = values[..inputs].iter().map(|t| cx.input(t.clone(), true)).collect();
    let outputs = example.layer.forward(&mut cx, &vars)?.all();
    for i in 0..params.len() {
        vars.push(cx.used_param(i)?);
    }
    work(cx, outputs, vars)
}

/// What is done with a recorded pass: its context, its outputs, and the variables of the arguments.
type Work<'w> = dyn FnMut(Cx, Vec<Var>, Vec<Var>) -> Result<()> + 'w;
/// A function of the arguments.
type Run<'r> = dyn Fn(&[Tensor], &mut Work) -> Result<()> + 'r;

fn check(run: &Run, names: &[String], args: &[Tensor]) -> Result<()> {
    if let Some(i) = args.iter().position(|t| t.dtype() != DType::F64) {
        return Err(Error::dtype(format!("{}: gradients are checked in f64, got {}", names[i], args[i].dtype())));
    }
    let full = backward(run, args, false)?;
    let split = backward(run, args, true)?;
    for (i, (a, b)) in full.iter().zip(&split).enumerate() {
        if a.to_f64()? != b.to_f64()? {
            return Err(Error::graph(format!("{}: I and W together differ from B", names[i])));
        }
    }
    for (i, grad) in full.iter().enumerate() {
        let g = grad.to_f64()?;
        let scale = g.iter().fold(1e-3, |m: f64, v| m.max(v.abs()));
        let direction: Vec<f64> = Philox::new(3, i as u64, "direction").normal(0, g.len()).collect();
        let along: f64 = g.iter().zip(&direction).map(|(a, b)| a * b).sum();
        compare(
            &format!("{} along a random direction", names[i]),
            along,
            difference(run, args, i, &direction)?,
            scale,
        )?;
        if g.len() > EVERY {
            continue;
        }
        let mut worst: Option<(f64, Error)> = None;
        for (j, &analytic) in g.iter().enumerate() {
            let mut unit = vec![0.0; g.len()];
            unit[j] = 1.0;
            let numeric = difference(run, args, i, &unit)?;
            let off = (analytic - numeric).abs();
            if let Err(e) = compare(&format!("{}, element {j}", names[i]), analytic, numeric, scale)
                && worst.as_ref().is_none_or(|(w, _)| off > *w)
            {
                worst = Some((off, e));
            }
        }
        if let Some((_, e)) = worst {
            return Err(e);
        }
    }
    Ok(())
}

fn compare(what: &str, analytic: f64, numeric: f64, scale: f64) -> Result<()> {
    let size = analytic.abs().max(numeric.abs()).max(scale);
    // The difference itself is no better than rounding over the step.
    if (analytic - numeric).abs() <= TOLERANCE * size + 1e-9 {
        return Ok(());
    }
    Err(Error::numeric(format!("{what}: the gradient is {analytic}, central differences give {numeric}")))
}

/// The weight of each element of an output in the scalar that is differentiated.
fn weights(output: usize, value: &Tensor) -> Result<Tensor> {
    value.device().normal(Philox::new(output as u64, 7, "weights"), 1.0, value.shape(), value.dtype())
}

/// The derivative of the weighted outputs as argument `i` moves along `direction`.
fn difference(run: &Run, args: &[Tensor], i: usize, direction: &[f64]) -> Result<f64> {
    let side = |sign: f64| -> Result<f64> {
        let mut moved = args.to_vec();
        let values = args[i].to_f64()?.into_iter().zip(direction).map(|(x, d)| x + sign * STEP * d);
        moved[i] = args[i].device().from_f64(values, args[i].shape(), DType::F64)?;
        let mut sum = 0.0;
        run(&moved, &mut |_, outputs, _| {
            for (o, y) in outputs.iter().enumerate().filter(|(_, y)| y.needs_grad()) {
                let w = weights(o, y.value())?.to_f64()?;
                sum += y.value().to_f64()?.iter().zip(w).map(|(a, b)| a * b).sum::<f64>();
            }
            Ok(())
        })?;
        Ok(sum)
    };
    Ok((side(1.0)? - side(-1.0)?) / (2.0 * STEP))
}

/// The gradients of the weighted outputs by B, or by I and W.
fn backward(run: &Run, args: &[Tensor], split: bool) -> Result<Vec<Tensor>> {
    let mut found = Vec::new();
    run(args, &mut |cx, outputs, vars| {
        let mut seeds = Vec::new();
        for (o, y) in outputs.iter().enumerate().filter(|(_, y)| y.needs_grad()) {
            seeds.push((y, weights(o, y.value())?));
        }
        let tape = cx.finish().0.ok_or_else(|| Error::graph("nothing was recorded"))?;
        let mut grads = Grads::default();
        let mut inputs = if split {
            let (inputs, weight_pass) = tape.backward_input(&seeds)?;
            weight_pass.run(&mut grads)?;
            inputs
        } else {
            tape.backward(&seeds, &mut grads)?
        };
        for v in &vars {
            let g = v.slot().map_or_else(|| inputs.take(v), |slot| grads.take(slot));
            found.push(match g {
                Some(g) => g,
                None => Tensor::zeros(v.shape(), v.value().dtype(), v.value().device())?,
            });
        }
        Ok(())
    })?;
    Ok(found)
}
