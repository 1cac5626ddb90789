//! The gradient checker: central differences in f64, for unit tests of layers and functions.
//!
//! ```
//! use pipewright::{autograd::check, layers::Linear, tensor::{DType, Device}};
//! check::layer(Linear::new(3, 4), &[&[2, 3]])?;                  // a layer, on random inputs of these shapes
//! check::examples::<Linear>()?;                                  // every example of a layer
//! let x = Device::reference().from_f64([0.5, 1.5].into_iter(), &[2], DType::F64)?;
//! check::gradients(|cx, x| Ok(vec![cx.exp(&x[0])?]), &[x])?;     // a function of tensors
//! # Ok::<(), pipewright::Error>(())
//! ```
use super::{Cx, Grads, Mode, ParamRef, RunKey, Scope, Var};
use crate::{
    Context, Error, Result,
    layers::{Example, ExampleInput, ID_TYPE, Layer},
    tensor::{DType, Device, Philox, Tensor},
};

/// The largest error that passes, relative to the largest element of the gradient.
const TOLERANCE: f64 = 1e-6;
/// The step of the differences: balances rounding (ε/h) against curvature (h²).
const STEP: f64 = 1e-5;
/// Arguments with more elements are checked along a random direction, and by element only to name the worst.
const EVERY: usize = 2000;

/// Checks the gradient of `f` by each of `args` (of type f64, on any device): along a random direction, and, where there are few
/// of them, by every element. All outputs count, each weighted at random. The first argument is an activation, the others are
/// parameters, so that the gradients are also computed as I and W, which must give the same bits.
///
/// # Errors
/// The argument and element that is worst, with both numbers; or that I and W differ from B.
pub fn gradients(f: impl Fn(&mut Cx, &[Var]) -> Result<Vec<Var>>, args: &[Tensor]) -> Result<()> {
    let names: Vec<String> = (0..args.len()).map(|i| format!("argument {i}")).collect();
    let run = |args: &[Tensor], work: &mut Work| {
        let params: Vec<ParamRef> = args.iter().enumerate().map(|(i, t)| learned(i, t, true)).collect();
        let mut cx: Cx = Cx::recording(Mode::Train, key(args));
        cx.enter(Scope { node: "function", index: 0, params: &params, state: &[] });
        let mut vars = Vec::new();
        for (i, t) in args.iter().enumerate() {
            vars.push(if i == 0 { cx.input(t.clone(), true) } else { cx.param(i)? });
        }
        let outputs = f(&mut cx, &vars)?;
        work(cx, outputs, vars)
    };
    check(&run, &names, args)
}

/// Checks a layer on random inputs of the given shapes: the gradients of inputs and parameters.
///
/// # Errors
/// As [`gradients`].
pub fn layer(layer: impl Layer, shapes: &[&[usize]]) -> Result<()> {
    example(&Example::new("given", layer, shapes))
}

/// Checks every example of a layer.
///
/// # Errors
/// As [`gradients`], naming the example.
pub fn examples<L: Layer>() -> Result<()> {
    L::examples().iter().try_for_each(example)
}

/// Checks one example, as in training and, if the layer has state, as in evaluation.
///
/// # Errors
/// As [`gradients`].
pub fn example(example: &Example) -> Result<()> {
    let place = || format!("example {:?} of layer {:?}", example.name, example.layer.kind());
    let (values, names) = arguments(example, &Device::reference(), DType::F64).context(place)?;
    let specs = example.layer.params();
    let inputs = example.inputs.len();
    // Frozen parameters and ids are given, not differentiated.
    let checked: Vec<usize> = (0..values.len())
        .filter(|&i| values[i].dtype().is_float() && (i < inputs || specs[i - inputs].trainable))
        .collect();
    let args: Vec<Tensor> = checked.iter().map(|&i| values[i].clone()).collect();
    let names: Vec<String> = checked.iter().map(|&i| names[i].clone()).collect();
    let modes = if example.layer.state().is_empty() { &[Mode::Train][..] } else { &[Mode::Train, Mode::Eval] };
    for &mode in modes {
        let run = |args: &[Tensor], work: &mut Work| {
            let mut all = values.clone();
            checked.iter().zip(args).for_each(|(&i, t)| all[i] = t.clone());
            forward(example, Cx::recording(mode, key(&all)), &all, |cx, outputs, vars| {
                let vars = checked.iter().map(|&i| vars[i].clone()).collect();
                work(cx, outputs, vars)
            })
        };
        check(&run, &names, &args).context(|| format!("{mode:?} mode")).context(place)?;
    }
    Ok(())
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
    device.from_f64(order.into_iter().map(|i| (2 * i) as f64 / n as f64 + 0.5 / n as f64 - 1.0), shape, dtype)
}

/// What random numbers are drawn from where axis 0 of the first value is the samples'.
pub fn key(values: &[Tensor]) -> RunKey {
    let samples = values.first().and_then(|t| t.shape().first()).copied().unwrap_or(0) as u64;
    RunKey { samples: (0..samples).collect(), ..RunKey::default() }
}

fn learned(i: usize, value: &Tensor, trainable: bool) -> ParamRef {
    ParamRef { tensor: value.clone(), id: i, slot: i, trainable }
}

/// Runs an example's layer in `cx` on `values`, its inputs and parameters; `work` gets the context, the outputs and a variable
/// for each of the values.
pub fn forward<T>(
    example: &Example,
    cx: Cx,
    values: &[Tensor],
    work: impl FnOnce(Cx, Vec<Var>, Vec<Var>) -> Result<T>,
) -> Result<T> {
    let (inputs, learnt) = values.split_at(example.inputs.len());
    let like =
        values.iter().find(|t| t.dtype().is_float()).ok_or_else(|| Error::graph("an example without numbers"))?;
    let specs = example.layer.params();
    let params: Vec<ParamRef> =
        learnt.iter().zip(&specs).enumerate().map(|(i, (t, spec))| learned(i, t, spec.trainable)).collect();
    let mut state = Vec::new();
    for (i, spec) in example.layer.state().iter().enumerate() {
        // Not as it starts, which could hide what it does; a variance stays positive.
        let n: usize = spec.shape.iter().product();
        let rng = Philox::new(i as u64, 1, &example.name);
        let values = rng.uniform(0, n).map(|u| spec.start + 0.5 * u);
        state.push(like.device().from_f64(values, &spec.shape, like.dtype())?);
    }
    let mut cx = cx;
    cx.enter(Scope { node: "example", index: 0, params: &params, state: &state });
    let mut vars: Vec<Var> = inputs.iter().map(|t| cx.input(t.clone(), true)).collect();
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

/// A derivative that central differences contradict.
struct Wrong {
    /// How far off, in units of what is allowed.
    off: f64,
    what: String,
}

fn check(run: &Run, names: &[String], args: &[Tensor]) -> Result<()> {
    if let Some(i) = args.iter().position(|t| t.dtype() != DType::F64) {
        return Err(Error::dtype(format!("{}: gradients are checked in f64, got {}", names[i], args[i].dtype())));
    }
    let full = backward(run, args, false)?;
    let split = backward(run, args, true)?;
    let mut worst: Option<Wrong> = None;
    for (i, name) in names.iter().enumerate() {
        if full[i].shape() != args[i].shape() {
            let (got, want) = (full[i].shape(), args[i].shape());
            return Err(Error::graph(format!("{name}: the gradient has shape {got:?}, the value {want:?}")));
        }
        let (b, iw) = (full[i].to_f64()?, split[i].to_f64()?);
        if let Some(j) = (0..b.len()).find(|&j| b[j].to_bits() != iw[j].to_bits()) {
            let at = place(j, args[i].shape());
            return Err(Error::graph(format!("{name}, {at}: B gives {}, I and W together {}", b[j], iw[j])));
        }
        for wrong in argument(run, args, i, name, &b)? {
            if worst.as_ref().is_none_or(|w| wrong.off > w.off) {
                worst = Some(wrong);
            }
        }
    }
    worst.map_or(Ok(()), |w| Err(Error::numeric(w.what)))
}

/// Checks gradient `g` of argument `i`.
fn argument(run: &Run, args: &[Tensor], i: usize, name: &str, g: &[f64]) -> Result<Vec<Wrong>> {
    let scale = g.iter().fold(1e-3, |m: f64, v| m.max(v.abs()));
    let direction: Vec<f64> = Philox::new(3, i as u64, "direction").normal(0, g.len()).collect();
    let along: f64 = g.iter().zip(&direction).map(|(a, b)| a * b).sum();
    let whole = compare(along, difference(run, args, i, &direction)?, scale, "along a random direction", name);
    if g.len() > EVERY && whole.is_none() {
        return Ok(Vec::new());
    }
    let mut found = Vec::new();
    for j in (0..g.len()).step_by(g.len().div_ceil(EVERY).max(1)) {
        let mut unit = vec![0.0; g.len()];
        unit[j] = 1.0;
        let numeric = difference(run, args, i, &unit)?;
        found.extend(compare(g[j], numeric, scale, &place(j, args[i].shape()), name));
    }
    // An element says more than a direction.
    if found.is_empty() {
        found.extend(whole);
    }
    Ok(found)
}

/// The name of element `j` of a tensor of `shape`.
fn place(j: usize, shape: &[usize]) -> String {
    let (mut index, mut rest) = (vec![0; shape.len()], j);
    for (i, &n) in index.iter_mut().zip(shape).rev() {
        (*i, rest) = (rest % n, rest / n);
    }
    format!("element {j} (at {index:?} of {shape:?})")
}

fn compare(analytic: f64, numeric: f64, scale: f64, at: &str, name: &str) -> Option<Wrong> {
    let size = analytic.abs().max(numeric.abs()).max(scale);
    // The difference itself is no better than rounding over the step.
    let off = (analytic - numeric).abs() / (TOLERANCE * size + 1e-9);
    let off = if off.is_nan() { f64::INFINITY } else { off };
    let what = || format!("{name}, {at}: the gradient is {analytic}, central differences give {numeric}");
    (off > 1.0).then(|| Wrong { off, what: what() })
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
        found = backward_of(cx, &seeds, &vars, split)?;
        Ok(())
    })?;
    Ok(found)
}

/// The gradient by each of `vars` (zeros where none came) of a pass whose outputs are seeded, by B, or by I and W.
pub fn backward_of(cx: Cx, seeds: &[(&Var, Tensor)], vars: &[Var], split: bool) -> Result<Vec<Tensor>> {
    let tape = cx.finish().0.ok_or_else(|| Error::graph("nothing was recorded"))?;
    let mut grads = Grads::default();
    let mut inputs = if split {
        let (inputs, weight_pass) = tape.backward_input(seeds)?;
        weight_pass.run(&mut grads)?;
        inputs
    } else {
        tape.backward(seeds, &mut grads)?
    };
    let of = |v: &Var| match v.slot().map_or_else(|| inputs.take(v), |slot| grads.take(slot)) {
        Some(g) => Ok(g),
        None => Tensor::zeros(v.shape(), v.value().dtype(), v.value().device()),
    };
    vars.iter().map(of).collect()
}
