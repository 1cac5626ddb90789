//! Ten training steps of a small CNN as PyTorch does them; golden/make_golden.py made the files and says what is in them.
mod safetensor;

use pipewright::{
    autograd::{Grads, Mode, ParamRef, RunKey, Scope},
    layers::NodeKind,
    prelude::*,
};
use safetensor::{Golden, off};
use std::collections::HashMap;

const BATCH: usize = 6;
const SIZE: usize = 7;
const CLASSES: usize = 4;

fn network() -> Result<Graph> {
    let mut g = Graph::new();
    let (image, label) = (g.input("image", [SIZE, SIZE, 2]), g.label("label"));
    let layers = Sequential::new()
        .then(Conv2d::new(2, 4, 3).padding(1).bias(false))
        .then(BatchNorm::new(4))
        .then(Relu)
        .then(MaxPool2d::new(2))
        .then(Conv2d::new(4, 6, 3).stride(2).padding(1))
        .then(Relu)
        .then(Flatten)
        .then(Dropout::new(0.0))
        .then(Linear::new(24, CLASSES));
    let logits = g.chain(layers, image)?;
    let loss = g.add(CrossEntropy::new().smoothing(0.1), [logits, label])?;
    g.with_loss(loss)
}

/// The tensor that training starts with.
fn start(golden: &Golden, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
    let (shape, values) = &golden.tensors[&format!("start.{name}")];
    device.from_f64(values.iter().copied(), shape, dtype)
}

/// Image and label of step `t`.
fn batch(t: usize, dtype: DType, device: &Device) -> Result<[Tensor; 2]> {
    let n = BATCH * SIZE * SIZE * 2;
    let image = (0..n).map(|i| (0.37 * i as f64 + 1.3 * (100 + t) as f64 + 0.5).sin());
    let label: Vec<i64> = (0..BATCH).map(|i| ((3 * i + t) % CLASSES) as i64).collect();
    Ok([device.from_f64(image, &[BATCH, SIZE, SIZE, 2], dtype)?, Tensor::from_host(&label, &[BATCH], device)?])
}

/// A plain training loop.
struct Training {
    graph: Graph,
    params: Vec<Tensor>,
    state: Vec<Vec<Tensor>>,
    moments: Vec<Vec<Tensor>>,
}

impl Training {
    fn new(golden: &Golden, optimizer: &dyn Optimizer, dtype: DType, device: &Device) -> Result<Training> {
        let graph = network()?;
        let (mut params, mut state, mut moments) = (Vec::new(), Vec::new(), Vec::new());
        for p in graph.params() {
            let w = start(golden, &p.name, dtype, device)?;
            assert_eq!(w.shape(), p.spec.shape, "{}", p.name);
            let zeros = || Tensor::zeros(w.shape(), dtype, device);
            moments.push(optimizer.state().iter().map(|_| zeros()).collect::<Result<_>>()?);
            params.push(w);
        }
        for n in graph.nodes() {
            let of = |s: &StateSpec| start(golden, &format!("{}.{}", n.name, s.name), dtype, device);
            state.push(n.state.iter().map(of).collect::<Result<_>>()?);
        }
        Ok(Training { graph, params, state, moments })
    }

    /// Trains on one batch; the mean loss.
    fn step(&mut self, t: usize, fields: [Tensor; 2], optimizer: &dyn Optimizer) -> Result<f64> {
        let [image, label] = fields;
        let refs = |ids: &[usize]| -> Vec<ParamRef> {
            ids.iter().map(|&p| ParamRef { tensor: self.params[p].clone(), id: p, slot: p, trainable: true }).collect()
        };
        let per_node: Vec<Vec<ParamRef>> = self.graph.nodes().iter().map(|n| refs(&n.params)).collect();
        let mut cx = Cx::recording(Mode::Train, RunKey { samples: (0..BATCH as u64).collect(), ..RunKey::default() });
        let mut values: HashMap<Value, Var> = HashMap::new();
        for (i, node) in self.graph.nodes().iter().enumerate() {
            let y = match &node.kind {
                NodeKind::Input => {
                    let field = if node.name == "image" { &image } else { &label };
                    vec![cx.input(field.clone(), false)]
                }
                NodeKind::Total => continue,
                NodeKind::Layer(layer) => {
                    cx.enter(Scope { node: &node.name, index: i, params: &per_node[i], state: &self.state[i] });
                    let x: Vec<Var> = node.inputs.iter().map(|v| values[v].clone()).collect();
                    layer.forward(&mut cx, &x)?.all()
                }
            };
            values.extend(y.into_iter().enumerate().map(|(output, v)| (Value { node: i, output }, v)));
        }
        let loss = values[&Value { node: self.graph.loss_node().expect("a loss"), output: 0 }].clone();
        let seed = Tensor::full(1.0 / BATCH as f64, loss.shape(), loss.value().dtype(), loss.value().device())?;
        let (tape, stats) = cx.finish();
        let mut grads = Grads::default();
        tape.expect("a tape").backward(&[(&loss, seed)], &mut grads)?;
        for (p, w) in self.params.iter_mut().enumerate() {
            let t = t as u64;
            optimizer.update(t, optimizer.rate(t), w, &grads.take(p).expect("a gradient"), &mut self.moments[p])?;
        }
        for s in stats {
            let momentum = self.graph.nodes()[s.node].state[s.state].momentum;
            let state = &mut self.state[s.node][s.state];
            *state = state.add(&s.value.sub(state)?.affine(momentum, 0.0)?)?;
        }
        Ok(loss.value().item()? / BATCH as f64)
    }
}

fn compare(name: &str, optimizer: &dyn Optimizer) -> Result<()> {
    for (dtype, tolerance) in [(DType::F64, 1e-9), (DType::F32, 1e-5)] {
        let golden = Golden::read(&format!("{name}_{dtype}"));
        for device in [Device::reference(), Device::cpu(1)?] {
            let mut run = Training::new(&golden, optimizer, dtype, &device)?;
            let mut losses = Vec::new();
            for t in 0..10 {
                losses.push(run.step(t, batch(t, dtype, &device)?, optimizer)?);
            }
            let check = |what: &str, want: &[f64], got: &[f64]| {
                let off = off(want, got);
                assert!(off <= tolerance, "{name} {dtype} on {device:?}: {what} is off by {off:e}");
            };
            check("losses", golden.values("losses"), &losses);
            for (p, w) in run.graph.params().iter().zip(&run.params) {
                check(&p.name, golden.values(&format!("end.{}", p.name)), &w.to_f64()?);
            }
            for (n, state) in run.graph.nodes().iter().zip(&run.state) {
                for (s, t) in n.state.iter().zip(state) {
                    let name = format!("{}.{}", n.name, s.name);
                    check(&name, golden.values(&format!("end.{name}")), &t.to_f64()?);
                }
            }
        }
    }
    Ok(())
}

#[test]
fn sgd_with_momentum_and_decay() -> Result<()> {
    compare("sgd", &Sgd::new(0.05).momentum(0.9).decay(0.01))
}

#[test]
fn nesterov() -> Result<()> {
    compare("nesterov", &Sgd::new(0.05).momentum(0.9).decay(0.01).nesterov(true))
}

#[test]
fn adam() -> Result<()> {
    compare("adam", &Adam::new(0.01).decay(0.01))
}

#[test]
fn adamw() -> Result<()> {
    compare("adamw", &Adam::adamw(0.01).decay(0.1))
}
