//! A training pass over a whole graph as a plain loop, without stages.
use pipewright::{
    Result,
    autograd::{Cx, Grads, Mode, ParamRef, RunKey, Scope, Var},
    layers::*,
    tensor::{DType, Tensor},
    train::Minibatch,
};
use std::{collections::HashMap, sync::Arc};

/// The mean loss of a minibatch and its gradients, parameter by parameter, at the weights that `weight` gives; the graph has no state.
/// Dropout draws from seed 7.
pub fn pass(g: &Graph, data: &Minibatch, weight: &dyn Fn(usize) -> Tensor) -> Result<(f64, Vec<Tensor>)> {
    let batch = data.batch.as_ref().expect("data");
    let samples = data.ids.len() as f64;
    let key = RunKey { seed: 7, step: data.number, samples: Arc::from(&data.ids[..]) };
    let mut cx = Cx::recording(Mode::Train, key);
    let param = |&p: &usize| ParamRef { tensor: weight(p), id: p, slot: p, trainable: true };
    let params: Vec<Vec<ParamRef>> = g.nodes().iter().map(|n| n.params.iter().map(param).collect()).collect();
    let mut values: HashMap<Value, Var> = HashMap::new();
    for (i, node) in g.nodes().iter().enumerate() {
        let outputs = match &node.kind {
            NodeKind::Input => vec![cx.input(batch.field(&node.name)?.clone(), false)],
            NodeKind::Total => continue,
            NodeKind::Layer(layer) => {
                cx.enter(Scope { node: &node.name, index: i, params: &params[i], state: &[] });
                let x: Vec<Var> = node.inputs.iter().map(|v| values[v].clone()).collect();
                layer.forward(&mut cx, &x)?.all()
            }
        };
        values.extend(outputs.into_iter().enumerate().map(|(output, v)| (Value { node: i, output }, v)));
    }
    let loss = values[&Value { node: g.loss_node().expect("a loss"), output: 0 }].clone();
    let mean = loss.value().item()? / samples;
    let seed = Tensor::full(1.0 / samples, &[], DType::F64, loss.value().device())?;
    let mut grads = Grads::default();
    cx.finish().0.expect("a tape").backward(&[(&loss, seed)], &mut grads)?;
    Ok((mean, (0..g.params().len()).map(|p| grads.take(p).expect("a gradient")).collect()))
}
