//! Every layer differentiates, on every backend, and knows its shapes.
use pipewright::{
    Result,
    autograd::{Cx, Grads, Mask, Mode, Op, RunKey, Saved, Sink, Var, check, value_and_grad},
    layers::{Conv2d, Example, ZOO},
    tensor::{DType, Device, Tensor, backend::Unary},
};

fn every_example(mut f: impl FnMut(&Example) -> Result<()>) -> Result<()> {
    let mut count = 0;
    for examples in ZOO {
        for e in examples() {
            f(&e).map_err(|err| err.context(format!("{} ({})", e.layer.kind(), e.name)))?;
            count += 1;
        }
    }
    assert!(count >= 30, "only {count} examples");
    Ok(())
}

#[test]
fn every_layer_differentiates_and_b_is_i_and_w() -> Result<()> {
    every_example(check::example)
}

fn outputs(e: &Example, device: &Device, dtype: DType) -> Result<Vec<Tensor>> {
    let (values, _) = check::arguments(e, device, dtype)?;
    check::with_layer(e, &values, |_, y, _| Ok(y.iter().map(|v| v.value().clone()).collect()))
}

#[test]
fn meta_shapes_are_real_shapes() -> Result<()> {
    every_example(|e| {
        let real = outputs(e, &Device::reference(), DType::F32)?;
        let meta = outputs(e, &Device::meta(), DType::F32)?;
        let shapes = |v: &[Tensor]| v.iter().map(|t| (t.dtype(), t.shape().to_vec())).collect::<Vec<_>>();
        assert_eq!(shapes(&real), shapes(&meta));
        Ok(())
    })
}

#[test]
fn the_cpu_agrees_with_the_reference_and_repeats_itself() -> Result<()> {
    let cpu = Device::cpu(1)?;
    every_example(|e| {
        for dtype in [DType::F32, DType::F64] {
            let (want, got, again) =
                (outputs(e, &Device::reference(), dtype)?, outputs(e, &cpu, dtype)?, outputs(e, &cpu, dtype)?);
            for ((want, got), again) in want.iter().zip(&got).zip(&again) {
                let (want, got) = (want.to_f64()?, got.to_f64()?);
                let scale = want.iter().fold(1.0f64, |m, v| m.max(v.abs()));
                let off = want.iter().zip(&got).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                assert!(off <= 100.0 * dtype.epsilon() * scale, "{} {dtype}: off by {off} of {scale}", e.name);
                assert_eq!(got, again.to_f64()?, "a second run differs");
            }
        }
        Ok(())
    })
}

#[test]
fn a_grid_of_convolutions() -> Result<()> {
    for kernel in [1, 2, 3] {
        for (stride, padding, dilation) in [(1, 0, 1), (1, 1, 1), (2, 1, 1), (2, 0, 2), (1, 2, 2), (3, 1, 1)] {
            for (groups, ci, co) in [(1, 2, 3), (2, 4, 2), (3, 3, 3)] {
                let layer =
                    Conv2d::new(ci, co, kernel).stride(stride).padding(padding).dilation(dilation).groups(groups);
                check::example(&Example::new("grid", layer, &[&[2, 5, 6, ci]]))?;
            }
        }
    }
    Ok(())
}

#[test]
fn functions_without_layers() -> Result<()> {
    let d = Device::reference();
    let a = d.from_f64((1..=6).map(|i| i as f64 / 4.0), &[2, 3], DType::F64)?;
    let b = d.from_f64([0.5, 1.5, -2.0].into_iter(), &[3], DType::F64)?;
    check::gradients(
        |cx, x| {
            let y = cx.mul(&x[0], &x[1])?;
            let y = cx.binary(pipewright::tensor::backend::Binary::Div, &y, &x[0])?;
            let z = cx.unary(Unary::Exp, &y)?;
            let parts = cx.split(&z, 1, &[1, 2])?;
            let t = cx.permute(&parts[1], &[1, 0])?;
            Ok(vec![t, parts[0].clone()])
        },
        &[a.clone(), b],
    )?;
    let (y, g) = value_and_grad(
        |cx, x| {
            let s = cx.unary(Unary::Square, &x[0])?;
            cx.sum(&s)
        },
        std::slice::from_ref(&a),
    )?;
    assert_eq!(y.item()?, a.to_f64()?.iter().map(|v| v * v).sum::<f64>());
    assert_eq!(g[0].to_f64()?, a.to_f64()?.iter().map(|v| 2.0 * v).collect::<Vec<_>>());
    Ok(())
}

/// An op whose gradient of one element is wrong.
struct Wrong;

impl Op for Wrong {
    fn name(&self) -> &'static str {
        "wrong"
    }
    fn backward(&self, _: &mut Saved, dy: &[Option<Tensor>], _: Mask, dx: &mut Sink) -> Result<()> {
        let mut g = dy[0].as_ref().unwrap().to_f64()?;
        g[4] *= 1.001;
        dx.put(0, Device::reference().from_f64(g.into_iter(), &[6], DType::F64)?)
    }
}

#[test]
fn the_checker_finds_and_names_a_wrong_gradient() -> Result<()> {
    let x = Device::reference().from_f64((0..6).map(f64::from), &[6], DType::F64)?;
    let wrong = |cx: &mut Cx, x: &[Var]| {
        let y = x[0].value().affine(1.0, 0.0)?;
        Ok(cx.record(Wrong, &[&x[0]], vec![y], &[])?.all())
    };
    let e = check::gradients(wrong, &[x]).unwrap_err().to_string();
    assert!(e.contains("argument 0"), "{e}");
    Ok(())
}

#[test]
fn long_chains_and_foreign_variables() -> Result<()> {
    let x = Tensor::from_host(&[1.0f32], &[1], &Device::reference())?;
    let mut cx = Cx::recording(Mode::Train, RunKey::default());
    let first = cx.input(x.clone(), true);
    let mut v = first.clone();
    for _ in 0..200_000 {
        v = cx.relu(&v)?;
    }
    let mut other = Cx::recording(Mode::Train, RunKey::default());
    assert!(other.relu(&v).unwrap_err().to_string().contains("another forward pass"));
    let tape = cx.finish().0.unwrap();
    let mut grads = tape.backward(&[(&v, x)], &mut Grads::default())?;
    assert_eq!(grads.take(&first).unwrap().to_f64()?, [1.0]);
    Ok(())
}
