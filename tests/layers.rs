//! What is wrong with a layer or a graph is told when it is built, and names the node; what layers compute in training and in
//! evaluation.
use pipewright::{
    ErrorKind,
    autograd::{Mode, RunKey, Scope, check},
    prelude::*,
};

/// The error of adding `layer` to an input of `shape`.
fn refused(layer: impl Layer, shape: &[usize], kind: ErrorKind, parts: &[&str]) {
    let mut g = Graph::new();
    let x = g.input("x", shape);
    let name = format!("node \"{}1\"", layer.kind());
    let e = g.add(layer, [x]).expect_err("an error");
    let text = e.to_string();
    assert!(e.kind() == kind && parts.iter().all(|p| text.contains(p)) && text.contains(&name), "{text}");
}

#[test]
fn settings_that_make_no_sense() {
    use ErrorKind::{Config, Shape};
    refused(Linear::new(0, 3), &[0], Config, &["linear: inputs must be 1 or more"]);
    refused(Linear::new(3, 0), &[3], Config, &["linear: outputs"]);
    refused(Linear::new(usize::MAX, 3), &[3], Shape, &["too large"]);
    refused(Conv2d::new(0, 3, 3), &[4, 4, 0], Config, &["input channels"]);
    refused(Conv2d::new(3, 0, 3), &[4, 4, 3], Config, &["output channels"]);
    refused(Conv2d::new(4, 6, 3).groups(3), &[4, 4, 4], Shape, &["groups divide both channel counts", "groups 3"]);
    refused(Conv2d::new(4, 6, 3).groups(0), &[4, 4, 4], Shape, &["groups 0"]);
    refused(Conv2d::new(4, 6, 0), &[4, 4, 4], Shape, &["must be positive"]);
    refused(Conv2d::new(4, 6, 3).stride(0), &[4, 4, 4], Shape, &["must be positive"]);
    refused(Conv2d::new(4, 6, 3).dilation(0), &[4, 4, 4], Shape, &["must be positive"]);
    refused(Conv2d::new(4, 6, 5), &[4, 4, 4], Shape, &["does not fit the input [4, 4]"]);
    refused(Conv2d::new(4, 6, 3).padding(usize::MAX), &[4, 4, 4], Shape, &["conv2d"]);
    refused(Conv2d::new(4, 6, usize::MAX), &[4, 4, 4], Shape, &["too large"]);
    refused(Conv2d::new(4, 6, 3), &[4, 4, 3], Shape, &["4 channels expected", "[2, 4, 4, 3]"]);
    refused(Conv2d::new(4, 6, 3), &[4, 4], Shape, &["an image [n,h,w,c] expected"]);
    refused(MaxPool2d::new(0), &[4, 4, 1], Shape, &["pool2d", "[0, 0]"]);
    refused(MaxPool2d::new(2).stride(0), &[4, 4, 1], Shape, &["stride [0, 0]"]);
    refused(AvgPool2d::new(2).padding(2), &[4, 4, 1], Shape, &["half a window at most"]);
    refused(AvgPool2d::new(5), &[4, 4, 1], Shape, &["does not fit the input [4, 4]"]);
    refused(BatchNorm::new(0), &[0], Config, &["batch_norm"]);
    refused(BatchNorm::new(3), &[4], Shape, &["length 3 expected", "[2, 4]"]);
    refused(BatchNorm::new(3).momentum(1.5), &[3], Config, &["0 ≤ momentum ≤ 1", "1.5"]);
    refused(BatchNorm::new(3).eps(-1.0), &[3], Config, &["eps"]);
    refused(LayerNorm::new(3).eps(f64::NAN), &[3], Config, &["eps", "NaN"]);
    refused(LayerNorm::new(3), &[2, 4], Shape, &["length 3 expected"]);
    for rate in [1.0, -0.1, f64::NAN] {
        refused(Dropout::new(rate), &[3], Config, &["0 ≤ rate < 1"]);
    }
    refused(Reshape::new([3]), &[4], Shape, &["cannot be cut into parts of [3]"]);
    refused(Reshape::new([usize::MAX, 2]), &[4], Shape, &["cannot be cut"]);
    refused(Reshape::new([0]), &[4], Shape, &["cannot be cut"]);
    refused(Add, &[3], Shape, &["two inputs or more of one shape"]);
    refused(Concat::new(0), &[3], Shape, &["axis 0 is the samples'"]);
    refused(Concat::new(2), &[3], Shape, &["axis 2"]);
    refused(Embedding::new(0, 3), &[2], Config, &["vocabulary"]);
    refused(Embedding::new(5, 3), &[2], ErrorKind::DType, &["ids must be i64, i32 or u8"]);
    refused(PositionEmbedding::new(0, 3), &[0, 3], Config, &["position_embedding: places"]);
    refused(PositionEmbedding::new(4, 3), &[5, 3], Shape, &["x[n,4,3] expected", "[2, 5, 3]"]);
    refused(MultiHeadAttention::new(6, 4), &[5, 6], Config, &["heads must divide features, got 4 of 6"]);
    refused(MultiHeadAttention::new(6, 0), &[5, 6], Config, &["attention: heads must be 1 or more"]);
    refused(MultiHeadAttention::new(0, 1), &[5, 0], Config, &["attention: features"]);
    refused(MultiHeadAttention::new(6, 2), &[6], Shape, &["x[n,t,6] of one token or more expected", "[2, 6]"]);
    refused(MultiHeadAttention::new(6, 2), &[0, 6], Shape, &["[2, 0, 6]"]);
    refused(MultiHeadAttention::new(usize::MAX, 1), &[1, 6], Shape, &["too large"]);
    refused(Lstm::new(0, 3), &[5, 0], Config, &["lstm: inputs must be 1 or more"]);
    refused(Lstm::new(3, 0), &[5, 3], Config, &["lstm: hidden"]);
    refused(Lstm::new(3, 2), &[5, 4], Shape, &["x[n,t,3] of one token or more expected", "[2, 5, 4]"]);
    refused(Lstm::new(3, 2), &[3], Shape, &["x[n,t,3] expected", "[2, 3]"]);
    refused(Lstm::new(3, usize::MAX), &[5, 3], Shape, &["too large"]);
    refused(CrossEntropy::new(), &[3], ErrorKind::Graph, &["a value and a target expected, got 1"]);
}

/// Forgets the samples.
struct Total;

impl Layer for Total {
    fn kind(&self) -> &'static str {
        "total"
    }
    fn forward(&self, cx: &mut Cx, x: &[Var]) -> Result<Outputs> {
        Ok(cx.sum(single(x)?)?.into())
    }
    fn examples() -> Vec<Example> {
        Vec::new()
    }
}

#[test]
fn names_inputs_and_axes() -> Result<()> {
    let mut g = Graph::new();
    let x = g.input("x", [3]);
    assert_eq!(x, g.input("x", [3]), "one field, one value");
    let y = g.add_named("linear1", Linear::new(3, 3), [x])?;
    let z = g.add(Linear::new(3, 3), [y])?;
    assert_eq!(g.nodes()[z.node].name, "linear2", "an ordinal that nobody took");
    let error = |e: Result<Value>| e.expect_err("an error").to_string();
    assert!(error(g.add_named("linear1", Relu, [x])).contains("\"linear1\" is taken"));
    assert!(error(g.add_named("a.b", Relu, [x])).contains("no dot"));
    assert!(error(g.add(Relu, [Value { node: 9, output: 0 }])).contains("no output 0 of node 9"));
    assert!(error(g.add(Relu, [x, y])).contains("one input expected, got 2"));
    assert!(error(g.add(Total, [x])).contains("axis 0 of every output"));
    let mut other = g.clone();
    other.input("x", [4]);
    assert!(error(other.add(Relu, [x])).contains("\"x\" is taken: an input of shape [4]"));
    other = g.clone();
    other.label("linear1");
    assert!(error(other.add(Relu, [x])).contains("\"linear1\" is taken"));
    other = g.clone();
    other.input("", [4]);
    assert!(error(other.add(Relu, [x])).contains("not empty"));
    Ok(())
}

#[test]
fn losses_count_and_refuse() -> Result<()> {
    let d = Device::reference();
    let classes = |c: &[i64]| Tensor::from_host(c, &[c.len()], &d);
    let loss = CrossEntropy::new().ignore(-1);
    assert_eq!(loss.weight(&classes(&[0, -1, 2, -1])?)?, 2.0);
    assert_eq!(Mse.weight(&Tensor::zeros(&[2, 3], DType::F32, &d)?)?, 6.0);
    let mut cx = Cx::inference(Mode::Eval, RunKey::default());
    let logits = cx.input(Tensor::from_host(&[0.0f64, 3.0, 9.0, 9.0, 1.0, 0.0], &[3, 2], &d)?, false);
    let right = cx.input(classes(&[1, -1, 1])?, false);
    let all = loss.forward(&mut cx, &[logits.clone(), right])?.all();
    let expected = (1.0 + (-3.0f64).exp()).ln() + (1.0 + 1.0f64.exp()).ln();
    assert!((all[0].value().item()? - expected).abs() < 1e-12);
    assert_eq!(all[1].value().item()?, 1.0, "of the two rows that count one is right");
    for outside in [2, -2] {
        let wrong = cx.input(classes(&[1, outside, 1])?, false);
        let e = loss.forward(&mut cx, &[logits.clone(), wrong]).unwrap_err().to_string();
        assert!(e.contains(&format!("class {outside} at row 1 is outside 0..2")), "{e}");
    }
    let short = cx.input(classes(&[1])?, false);
    assert!(loss.forward(&mut cx, &[logits, short]).is_err());
    Ok(())
}

#[test]
fn batch_norm_uses_the_batch_then_the_running_state() -> Result<()> {
    let d = Device::reference();
    let x = Tensor::from_host(&[1.0f64, 10.0, 3.0, 30.0, 5.0, 20.0], &[3, 2], &d)?;
    let example = Example::new("two channels", BatchNorm::new(2), &[&[3, 2]]);
    let both = |v: f64| Tensor::full(v, &[2], DType::F64, &d);
    let values = [x, both(1.0)?, both(0.0)?];
    let run = |mode| {
        check::forward(&example, Cx::recording(mode, check::key(&values)), &values, |cx, y, _| {
            Ok((y[0].value().to_f64()?, cx.finish().1))
        })
    };
    let (y, stats) = run(Mode::Train)?;
    // Mean 3 and variance 8/3 of channel 0; the running variance is emitted without bias: 4.
    assert!((y[0] + 2.0 / (8.0f64 / 3.0 + 1e-5).sqrt()).abs() < 1e-12);
    let emitted: Vec<_> = stats.iter().map(|s| s.value.to_f64()).collect::<Result<_>>()?;
    assert_eq!(emitted[0], [3.0, 20.0]);
    assert!((emitted[1][0] - 4.0).abs() < 1e-12 && (emitted[1][1] - 100.0).abs() < 1e-12);
    let (_, stats) = run(Mode::Eval)?;
    assert!(stats.is_empty(), "evaluation teaches nothing");
    let e = check::layer(BatchNorm::new(2), &[&[1, 2]]).unwrap_err().to_string();
    assert!(e.contains("two values a channel"), "{e}");
    Ok(())
}

#[test]
fn dropout_depends_on_seed_step_sample_and_node_only() -> Result<()> {
    let d = Device::cpu(2)?;
    let pass = |seed, step, node: &str, samples: &[u64], mode| {
        let mut cx = Cx::recording(mode, RunKey { seed, step, samples: samples.into() });
        cx.enter(Scope { node, ..Scope::default() });
        // Two rows a sample.
        let x = cx.input(Tensor::full(1.0, &[2 * samples.len(), 50], DType::F32, &d)?, true);
        Dropout::new(0.25).forward(&mut cx, &[x])?.one()?.value().to_f64()
    };
    let train = |seed, step, node| pass(seed, step, node, &[7, 8, 9], Mode::Train);
    let whole = train(1, 2, "d")?;
    assert_eq!(whole[100..], pass(1, 2, "d", &[8, 9], Mode::Train)?, "a part of the batch");
    for other in [train(2, 2, "d")?, train(1, 3, "d")?, train(1, 2, "e")?] {
        assert_ne!(whole, other);
    }
    assert!(whole.iter().all(|&v| v == 0.0 || (v - 4.0 / 3.0).abs() < 1e-6));
    let dropped = whole.iter().filter(|&&v| v == 0.0).count();
    assert!((40..110).contains(&dropped), "{dropped} of 300");
    assert!(pass(1, 2, "d", &[7, 8, 9], Mode::Eval)?.iter().all(|&v| v == 1.0));
    Ok(())
}

#[test]
fn states_of_an_lstm_must_fit() -> Result<()> {
    let mut g = Graph::new();
    let (x, h, wrong) = (g.input("x", [5, 3]), g.input("h", [2]), g.input("c", [4]));
    let error = |e: Result<Value>| e.expect_err("an error").to_string();
    assert!(error(g.add(Lstm::new(3, 2), [x, h])).contains("got 2 inputs"));
    assert!(error(g.add(Lstm::new(3, 2), [x, h, wrong])).contains("a state [2,2] expected, got [2, 4]"));
    let y = g.add(Lstm::new(3, 2), [x, h, h])?;
    let shapes = [0, 1, 2].map(|output| g.shape(Value { output, ..y }, 4, DType::F32).1);
    assert_eq!(shapes, [vec![4, 5, 2], vec![4, 2], vec![4, 2]]);
    Ok(())
}
