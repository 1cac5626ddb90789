//! What a tape holds, for how long, and what it refuses.
use pipewright::{
    Result,
    autograd::{Cx, Grads, Mask, Mode, Op, ParamRef, RunKey, Saved, Scope, Sink, Tape, Var, check},
    layers::{BatchNorm, Conv2d, Example, Linear},
    tensor::{DType, Device, Philox, Tensor, backend::Pool2d},
};

fn random(name: &str, shape: &[usize], device: &Device) -> Result<Tensor> {
    device.normal(Philox::new(1, 0, name), 1.0, shape, DType::F64)
}

fn recording<'a>() -> Cx<'a> {
    Cx::recording(Mode::Train, RunKey::default())
}

/// A linear layer on x[2,3] with the weights w[4,3] and b[4].
fn linear(weights: &[Tensor], x: Tensor, needs_grad: bool) -> Result<(Tape, Var)> {
    let params: Vec<ParamRef> =
        (0..2).map(|i| ParamRef { tensor: weights[i].clone(), id: i, slot: i, trainable: true }).collect();
    let mut cx = recording();
    cx.enter(Scope { node: "linear", index: 0, params: &params, state: &[] });
    let x = cx.input(x, needs_grad);
    let (w, b) = (cx.param(0)?, cx.param(1)?);
    let y = cx.linear(&x, &w, Some(&b))?;
    drop((w, b, x));
    Ok((cx.finish().0.expect("a tape"), y))
}

#[test]
fn stashing_is_ownership() -> Result<()> {
    let d = Device::cpu(1)?;
    let mut weights = vec![random("w", &[4, 3], &d)?, random("b", &[4], &d)?];
    let grads = [random("gw", &[4, 3], &d)?, random("gb", &[4], &d)?];
    // Whether each weight got a new buffer.
    let step = |weights: &mut [Tensor]| -> Result<Vec<bool>> {
        let mut moved = Vec::new();
        for (w, g) in weights.iter_mut().zip(&grads) {
            let before = d.memory();
            w.axpy(-0.1, g)?;
            moved.push(d.memory().hits + d.memory().misses > before.hits + before.misses);
        }
        Ok(moved)
    };
    let x = random("x", &[2, 3], &d)?;
    let (tape, y) = linear(&weights, x.clone(), true)?;
    assert_eq!(weights.iter().map(Tensor::holders).collect::<Vec<_>>(), [2, 1], "the bias is not needed by B");
    let old = weights[0].to_f64()?;
    assert_eq!(step(&mut weights)?, [true, false], "a stashed weight moves, another is updated in place");
    let stashed: Vec<(usize, Vec<f64>)> = tape.stashed().map(|(id, t)| Ok((id, t.to_f64()?))).collect::<Result<_>>()?;
    assert_eq!(stashed, [(0, old)]);
    assert_eq!(tape.saved_bytes(), 2 * 3 * 8, "x; a weight is not an activation");
    let (_, pass) = tape.backward_input(&[(&y, y.value().clone())])?;
    assert_eq!(pass.saved_bytes(), 2 * 3 * 8, "I frees the old weights and keeps x for W");
    assert_eq!(step(&mut weights)?, [false, false], "nothing in flight: in place");
    pass.run(&mut Grads::default())?;
    // From now on no version needs new memory.
    let misses = d.memory().misses;
    for _ in 0..5 {
        let (tape, _y) = linear(&weights, x.clone(), true)?;
        assert_eq!(step(&mut weights)?, [true, false]);
        drop(tape);
    }
    assert_eq!(d.memory().misses, misses);
    // The first layer of a model, whose input needs no gradient, never stashes.
    let (_tape, _y) = linear(&weights, x, false)?;
    assert_eq!(weights[0].holders(), 1);
    Ok(())
}

#[test]
fn saved_once_and_only_what_is_read() -> Result<()> {
    let d = Device::reference();
    let bytes = |f: &dyn Fn(&mut Cx, &Var) -> Result<Var>| -> Result<usize> {
        let mut cx = recording();
        let x = cx.input(random("x", &[2, 4, 4, 2], &d)?, true);
        f(&mut cx, &x)?;
        Ok(cx.finish().0.expect("a tape").saved_bytes())
    };
    let image = 2 * 4 * 4 * 2 * 8;
    assert_eq!(bytes(&|cx, x| cx.relu(x))?, image);
    assert_eq!(bytes(&|cx, x| cx.scale(x, 2.0))?, 0);
    assert_eq!(bytes(&|cx, x| cx.add(x, x))?, 0);
    assert_eq!(bytes(&|cx, x| cx.sum(x))?, 0);
    assert_eq!(bytes(&|cx, x| cx.mul(x, x))?, image, "one memory counts once");
    let relu_then_tanh = |cx: &mut Cx, x: &Var| {
        let y = cx.relu(x)?;
        cx.tanh(&y)
    };
    assert_eq!(bytes(&relu_then_tanh)?, 2 * image, "results, not arguments");
    let p = Pool2d { n: 2, hw: [4, 4], c: 2, kernel: [2, 2], stride: [2, 2], padding: [0, 0] };
    assert_eq!(bytes(&|cx, x| cx.max_pool2d(p, x))?, 2 * 2 * 2 * 2 * 4, "positions, in 4 bytes each");
    assert_eq!(bytes(&|cx, x| cx.avg_pool2d(p, x))?, 0);
    Ok(())
}

/// The bytes that a pass keeps, those that its W keeps, and the operations of its backward pass.
fn cost(e: &Example, needs_grad: bool) -> Result<(usize, usize, u64)> {
    let meta = Device::meta();
    let (values, _) = check::arguments(e, &meta, DType::F32)?;
    let params: Vec<ParamRef> = e
        .layer
        .params()
        .iter()
        .enumerate()
        .map(|(i, spec)| ParamRef { tensor: values[i + 1].clone(), id: i, slot: i, trainable: spec.trainable })
        .collect();
    let mut cx = Cx::recording(Mode::Train, check::key(&values));
    cx.enter(Scope { node: "only", index: 0, params: &params, state: &[] });
    let x = cx.input(values[0].clone(), needs_grad);
    let y = e.layer.forward(&mut cx, &[x])?.one()?;
    let seed = y.value().clone();
    let tape = cx.finish().0.expect("a tape");
    let (saved, before) = (tape.saved_bytes(), meta.backend().counted().flops);
    let (_, pass) = tape.backward_input(&[(&y, seed)])?;
    let later = pass.saved_bytes();
    pass.run(&mut Grads::default())?;
    Ok((saved, later, meta.backend().counted().flops - before))
}

#[test]
fn frozen_weights_cost_nothing() -> Result<()> {
    let shape: &[usize] = &[8, 6, 6, 16];
    let conv = || Conv2d::new(16, 16, 3).padding(1);
    let (_, _, both) = cost(&Example::new("learned", conv(), &[shape]), true)?;
    let (saved, later, input_only) = cost(&Example::new("frozen", conv().frozen(), &[shape]), true)?;
    assert_eq!((saved, later), (0, 0), "the gradient of the input reads the weight alone, which is there anyway");
    assert!(input_only * 2 <= both, "{input_only} of {both} operations");
    assert_eq!(cost(&Example::new("frozen", conv().frozen(), &[shape]), false)?, (0, 0, 0));
    assert_eq!(cost(&Example::new("frozen", Linear::new(16, 4).frozen(), &[shape]), false)?, (0, 0, 0));
    assert_eq!(cost(&Example::new("frozen", BatchNorm::new(16).frozen(), &[shape]), false)?, (0, 0, 0));
    // I hands its sums to W, which then reads nothing else.
    let (saved, later, _) = cost(&Example::new("learned", BatchNorm::new(16), &[shape]), true)?;
    assert!(saved > 8 * 6 * 6 * 16 * 4 && later == 2 * 16 * 4, "{saved}, then {later}");
    Ok(())
}

/// Hands out both gradients whether asked or not.
struct Careless;

impl Op for Careless {
    fn name(&self) -> &'static str {
        "careless"
    }
    fn backward(&self, _: &mut Saved, dy: &[Option<Tensor>], _: Mask, dx: &mut Sink) -> Result<()> {
        let Some(dy) = &dy[0] else { return Ok(()) };
        dx.put(0, dy.clone())?;
        dx.put(1, dy.clone())
    }
}

#[test]
fn an_op_may_not_hand_out_what_nobody_asked_for() -> Result<()> {
    let args = [random("a", &[3], &Device::reference())?, random("b", &[3], &Device::reference())?];
    let sum = |cx: &mut Cx, x: &[Var]| {
        let y = x[0].value().add(x[1].value())?;
        Ok(cx.record(Careless, &[&x[0], &x[1]], vec![y], &[])?.all())
    };
    let e = check::gradients(sum, &args).unwrap_err().to_string();
    assert!(e.contains("input 1 was not asked for") && e.contains("backward of careless"), "{e}");
    Ok(())
}

#[test]
fn long_tapes_drop_and_run_without_deep_stacks() -> Result<()> {
    let x = Tensor::from_host(&[1.0f32], &[1], &Device::reference())?;
    let chain = || -> Result<(Tape, Var, Var)> {
        let mut cx = recording();
        let first = cx.input(x.clone(), true);
        let mut v = first.clone();
        for _ in 0..200_000 {
            v = cx.relu(&v)?;
        }
        Ok((cx.finish().0.expect("a tape"), first, v))
    };
    drop(chain()?);
    let (tape, first, last) = chain()?;
    assert_eq!(tape.saved_bytes(), 200_000 * 4);
    let mut grads = tape.backward(&[(&last, x.clone())], &mut Grads::default())?;
    assert_eq!(grads.take(&first).map(|g| g.to_f64()).transpose()?, Some(vec![1.0]));
    Ok(())
}

#[test]
fn variables_of_another_pass_are_refused() -> Result<()> {
    let x = Tensor::from_host(&[1.0f32], &[1], &Device::reference())?;
    let (mut one, mut other) = (recording(), recording());
    let (a, b) = (one.input(x.clone(), true), other.input(x.clone(), true));
    assert!(other.add(&b, &a).unwrap_err().to_string().contains("another forward pass"));
    assert!(Cx::inference(Mode::Eval, RunKey::default()).relu(&a).is_err());
    one.relu(&a)?;
    let z = other.relu(&b)?;
    let tape = one.finish().0.expect("a tape");
    let e = tape.backward(&[(&z, x)], &mut Grads::default()).err().expect("an error").to_string();
    assert!(e.contains("another forward pass"), "{e}");
    let wrong = Tensor::zeros(&[2], DType::F32, &Device::reference())?;
    let tape = other.finish().0.expect("a tape");
    let e = tape.backward(&[(&z, wrong)], &mut Grads::default()).err().expect("an error").to_string();
    assert!(e.contains("seed"), "{e}");
    Ok(())
}
