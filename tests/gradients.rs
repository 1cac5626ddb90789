//! Every layer and every op differentiates, on every backend, and knows its shapes.
use pipewright::{
    Result,
    autograd::{Cx, Mask, Mode, Op, Outputs, Saved, Sink, Var, check, value_and_grad},
    layers::{BatchNorm, Conv2d, Example, Layer, Linear, ParamSpec, ZOO},
    tensor::{
        DType, Device, Philox, Tensor,
        backend::{Conv2d as Spec, Pool2d, Unary},
    },
};

fn every_example(mut f: impl FnMut(&Example) -> Result<()>) -> Result<()> {
    let mut count = 0;
    for examples in ZOO {
        for e in examples() {
            f(&e).map_err(|err| err.context(format!("{} ({})", e.layer.kind(), e.name)))?;
            count += 1;
        }
    }
    assert!(count >= 40, "only {count} examples");
    Ok(())
}

#[test]
fn every_layer_differentiates_and_b_is_i_and_w() -> Result<()> {
    every_example(check::example)
}

/// The outputs of an example, and after them the gradients of its inputs and parameters if the pass is recorded.
fn run(e: &Example, device: &Device, dtype: DType, mode: Mode, record: bool) -> Result<Vec<Tensor>> {
    let (values, _) = check::arguments(e, device, dtype)?;
    let key = check::key(&values);
    let cx = if record { Cx::recording(mode, key) } else { Cx::inference(mode, key) };
    check::forward(e, cx, &values, |cx, outputs, vars| {
        let mut all: Vec<Tensor> = outputs.iter().map(|y| y.value().clone()).collect();
        if record {
            let mut seeds = Vec::new();
            for y in outputs.iter().filter(|y| y.needs_grad()) {
                seeds.push((y, Tensor::full(0.5, y.shape(), y.value().dtype(), device)?));
            }
            all.extend(check::backward_of(cx, &seeds, &vars, false)?);
        }
        Ok(all)
    })
}

const MODES: [Mode; 2] = [Mode::Train, Mode::Eval];

#[test]
fn meta_shapes_are_real_shapes() -> Result<()> {
    every_example(|e| {
        for mode in MODES {
            let real = run(e, &Device::reference(), DType::F32, mode, true)?;
            let meta = run(e, &Device::meta(), DType::F32, mode, true)?;
            let shapes = |v: &[Tensor]| v.iter().map(|t| (t.dtype(), t.shape().to_vec())).collect::<Vec<_>>();
            assert_eq!(shapes(&real), shapes(&meta));
        }
        Ok(())
    })
}

#[test]
fn the_cpu_agrees_with_the_reference() -> Result<()> {
    let cpu = Device::cpu(1)?;
    every_example(|e| {
        for (dtype, mode) in [DType::F32, DType::F64].iter().flat_map(|&d| MODES.map(|m| (d, m))) {
            let want = run(e, &Device::reference(), dtype, mode, true)?;
            for (i, (want, got)) in want.iter().zip(run(e, &cpu, dtype, mode, true)?).enumerate() {
                let (want, got) = (want.to_f64()?, got.to_f64()?);
                let scale = want.iter().fold(1.0f64, |m, v| m.max(v.abs()));
                let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 100.0 * dtype.epsilon() * scale;
                assert!(want.iter().zip(&got).all(near), "{} {dtype}, value {i}: {want:?}, got {got:?}", e.name);
            }
        }
        Ok(())
    })
}

#[test]
fn a_second_pass_and_one_without_a_tape_give_the_same_bits() -> Result<()> {
    let bits = |t: &Tensor| -> Result<Vec<u64>> { Ok(t.to_f64()?.iter().map(|v| v.to_bits()).collect()) };
    for device in [Device::reference(), Device::cpu(2)?] {
        every_example(|e| {
            for mode in MODES {
                let first = run(e, &device, DType::F32, mode, true)?;
                for (a, b) in first.iter().zip(run(e, &device, DType::F32, mode, true)?) {
                    assert_eq!(bits(a)?, bits(&b)?, "{} recomputed", e.name);
                }
                for (a, b) in first.iter().zip(run(e, &device, DType::F32, mode, false)?) {
                    assert_eq!(bits(a)?, bits(&b)?, "{} without a tape", e.name);
                }
            }
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn a_grid_of_convolutions() -> Result<()> {
    for kernel in [1, 2, 3] {
        for (stride, padding, dilation) in [(1, 0, 1), (1, 1, 1), (2, 1, 1), (2, 0, 2), (1, 2, 2), (3, 1, 1)] {
            for (groups, ci, co) in [(1, 2, 3), (2, 4, 2), (3, 3, 3)] {
                let layer =
                    Conv2d::new(ci, co, kernel).stride(stride).padding(padding).dilation(dilation).groups(groups);
                check::layer(layer, &[&[2, 5, 6, ci]])?;
            }
        }
    }
    Ok(())
}

/// Numbers of this shape from 0.3 to 1.7.
fn positive(name: &str, shape: &[usize]) -> Result<Tensor> {
    Device::reference().uniform(Philox::new(5, 0, name), 0.3, 1.7, shape, DType::F64)
}

/// Numbers of this shape on both sides of 0.
fn signed(name: &str, shape: &[usize]) -> Result<Tensor> {
    positive(name, shape)?.affine(1.0, -1.03)
}

#[test]
fn functions_of_one_value() -> Result<()> {
    let every = [
        Unary::Neg,
        Unary::Exp,
        Unary::Log,
        Unary::Sqrt,
        Unary::Recip,
        Unary::Square,
        Unary::Abs,
        Unary::Relu,
        Unary::Gelu,
        Unary::Tanh,
        Unary::Sigmoid,
        Unary::Affine { scale: -2.5, shift: 1.0 },
    ];
    for op in every {
        let some = if matches!(op, Unary::Log | Unary::Sqrt | Unary::Recip) { positive } else { signed };
        let x = some("x", &[2, 3])?;
        check::gradients(|cx, x| Ok(vec![cx.unary(op, &x[0])?]), &[x]).map_err(|e| e.context(format!("{op:?}")))?;
    }
    Ok(())
}

#[test]
fn functions_of_two_values() -> Result<()> {
    let shapes: [(&[usize], &[usize]); 5] =
        [(&[2, 3], &[2, 3]), (&[2, 3], &[3]), (&[2, 1, 3], &[4, 1]), (&[1], &[2, 2]), (&[2, 2], &[])];
    for (a, b) in shapes {
        let args = [signed("a", a)?, positive("b", b)?];
        check::gradients(
            |cx, x| {
                let (a, b) = (&x[0], &x[1]);
                let mut all = vec![cx.add(a, b)?, cx.sub(a, b)?, cx.mul(a, b)?, cx.div(a, b)?, cx.maximum(a, b)?];
                // Both operands the same: two gradients for one value.
                all.push(cx.mul(a, a)?);
                Ok(all)
            },
            &args,
        )
        .map_err(|e| e.context(format!("{a:?} and {b:?}")))?;
    }
    Ok(())
}

#[test]
fn sums_products_and_moves() -> Result<()> {
    check::gradients(
        |cx, x| {
            let mut y = vec![cx.sum(&x[0])?, cx.mean(&x[0])?];
            for axis in 0..3 {
                y.push(cx.sum_axis(&x[0], axis)?);
                y.push(cx.mean_axis(&x[0], axis)?);
                y.push(cx.max_axis(&x[0], axis)?);
                y.push(cx.slice(&x[0], axis, 1, 1)?);
            }
            y.push(cx.permute(&x[0], &[2, 0, 1])?);
            y.push(cx.reshape(&x[0], &[6, usize::MAX])?);
            let parts = cx.split(&x[0], 2, &[1, 3])?;
            // Of several outputs only one is used.
            y.push(cx.square(&parts[1])?);
            let row = cx.slice(&x[0], 1, 2, 1)?;
            y.push(cx.broadcast_to(&row, &[3, 2, 5, 4])?);
            y.push(cx.concat(&[x[0].clone(), row, x[0].clone()], 1)?);
            y.push(cx.softmax(&x[0])?);
            Ok(y)
        },
        &[signed("x", &[2, 3, 4])?],
    )?;
    for (a, b) in [(vec![2, 3], vec![3, 4]), (vec![2, 2, 3], vec![2, 3, 1])] {
        check::gradients(|cx, x| Ok(vec![cx.matmul(&x[0], &x[1])?]), &[signed("a", &a)?, signed("b", &b)?])?;
    }
    Ok(())
}

#[test]
fn ops_of_networks_without_layers() -> Result<()> {
    let (n, hw) = (2, [4, 5]);
    let c = Spec { n, hw, ci: 2, co: 3, kernel: [3, 2], stride: [1, 2], padding: [2, 1], dilation: [2, 1], groups: 1 };
    let p = Pool2d { n, hw, c: 2, kernel: [2, 3], stride: [1, 2], padding: [1, 0] };
    check::gradients(
        |cx, x| {
            let mut y = vec![cx.max_pool2d(p, &x[0])?, cx.avg_pool2d(p, &x[0])?, cx.dropout(0.3, &x[0])?];
            y.push(cx.conv2d(c, &x[0], &x[1], Some(&x[2]))?);
            Ok(y)
        },
        &[signed("x", &[2, 4, 5, 2])?, signed("w", &[3, 2, 2, 3])?, signed("b", &[3])?],
    )?;
    let (mean, var) = (signed("mean", &[3])?, positive("var", &[3])?);
    check::gradients(
        |cx, x| {
            Ok(vec![
                cx.batch_norm(1e-3, &x[0], &x[1], &x[2])?.0,
                cx.fixed_norm(1e-3, &x[0], [&mean, &var], &x[1], &x[2])?,
                cx.layer_norm(1e-3, &x[0], &x[1], &x[2])?,
            ])
        },
        &[signed("x", &[4, 3])?, positive("g", &[3])?, signed("b", &[3])?],
    )?;
    // Weights that are made of parameters: the business of W, all of it.
    check::gradients(
        |cx, x| {
            let w = cx.mul(&x[1], &x[2])?;
            Ok(vec![cx.linear(&x[0], &w, None)?])
        },
        &[signed("x", &[2, 3])?, signed("w", &[4, 3])?, positive("s", &[4, 1])?],
    )?;
    let target = signed("t", &[2, 3])?;
    check::gradients(
        |cx, x| {
            let t = cx.constant(target.clone());
            Ok(vec![cx.squared_error(&x[0], &t)?, cx.squared_error(&t, &x[0])?])
        },
        &[signed("x", &[2, 3])?],
    )
}

#[test]
fn a_scalar_function_and_its_gradient() -> Result<()> {
    let a = signed("a", &[2, 3])?;
    let (y, g) = value_and_grad(
        |cx, x| {
            let s = cx.square(&x[0])?;
            cx.sum(&s)
        },
        std::slice::from_ref(&a),
    )?;
    assert_eq!(y.item()?, a.to_f64()?.iter().map(|v| v * v).sum::<f64>());
    assert_eq!(g[0].to_f64()?, a.to_f64()?.iter().map(|v| 2.0 * v).collect::<Vec<_>>());
    Ok(())
}

/// y = a·b, whose gradient by element 4 of operand `wrong` is off by a thousandth; in W only if `late`.
struct Off {
    wrong: usize,
    late: bool,
}

impl Op for Off {
    fn name(&self) -> &'static str {
        "off"
    }
    fn backward(&self, saved: &mut Saved, dy: &[Option<Tensor>], wrt: Mask, dx: &mut Sink) -> Result<()> {
        let Some(dy) = &dy[0] else { return Ok(()) };
        for i in (0..2).filter(|&i| wrt.has(i)) {
            let mut g = dy.mul(saved.get(1 - i)?)?.to_f64()?;
            if i == self.wrong && (!self.late || !wrt.has(0)) {
                g[4] *= 1.001;
            }
            dx.put(i, dy.device().from_f64(g.into_iter(), dy.shape(), DType::F64)?)?;
        }
        Ok(())
    }
}

#[test]
fn the_checker_finds_and_names_a_wrong_gradient() -> Result<()> {
    let args = [positive("a", &[2, 3])?, positive("b", &[2, 3])?];
    let verdict = |wrong: usize, late: bool| {
        let f = |cx: &mut Cx, x: &[Var]| {
            let y = x[0].value().mul(x[1].value())?;
            let save = [(x[0].value(), Mask::only(1)), (x[1].value(), Mask::only(0))];
            Ok(cx.record(Off { wrong, late }, &[&x[0], &x[1]], vec![y], &save)?.all())
        };
        check::gradients(f, &args)
    };
    verdict(2, false)?;
    for wrong in [0, 1] {
        let e = verdict(wrong, false).unwrap_err().to_string();
        assert!(e.contains(&format!("argument {wrong}, element 4 (at [1, 1] of [2, 3]): the gradient is")), "{e}");
        assert!(e.contains("central differences give"), "{e}");
    }
    let e = verdict(1, true).unwrap_err().to_string();
    assert!(e.contains("argument 1, element 4") && e.contains("I and W together"), "{e}");
    let float = args[0].cast(DType::F32)?;
    let e = check::gradients(|cx, x| Ok(vec![cx.exp(&x[0])?]), &[float]).unwrap_err().to_string();
    assert!(e.contains("argument 0") && e.contains("f32"), "{e}");
    Ok(())
}

/// A layer that forgets that its bias counts twice.
struct Forgetful;

impl Layer for Forgetful {
    fn kind(&self) -> &'static str {
        "forgetful"
    }
    fn params(&self) -> Vec<ParamSpec> {
        Linear::new(3, 3).params()
    }
    fn forward(&self, cx: &mut Cx, x: &[Var]) -> Result<Outputs> {
        let (w, b) = (cx.param(0)?, cx.param(1)?);
        let again = cx.constant(b.value().clone());
        let b = cx.add(&b, &again)?;
        Ok(cx.linear(&x[0], &w, Some(&b))?.into())
    }
    fn examples() -> Vec<Example> {
        vec![Example::new("only", Forgetful, &[&[2, 3]])]
    }
}

#[test]
fn the_checker_names_the_parameter_of_a_layer() {
    let e = check::examples::<Forgetful>().unwrap_err().to_string();
    assert!(e.contains("parameter \"bias\", element") && e.contains("\"only\" of layer \"forgetful\""), "{e}");
    assert!(check::layer(Linear::new(3, 3), &[&[2, 4]]).is_err());
    assert!(check::layer(BatchNorm::new(3), &[&[4, 3]]).is_ok());
}
