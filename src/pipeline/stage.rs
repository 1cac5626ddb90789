//! One stage on one worker: its weights, the micro-batches in flight, and what an instruction does with them.
mod sums;
mod task;

pub use task::{Forward, Measured, Ports, Setup, Task, Wire};

use super::{
    plan::{Edge, Plan},
    reduce::{Held, Reducer, Server},
    schedule::{MicroBatch, Read, Version, WeightPolicy},
    weights::{Pace, Weights},
};
use crate::{
    Context, Error, Result,
    autograd::{Cx, Grads, InputGrads, Mode, Scope, Stat, Tape, Var, WeightPass},
    layers::{Graph, NodeId, NodeKind, Value},
    optim::Optimizer,
    tensor::{Device, Tensor},
};
use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

/// A forward pass that awaits its backward pass.
struct Flight {
    tape: Tape,
    /// The version of the weights that it read.
    version: Version,
    /// For each edge that ends here and wants a gradient: the variables that stand for it, last consumer first.
    inputs: Vec<(usize, Vec<Var>)>,
    /// The values that a gradient will come back for.
    outputs: HashMap<Value, Var>,
    loss: Option<(Var, Tensor)>,
    stats: Vec<Stat>,
}

/// A stage of a plan with all that it holds.
pub struct Stage {
    graph: Arc<Graph>,
    index: usize,
    nodes: Vec<NodeId>,
    device: Device,
    weights: Weights,
    state: BTreeMap<NodeId, Vec<Tensor>>,
    optimizer: Arc<dyn Optimizer>,
    policy: WeightPolicy,
    flight: HashMap<MicroBatch, Flight>,
    later: HashMap<MicroBatch, WeightPass>,
    /// Which replica of the stage this is.
    replica: Replica,
    /// The left fold of gradients over this replica's micro-batches before `next` since the last update; others wait in `early`.
    grads: Grads,
    next: MicroBatch,
    early: BTreeMap<MicroBatch, Grads>,
    /// With other replicas: their sums.
    reducer: Option<Reducer>,
    /// Or their updates, where these do not wait for each other.
    server: Option<Server>,
    /// Where the next update's micro-batches begin.
    update_from: MicroBatch,
    pace: Pace,
    stats: BTreeMap<MicroBatch, Vec<Stat>>,
    most_versions: usize,
    /// Of the micro-batches that the next step covers: the oldest version read.
    oldest_read: Option<Version>,
    staleness: usize,
}

/// One of the workers of a stage.
#[derive(Clone, Copy, Debug)]
struct Replica {
    index: usize,
    of: usize,
    /// Whether the gradients of its micro-batches stay apart until they are summed over all workers, so that they are added in
    /// the order in which one worker adds them.
    apart: bool,
}

impl Stage {
    /// Stage `index` of `plan` on `worker`, with its first weights.
    ///
    /// # Errors
    /// If the plan has no such stage, or not on that worker; if there is no memory.
    pub fn new(setup: &Setup, plan: &Plan, index: usize, worker: usize, device: &Device) -> Result<Stage> {
        let of_plan = plan.stages().get(index);
        let place = of_plan.and_then(|s| Some((s, s.workers.iter().position(|&w| w == worker)?)));
        let (of_plan, me) =
            place.ok_or_else(|| Error::plan(format!("the plan has no stage {index} on worker {worker}")))?;
        let (nodes, of) = (of_plan.nodes.clone(), of_plan.workers.len());
        let graph = setup.graph.clone();
        let weights = Weights::new(&graph, &nodes, &*setup.optimizer, setup.seed, setup.dtype, device)?;
        let place = (index, &of_plan.workers[..], me);
        let reducer = (of > 1 && !setup.asp).then(|| setup.reducer(place, &weights.slots(), device)).transpose()?;
        let replica = Replica { index: me, of, apart: of > 1 && setup.keeps_apart() };
        let readers = plan.stages()[0].workers.len();
        let factor = if setup.rounds && setup.scale_rate { of as f64 / readers as f64 } else { 1.0 };
        let round = Pace { minibatches: 1, round: if setup.rounds { of as u64 } else { 1 }, factor };
        let pace = if setup.asp { Pace::default() } else { round };
        let mut state = BTreeMap::new();
        for &n in &nodes {
            let of_node = (0..graph.nodes()[n].state.len()).map(|i| graph.init_state(n, i, setup.dtype, device));
            state.insert(n, of_node.collect::<Result<Vec<_>>>()?);
        }
        let stats = state.values().flatten().map(Tensor::len).sum();
        let server = (of > 1 && setup.asp).then(|| Server::new(place, &weights, stats, device));
        Ok(Stage {
            graph,
            index,
            nodes,
            device: device.clone(),
            weights,
            state,
            optimizer: setup.optimizer.clone(),
            policy: setup.policy,
            flight: HashMap::new(),
            later: HashMap::new(),
            replica,
            grads: Grads::default(),
            next: me,
            early: BTreeMap::new(),
            reducer,
            server,
            update_from: 0,
            pace,
            stats: BTreeMap::new(),
            most_versions: 1,
            oldest_read: None,
            staleness: 0,
        })
    }

    /// Its position in the plan.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Its weights.
    pub fn weights(&self) -> &Weights {
        &self.weights
    }

    /// Its weights, to be loaded.
    pub fn weights_mut(&mut self) -> &mut Weights {
        &mut self.weights
    }

    /// The state of its nodes with names `node/state`.
    pub fn states(&self) -> impl Iterator<Item = (String, &Tensor)> {
        let name =
            |n: NodeId, i: usize| format!("{}/{}", self.graph.nodes()[n].name, self.graph.nodes()[n].state[i].name);
        self.state.iter().flat_map(move |(&n, s)| s.iter().enumerate().map(move |(i, t)| (name(n, i), t)))
    }

    /// The state of its nodes, to be loaded, in the order of [`states`](Stage::states).
    pub fn states_mut(&mut self) -> impl Iterator<Item = &mut Tensor> {
        self.state.values_mut().flatten()
    }

    /// The most versions of a weight that were held at once.
    pub fn most_versions(&self) -> usize {
        self.most_versions
    }

    /// The most updates that lay between a gradient's weights and those that it updated.
    pub fn staleness(&self) -> usize {
        let served = self.server.as_ref().map_or(0, Server::staleness);
        self.staleness.max(served as usize)
    }

    /// The pipeline is empty and begins anew with micro-batch 0.
    ///
    /// # Errors
    /// If something is still in flight.
    pub fn restart(&mut self) -> Result<()> {
        let left = self.flight.len() + self.later.len() + self.early.len() + self.stats.len();
        if left > 0 {
            return Err(Error::schedule(format!("stage {}: {left} micro-batches are still in flight", self.index)));
        }
        (self.next, self.update_from) = (self.replica.index, 0);
        self.weights.restart()
    }

    /// F: runs the nodes with the weights that `read` names; in training, what B needs stays in flight.
    pub fn forward(&mut self, mb: MicroBatch, read: Read, task: Task) -> Result<Forward> {
        let params = self.weights.read(read)?;
        let train = task.mode == Mode::Train;
        let mut cx =
            if train { Cx::recording(task.mode, task.key.clone()) } else { Cx::inference(task.mode, task.key.clone()) };
        if self.policy == WeightPolicy::Current {
            cx = cx.without_stashing();
        }
        let ran = self.run(&mut cx, &params, &task, None)?;
        let value = |v: &Value| ran.values.get(v).map(|x| x.value().clone());
        let mut sends = Vec::new();
        for (at, edge) in &task.ports.outputs {
            let t = value(&edge.value).ok_or_else(|| Error::graph(format!("no value for edge {at}")))?;
            sends.push((*at, t.contiguous()?));
        }
        let (mut loss, mut measured) = (None, None);
        if let Some(node) = self.graph.loss_node().filter(|n| self.nodes.contains(n) && wants(&task, *n)) {
            let total = self.total(&task)?;
            let output = |output: usize| ran.values.get(&Value { node, output });
            let sum = output(0).ok_or_else(|| Error::graph("the loss returned nothing"))?;
            let correct = output(1).map(|v| v.value().item()).transpose()?;
            measured = Some(Measured { mb, loss: sum.value().item()?, total, correct });
            // A minibatch whose labels are all ignored teaches nothing.
            let scale = if total > 0.0 { 1.0 / total } else { 0.0 };
            let seed = Tensor::full(scale, sum.shape(), sum.value().dtype(), sum.value().device())?;
            loss = Some((sum.without_value(), seed));
        }
        let finite = measured.is_none_or(|m| m.loss.is_finite());
        if !finite || !all_finite(sends.iter().map(|(_, t)| t))? {
            return Err(self.first_not_finite(&params, &task)?);
        }
        let mut asked = Vec::new();
        for v in task.ask.iter().filter(|v| self.nodes.contains(&v.node)) {
            asked.push((*v, value(v).ok_or_else(|| Error::graph("a value that was asked for was not computed"))?));
        }
        if train {
            let outputs = task.ports.outputs.iter().filter(|(_, e)| e.needs_grad).map(|(_, e)| e.value);
            let outputs = outputs.filter_map(|v| Some((v, ran.values.get(&v)?.without_value()))).collect();
            let inputs =
                ran.inputs.into_iter().map(|(at, vars)| (at, vars.iter().map(Var::without_value).collect())).collect();
            let (tape, stats) = cx.finish();
            let tape = tape.ok_or_else(|| Error::graph("a training pass has a tape"))?;
            let version = if let Read::At(v) = read { v } else { self.weights.version() };
            self.flight.insert(mb, Flight { tape, version, inputs, outputs, loss, stats });
            self.count_versions();
        }
        Ok(Forward { sends, measured, asked })
    }

    fn count_versions(&mut self) {
        let stashed = self.flight.values().flat_map(|f| f.tape.stashed());
        self.most_versions = self.most_versions.max(self.weights.versions(stashed));
    }

    fn total(&self, task: &Task) -> Result<f64> {
        let node = self.graph.total_node().ok_or_else(|| Error::graph("the graph has no loss"))?;
        let here = task.sources.get(&node);
        let came =
            task.ports.inputs.iter().find(|(_, e)| e.value.node == node).and_then(|(at, _)| task.arrived.get(at));
        here.or(came).ok_or_else(|| Error::graph("the minibatch's total weight did not come"))?.item()
    }

    /// Runs the nodes in order. `visit` sees each node's outputs; it makes the rest of the pass end early with an error.
    fn run<'w>(
        &'w self,
        cx: &mut Cx<'w>,
        params: &'w BTreeMap<NodeId, Vec<crate::autograd::ParamRef>>,
        task: &Task,
        mut visit: Option<Visit>,
    ) -> Result<Ran> {
        let graph = &*self.graph;
        let mut ran = Ran { inputs: Vec::new(), values: HashMap::new() };
        // A consumer of its own variable where its gradient must come back apart from the others'.
        let mut own: HashMap<(Value, NodeId), Var> = HashMap::new();
        for (at, edge) in &task.ports.inputs {
            let t = task.arrived.get(at).ok_or_else(|| Error::schedule(format!("edge {at} has not arrived")))?;
            if edge.folded || !edge.needs_grad {
                let var = cx.input(t.clone(), edge.needs_grad);
                ran.values.insert(edge.value, var.clone());
                if edge.needs_grad {
                    ran.inputs.push((*at, vec![var]));
                }
                continue;
            }
            let vars: Vec<Var> = edge.consumers.iter().rev().map(|_| cx.input(t.clone(), true)).collect();
            own.extend(edge.consumers.iter().rev().map(|&n| (edge.value, n)).zip(vars.iter().cloned()));
            ran.inputs.push((*at, vars));
        }
        for &n in self.nodes.iter().filter(|&&n| wants(task, n)) {
            let node = &graph.nodes()[n];
            let layer = match &node.kind {
                NodeKind::Layer(layer) => layer,
                _ => {
                    if let Some(t) = task.sources.get(&n) {
                        ran.values.insert(Value { node: n, output: 0 }, cx.input(t.clone(), false));
                    }
                    continue;
                }
            };
            let place = || format!("node {:?}", node.name);
            let mut x = Vec::new();
            for v in &node.inputs {
                let var = match own.get(&(*v, n)) {
                    Some(var) => var.clone(),
                    None => {
                        let var = ran.values.get(v).ok_or_else(|| {
                            Error::graph(format!("its input {:?} is missing", graph.nodes()[v.node].name))
                                .context(place())
                        })?;
                        // One gradient per consumer node, whatever the node does with the value (NUMERICS.md, rule 3).
                        if graph.consumers(*v).len() > 1 { cx.alias(&var.clone())? } else { var.clone() }
                    }
                };
                x.push(var);
            }
            let none: &[crate::autograd::ParamRef] = &[];
            cx.enter(Scope {
                node: &node.name,
                index: n,
                params: params.get(&n).map_or(none, Vec::as_slice),
                state: self.state.get(&n).map_or(&[], Vec::as_slice),
            });
            let outputs = layer.forward(cx, &x).context(place)?.all();
            drop(x);
            if let Some(visit) = &mut visit {
                visit(n, &outputs)?;
            }
            for (output, var) in outputs.into_iter().enumerate() {
                ran.values.insert(Value { node: n, output }, var);
            }
            // Free at last use.
            let is_read_later = |v: &Value| {
                let leaves = task.ports.outputs.iter().any(|(_, e)| e.value == *v) || task.ask.contains(v);
                leaves || graph.consumers(*v).iter().any(|&c| c > n)
            };
            for v in &node.inputs {
                if !is_read_later(v) {
                    ran.values.remove(v);
                }
            }
        }
        Ok(ran)
    }

    /// Runs the nodes once more to find the first whose result is not finite.
    fn first_not_finite(
        &self,
        params: &BTreeMap<NodeId, Vec<crate::autograd::ParamRef>>,
        task: &Task,
    ) -> Result<Error> {
        // Of an evaluation or a prediction only who asked for it knows when it was.
        let step = if task.mode == Mode::Train { format!("step {}: ", task.key.step) } else { String::new() };
        let say = |what: String| Error::numeric(format!("{step}{what}"));
        for (at, edge) in &task.ports.inputs {
            if task.arrived.get(at).is_some_and(|t| !t.all_finite().unwrap_or(true)) {
                let node = &self.graph.nodes()[edge.value.node].name;
                return Ok(say(format!("the value of {node:?} came with a number that is not finite")));
            }
        }
        let mut cx = Cx::inference(task.mode, task.key.clone());
        let mut visit = |n: NodeId, outputs: &[Var]| {
            let name = &self.graph.nodes()[n].name;
            for p in params.get(&n).into_iter().flatten() {
                if !p.tensor.all_finite()? {
                    let param = &self.graph.params()[p.id].name;
                    return Err(say(format!("the weight {param:?} is not finite, so {name:?} is not")));
                }
            }
            if all_finite(outputs.iter().map(Var::value))? {
                Ok(())
            } else {
                Err(say(format!("{name:?} is the first layer whose result is not finite")))
            }
        };
        let found = self.run(&mut cx, params, task, Some(&mut visit));
        Ok(found.err().unwrap_or_else(|| say(format!("stage {} gave a number that is not finite", self.index))))
    }

    /// B or (with `split`) I: gradients for the edges that end here, given those of the edges that begin here. With `wire` B tells
    /// the other workers of the stage of its gradients as they are made.
    pub fn backward(
        &mut self,
        mb: MicroBatch,
        ports: &Ports,
        mut arrived: HashMap<usize, Tensor>,
        split: bool,
        wire: Option<Wire>,
    ) -> Result<Vec<(usize, Tensor)>> {
        let mut f =
            self.flight.remove(&mb).ok_or_else(|| Error::schedule(format!("micro-batch {mb} is not in flight")))?;
        // The last stage's gradient first, so that a value's gradients are folded in descending order of its consumers.
        let mut seeds: Vec<(&Var, Tensor)> = Vec::new();
        for (at, edge) in ports.outputs.iter().rev().filter(|(_, e)| e.needs_grad) {
            let g = arrived
                .remove(at)
                .ok_or_else(|| Error::schedule(format!("the gradient of edge {at} has not arrived")))?;
            let var = f.outputs.get(&edge.value).ok_or_else(|| Error::graph(format!("edge {at} has no variable")))?;
            match edge.stacked() {
                1 => seeds.push((var, g)),
                k => {
                    for i in 0..k {
                        seeds.push((var, g.slice(0, i, 1)?.reshape(var.shape())?));
                    }
                }
            }
        }
        seeds.extend(f.loss.as_ref().map(|(var, seed)| (var, seed.clone())));
        if self.policy == WeightPolicy::Current {
            let weights = &self.weights;
            f.tape.resolve(&|id| weights.current(id));
        }
        let mut grads = if split {
            let (grads, weight_pass) = f.tape.backward_input(&seeds)?;
            self.later.insert(mb, weight_pass);
            grads
        } else {
            let mut out = self.begin_grads(mb);
            let grads = match (wire, &mut self.reducer, &mut self.server) {
                (Some(Wire { transport, samples }), Some(reducer), _) => {
                    f.tape.backward_telling(&seeds, &mut out, &mut |slot, grad| {
                        reducer.offer(transport, (mb, samples), slot, grad)
                    })?
                }
                (Some(Wire { transport, .. }), None, Some(server)) => {
                    let mut held = Held { weights: &mut self.weights, optimizer: &*self.optimizer };
                    let mut serve = |_: usize, _: &Tensor| server.serve(transport, &mut held).map(|_| ());
                    f.tape.backward_telling(&seeds, &mut out, &mut serve)?
                }
                _ => f.tape.backward(&seeds, &mut out)?,
            };
            self.end_grads(mb, out)?;
            grads
        };
        self.stats.insert(mb, f.stats);
        self.oldest_read = Some(self.oldest_read.map_or(f.version, |v| v.min(f.version)));
        let mut sends = Vec::new();
        for (at, vars) in &f.inputs {
            let (_, edge) = ports.inputs.iter().find(|(i, _)| i == at).ok_or_else(|| Error::graph("unknown edge"))?;
            sends.push((*at, self.input_grad(edge, vars, &mut grads)?));
        }
        Ok(sends)
    }

    fn input_grad(&self, edge: &Edge, vars: &[Var], grads: &mut InputGrads) -> Result<Tensor> {
        let one = |v: &Var, grads: &mut InputGrads| match grads.take(v) {
            Some(g) => g.contiguous(),
            // Nothing in this stage depends on it; the maker of the value still awaits a message.
            None => Tensor::zeros(v.shape(), v.value().dtype(), &self.device),
        };
        match vars {
            [v] => one(v, grads),
            _ => {
                let mut parts = Vec::new();
                for v in vars {
                    parts.push(one(v, grads)?.reshape(&[&[1], v.shape()].concat())?);
                }
                debug_assert_eq!(parts.len(), edge.stacked());
                Tensor::concat(&parts, 0)
            }
        }
    }

    /// W: the weights' gradients of a micro-batch whose I is done.
    pub fn weight(&mut self, mb: MicroBatch) -> Result<()> {
        let pass = self
            .later
            .remove(&mb)
            .ok_or_else(|| Error::schedule(format!("micro-batch {mb} has no weight gradient pending")))?;
        let mut out = self.begin_grads(mb);
        pass.run(&mut out)?;
        self.end_grads(mb, out)
    }

    /// Where the gradients of `mb` go: onto the sum if it is next in order, else apart.
    fn begin_grads(&mut self, mb: MicroBatch) -> Grads {
        if self.is_next(mb) { std::mem::take(&mut self.grads) } else { Grads::default() }
    }

    fn is_next(&self, mb: MicroBatch) -> bool {
        mb == self.next && !self.replica.apart
    }

    fn end_grads(&mut self, mb: MicroBatch, grads: Grads) -> Result<()> {
        if !self.is_next(mb) {
            self.early.insert(mb, grads);
            return Ok(());
        }
        self.grads = grads;
        self.next += self.replica.of;
        while let Some(next) = self.early.remove(&self.next) {
            self.grads.fold(next)?;
            self.next += self.replica.of;
        }
        Ok(())
    }

    /// Step: one update, and the running statistics of the micro-batches that it covers, in their order.
    pub fn step(&mut self, keep: bool) -> Result<()> {
        if !self.early.is_empty() {
            return Err(Error::schedule(format!("a step before the gradient of micro-batch {}", self.next)));
        }
        if let Some(read) = self.oldest_read.take() {
            self.staleness = self.staleness.max(self.weights.version() - read);
        }
        if self.server.is_some() {
            // Each gradient was an update of its own.
            self.weights.count_update();
        } else {
            let grads = std::mem::take(&mut self.grads);
            self.weights.step(&*self.optimizer, grads, self.pace, keep)?;
        }
        self.take_running_stats()?;
        self.count_versions();
        Ok(())
    }

    /// Folds the statistics of micro-batches into the running ones, in their order.
    fn take_running_stats(&mut self) -> Result<()> {
        for stat in std::mem::take(&mut self.stats).into_values().flatten() {
            let momentum = self.graph.nodes()[stat.node].state[stat.state].momentum;
            let state = self.state.get_mut(&stat.node).and_then(|s| s.get_mut(stat.state));
            let state = state.ok_or_else(|| Error::graph("a statistic without state"))?;
            // s ← s + momentum·(stat − s)
            let change = stat.value.sub(state)?;
            state.axpy(momentum, &change)?;
        }
        Ok(())
    }

    /// Drops a version that a step kept.
    pub fn free(&mut self, version: Version) -> Result<()> {
        self.weights.free(version)
    }
}

/// Sees the outputs of each node; an error ends the pass.
type Visit<'v> = &'v mut dyn FnMut(NodeId, &[Var]) -> Result<()>;

struct Ran {
    inputs: Vec<(usize, Vec<Var>)>,
    values: HashMap<Value, Var>,
}

fn wants(task: &Task, n: NodeId) -> bool {
    task.wanted.is_none_or(|w| w[n])
}

fn all_finite<'a>(mut tensors: impl Iterator<Item = &'a Tensor>) -> Result<bool> {
    tensors.try_fold(true, |ok, t| Ok(ok && t.all_finite()?))
}
