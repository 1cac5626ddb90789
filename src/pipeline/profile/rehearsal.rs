//! A training step of neighbouring nodes, timed node by node.
//!
//! Each node has a tape of its own, but all run as in a real step: forward in order, backward in reverse, then the update. So
//! every node meets its operands where a real step has them, just made or long gone from the caches, which one node repeated
//! alone would not.
use super::NodeCost;
use crate::{
    Context, Error, Result,
    autograd::{Cx, Grads, Mode, ParamRef, RunKey, Scope, Tape, Var},
    layers::{Graph, Layer, NodeId, NodeKind, ParamId, Value},
    optim::Optimizer,
    pipeline::{
        schedule::Read,
        weights::{Pace, Weights},
    },
    tensor::{DType, Device, Philox, Tensor},
};
use std::{
    collections::{BTreeMap, HashMap},
    ops::Range,
};

/// A forward pass of a node that awaits its backward pass.
struct Flight {
    tape: Tape,
    inputs: Vec<Var>,
    outputs: Vec<Var>,
}

/// Neighbouring nodes set up to be run.
pub(super) struct Rehearsal<'a> {
    graph: &'a Graph,
    optimizer: &'a dyn Optimizer,
    device: &'a Device,
    nodes: Range<NodeId>,
    weights: Weights,
    states: BTreeMap<NodeId, Vec<Tensor>>,
    /// The gradients of all steps: what those of a step are folded onto.
    sum: Grads,
    /// Values that come from elsewhere.
    sources: HashMap<Value, Tensor>,
    key: RunKey,
    /// Names and sizes, without times.
    sizes: Vec<NodeCost>,
}

impl<'a> Rehearsal<'a> {
    /// With weights as a run begins with. Values from elsewhere are drawn at random; ids are zeros, which every vocabulary has.
    pub(super) fn new(
        graph: &'a Graph,
        nodes: Range<NodeId>,
        samples: usize,
        optimizer: &'a dyn Optimizer,
        dtype: DType,
        device: &'a Device,
    ) -> Result<Rehearsal<'a>> {
        let all: Vec<NodeId> = nodes.clone().collect();
        let weights = Weights::new(graph, &all, optimizer, 0, dtype, device)?;
        let (mut states, mut sources) = (BTreeMap::new(), HashMap::new());
        let mut sizes = Vec::new();
        for n in nodes.clone() {
            let node = &graph.nodes()[n];
            let mut size = NodeCost { node: node.name.clone(), ..NodeCost::default() };
            if graph.is_layer(n) {
                let state = (0..node.state.len()).map(|i| graph.init_state(n, i, dtype, device));
                states.insert(n, state.collect::<Result<_>>()?);
                for &v in node.inputs.iter().filter(|v| !nodes.contains(&v.node) || !graph.is_layer(v.node)) {
                    let (d, shape) = graph.shape(v, samples, dtype);
                    let made_up = match d.is_float() {
                        true => device.normal(Philox::new(v.node as u64, 0, "profile"), 1.0, &shape, d)?,
                        false => Tensor::zeros(&shape, d, device)?,
                    };
                    sources.insert(v, made_up);
                }
                let bytes = |output| {
                    let (d, shape) = graph.shape(Value { node: n, output }, samples, dtype);
                    shape.iter().product::<usize>() * d.size()
                };
                size.output_bytes = (0..graph.output_count(n)).map(bytes).sum();
                let held = weights.held().iter().filter(|w| node.params.contains(&w.id));
                size.param_bytes = held.map(|w| w.tensor.byte_len()).sum();
            }
            sizes.push(size);
        }
        let key = RunKey { samples: (0..samples as u64).collect(), ..RunKey::default() };
        let sum = Grads::default();
        Ok(Rehearsal { graph, optimizer, device, nodes, weights, states, sum, sources, key, sizes })
    }

    /// One training step: what each node costs, in time by `clock`.
    pub(super) fn run(&mut self, clock: &dyn Fn() -> f64) -> Result<Vec<NodeCost>> {
        let mut costs = self.sizes.clone();
        let flights = self.forward(clock, &mut costs)?;
        let grads = self.backward(flights, clock, &mut costs)?;
        let start = clock();
        self.sum.fold(grads)?;
        let middle = clock();
        self.weights.step(self.optimizer, self.sum.clone(), Pace::default(), false)?;
        let (fold, update) = (middle - start, clock() - middle);
        // Of both each node has as much as it has of what is learned.
        let learned: Vec<usize> = self.nodes.clone().map(|n| self.learned_bytes(n)).collect();
        let all = learned.iter().sum::<usize>().max(1) as f64;
        for (cost, bytes) in costs.iter_mut().zip(learned) {
            let part = bytes as f64 / all;
            (cost.fold, cost.update) = (fold * part, update * part);
        }
        Ok(costs)
    }

    fn forward(&self, clock: &dyn Fn() -> f64, costs: &mut [NodeCost]) -> Result<Vec<(NodeId, Flight)>> {
        let params = self.weights.read(Read::Current)?;
        let mut values = self.sources.clone();
        let mut flights = Vec::new();
        for (cost, n) in costs.iter_mut().zip(self.nodes.clone()) {
            let NodeKind::Layer(layer) = &self.graph.nodes()[n].kind else { continue };
            let start = clock();
            let flight = self.forward_node(n, &**layer, &params, &mut values).context(|| self.place(n))?;
            cost.forward = clock() - start;
            cost.saved_bytes = flight.tape.saved_bytes();
            flights.push((n, flight));
        }
        Ok(flights)
    }

    fn forward_node(
        &self,
        n: NodeId,
        layer: &dyn Layer,
        params: &BTreeMap<NodeId, Vec<ParamRef>>,
        values: &mut HashMap<Value, Tensor>,
    ) -> Result<Flight> {
        let node = &self.graph.nodes()[n];
        let mut cx = Cx::recording(Mode::Train, self.key.clone());
        let params = params.get(&n).map_or(&[][..], Vec::as_slice);
        let state = self.states.get(&n).map_or(&[][..], Vec::as_slice);
        cx.enter(Scope { node: &node.name, index: n, params, state });
        let mut inputs = Vec::new();
        for v in &node.inputs {
            let x = values.get(v).ok_or_else(|| Error::graph("an input is missing"))?;
            inputs.push(cx.input(x.clone(), self.graph.needs_grad(*v)));
        }
        let outputs = layer.forward(&mut cx, &inputs)?.all();
        let tape = cx.finish().0.ok_or_else(|| Error::graph("nothing was recorded"))?;
        for (output, var) in outputs.iter().enumerate() {
            values.insert(Value { node: n, output }, var.value().clone());
        }
        // Free at last use, as in a run.
        for v in node.inputs.iter().filter(|&&v| self.graph.consumers(v).last() == Some(&n)) {
            values.remove(v);
        }
        let names = |vars: Vec<Var>| vars.iter().map(Var::without_value).collect();
        Ok(Flight { tape, inputs: names(inputs), outputs: names(outputs) })
    }

    fn backward(
        &self,
        flights: Vec<(NodeId, Flight)>,
        clock: &dyn Fn() -> f64,
        costs: &mut [NodeCost],
    ) -> Result<Grads> {
        let mut came: HashMap<Value, Tensor> = HashMap::new();
        let mut grads = Grads::default();
        for (n, flight) in flights.into_iter().rev() {
            let mut seeds = Vec::new();
            for (output, var) in flight.outputs.iter().enumerate().filter(|(_, var)| var.needs_grad()) {
                let gradient = match came.remove(&Value { node: n, output }) {
                    Some(gradient) => gradient,
                    // A loss, or what goes elsewhere.
                    None => Tensor::full(self.scale(), var.shape(), var.value().dtype(), self.device)?,
                };
                seeds.push((var, gradient));
            }
            let cost = &mut costs[n - self.nodes.start];
            let start = clock();
            let (mut of_inputs, weights) = flight.tape.backward_input(&seeds).context(|| self.place(n))?;
            drop(seeds);
            for (&v, var) in self.graph.nodes()[n].inputs.iter().zip(&flight.inputs) {
                let Some(gradient) = of_inputs.take(var).filter(|_| self.nodes.contains(&v.node)) else { continue };
                match came.get_mut(&v) {
                    Some(sum) => sum.accumulate(&gradient)?,
                    None => _ = came.insert(v, gradient),
                }
            }
            let middle = clock();
            weights.run(&mut grads).context(|| self.place(n))?;
            cost.input_grad = middle - start;
            cost.weight_grad = clock() - middle;
        }
        Ok(grads)
    }

    fn learned_bytes(&self, n: NodeId) -> usize {
        let params = &self.graph.nodes()[n].params;
        let learned = |id: &&ParamId| self.graph.params()[**id].spec.trainable;
        let bytes = |id: &ParamId| self.weights.current(*id).map_or(0, |t| t.byte_len());
        params.iter().filter(learned).map(bytes).sum()
    }

    /// The gradient of a mean over the samples.
    fn scale(&self) -> f64 {
        1.0 / self.key.samples.len() as f64
    }

    fn place(&self, n: NodeId) -> String {
        format!("profile of node {:?}", self.graph.nodes()[n].name)
    }
}
