//! What each node of a graph costs: measured, or estimated from operation counts.
use crate::{
    Context, Error, Result,
    autograd::{Cx, Grads, Mode, ParamRef, RunKey, Scope, Tape, Var},
    layers::{Graph, Node, NodeId, NodeKind, Value},
    tensor::{DType, Device, Philox, Tensor},
};
use serde::{Deserialize, Serialize};
use std::{collections::HashSet, path::Path, time::Instant};

/// The cost of one node for one micro-batch. Times in seconds, sizes in bytes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeCost {
    /// The node's name.
    pub node: String,
    /// F.
    pub forward: f64,
    /// I.
    pub input_grad: f64,
    /// W.
    pub weight_grad: f64,
    /// All outputs.
    pub output_bytes: usize,
    /// All parameters.
    pub param_bytes: usize,
    /// What is kept for the backward pass, parameters left out.
    pub saved_bytes: usize,
}

impl NodeCost {
    /// F and B.
    pub fn seconds(&self) -> f64 {
        self.forward + self.input_grad + self.weight_grad
    }
}

/// The costs of all nodes for micro-batches of one size.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sample {
    /// Samples of the micro-batch.
    pub micro_batch: usize,
    /// In the order of the graph.
    pub nodes: Vec<NodeCost>,
}

/// The costs of a graph at several sizes of the micro-batch (time is not linear in it).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// How many workers were busy at once on each core while it was taken: 1 where each had a core of its own.
    pub crowding: f64,
    /// By size, ascending.
    pub samples: Vec<Sample>,
}

/// Timings of one node before the median is taken.
const REPEATS: usize = 5;
/// Seconds after which a slow node is not repeated.
const BUDGET: f64 = 0.3;

/// More seconds than any node takes.
const LONGEST: f64 = 1e6;

/// The speed assumed where nothing may be measured: a core of today. Only ratios matter for the plan.
const FLOPS: f64 = 1e11;
const BYTES_PER_SECOND: f64 = 1e10;

impl Profile {
    /// Runs every node on `device` with micro-batches of each of `sizes`. `together` is called before each node, so that
    /// workers that share a machine are busy at the same time.
    pub fn measure(
        graph: &Graph,
        device: &Device,
        dtype: DType,
        sizes: &[usize],
        crowding: f64,
        together: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Profile> {
        let mut time = |node: NodeId, size: usize| -> Result<NodeCost> {
            together()?;
            let bench = Bench::new(graph, node, size, dtype, device)?;
            let start = Instant::now();
            // Not timed: the first run meets cold caches and an empty pool.
            let (_, saved_bytes) = bench.once()?;
            let mut runs = Vec::new();
            while runs.is_empty() || runs.len() < REPEATS && start.elapsed().as_secs_f64() < BUDGET {
                runs.push(bench.once()?.0);
            }
            let median = |i: usize| {
                let mut v: Vec<f64> = runs.iter().map(|r| r[i]).collect();
                v.sort_by(f64::total_cmp);
                v[v.len() / 2]
            };
            Ok(NodeCost {
                forward: median(0),
                input_grad: median(1),
                weight_grad: median(2),
                saved_bytes,
                ..bench.sizes()
            })
        };
        Profile::build(graph, sizes, crowding, &mut time)
    }

    /// Estimates from floating-point operations and bytes: the same on every machine.
    pub fn estimate(graph: &Graph, dtype: DType, sizes: &[usize]) -> Result<Profile> {
        let mut count = |node: NodeId, size: usize| -> Result<NodeCost> {
            let meta = Device::meta();
            let bench = Bench::new(graph, node, size, dtype, &meta)?;
            let seconds = |before: (u64, u64), after: (u64, u64)| {
                (after.0 - before.0) as f64 / FLOPS + (after.1 - before.1) as f64 / BYTES_PER_SECOND
            };
            let (counts, saved_bytes) = bench.counts()?;
            Ok(NodeCost {
                forward: seconds(counts[0], counts[1]),
                input_grad: seconds(counts[1], counts[2]),
                weight_grad: seconds(counts[2], counts[3]),
                saved_bytes,
                ..bench.sizes()
            })
        };
        Profile::build(graph, sizes, 1.0, &mut count)
    }

    fn build(
        graph: &Graph,
        sizes: &[usize],
        crowding: f64,
        cost: &mut dyn FnMut(NodeId, usize) -> Result<NodeCost>,
    ) -> Result<Profile> {
        let mut sizes: Vec<usize> = sizes.iter().map(|&s| s.max(1)).collect();
        sizes.sort_unstable();
        sizes.dedup();
        let mut samples = Vec::new();
        for &micro_batch in &sizes {
            let mut nodes = Vec::new();
            for (n, node) in graph.nodes().iter().enumerate() {
                let place = || format!("profile of node {:?}", node.name);
                nodes.push(match node.kind {
                    NodeKind::Layer(_) => cost(n, micro_batch).context(place)?,
                    _ => NodeCost { node: node.name.clone(), ..NodeCost::default() },
                });
            }
            samples.push(Sample { micro_batch, nodes });
        }
        Ok(Profile { crowding, samples })
    }

    /// The profile of several workers: the median of each time.
    ///
    /// # Errors
    /// If they are not of one graph and sizes.
    pub fn merge(all: &[Profile]) -> Result<Profile> {
        let first = all.first().ok_or_else(|| Error::plan("no profile to merge"))?;
        let mut merged = first.clone();
        for (s, sample) in merged.samples.iter_mut().enumerate() {
            for (n, node) in sample.nodes.iter_mut().enumerate() {
                let same = || {
                    all.iter()
                        .filter_map(|p| p.samples.get(s)?.nodes.get(n))
                        .filter(|c| c.node == first.samples[s].nodes[n].node)
                };
                if same().count() != all.len() {
                    return Err(Error::plan(format!(
                        "profiles of different graphs cannot be merged: node {:?}",
                        node.node
                    )));
                }
                let median = |f: fn(&NodeCost) -> f64| {
                    let mut v: Vec<f64> = same().map(f).collect();
                    v.sort_by(f64::total_cmp);
                    v[v.len() / 2]
                };
                node.forward = median(|c| c.forward);
                node.input_grad = median(|c| c.input_grad);
                node.weight_grad = median(|c| c.weight_grad);
            }
        }
        Ok(merged)
    }

    /// The costs of all nodes for micro-batches of `size` samples: between the two nearest sizes along a line, never negative.
    ///
    /// # Errors
    /// If the profile is empty.
    pub fn at(&self, size: usize) -> Result<Vec<NodeCost>> {
        let (Some(first), Some(last)) = (self.samples.first(), self.samples.last()) else {
            return Err(Error::plan("the profile is empty"));
        };
        let above = self.samples.iter().position(|s| s.micro_batch >= size).unwrap_or(self.samples.len() - 1);
        let (a, b) = if above == 0 {
            (first, self.samples.get(1).unwrap_or(last))
        } else {
            (&self.samples[above - 1], &self.samples[above])
        };
        let span = b.micro_batch as f64 - a.micro_batch as f64;
        // A single size scales in proportion.
        let line = |x: f64, y: f64| {
            let at = if span == 0.0 {
                x * size as f64 / a.micro_batch as f64
            } else {
                x + (y - x) * (size as f64 - a.micro_batch as f64) / span
            };
            at.max(0.0)
        };
        let bytes = |x: usize, y: usize| line(x as f64, y as f64).round() as usize;
        let cost = |(a, b): (&NodeCost, &NodeCost)| NodeCost {
            node: a.node.clone(),
            forward: line(a.forward, b.forward),
            input_grad: line(a.input_grad, b.input_grad),
            weight_grad: line(a.weight_grad, b.weight_grad),
            output_bytes: bytes(a.output_bytes, b.output_bytes),
            param_bytes: a.param_bytes,
            saved_bytes: bytes(a.saved_bytes, b.saved_bytes),
        };
        Ok(a.nodes.iter().zip(&b.nodes).map(cost).collect())
    }

    /// Reads a profile and checks that it is one of `graph`.
    ///
    /// # Errors
    /// If the file is not a profile, holds a number that is negative or not finite, or is of another graph.
    pub fn load(path: &Path, graph: &Graph) -> Result<Profile> {
        let text = std::fs::read_to_string(path).map_err(|e| Error::io(path, e))?;
        let place = || format!("{}", path.display());
        let profile: Profile =
            serde_json::from_str(&text).map_err(|e| Error::plan(format!("not a profile: {e}")).context(place()))?;
        profile.check(graph).context(place)?;
        Ok(profile)
    }

    fn check(&self, graph: &Graph) -> Result<()> {
        if self.samples.is_empty()
            || !self.samples.is_sorted_by(|a, b| a.micro_batch < b.micro_batch)
            || self.samples[0].micro_batch == 0
        {
            return Err(Error::plan("samples must ascend by micro_batch from 1 on"));
        }
        if !(self.crowding.is_finite() && self.crowding >= 1.0) {
            return Err(Error::plan(format!("crowding must be 1 or more, got {}", self.crowding)));
        }
        for sample in &self.samples {
            let place = || format!("micro-batch {}", sample.micro_batch);
            check_nodes(&sample.nodes, graph).context(place)?;
            for c in &sample.nodes {
                let times = [("forward", c.forward), ("input_grad", c.input_grad), ("weight_grad", c.weight_grad)];
                if let Some((what, t)) = times.iter().find(|(_, t)| !(0.0..=LONGEST).contains(t)) {
                    let node = &c.node;
                    return Err(Error::plan(format!("node {node:?}: {what} of {t} s; 0 to {LONGEST} expected"))
                        .context(place()));
                }
            }
        }
        Ok(())
    }

    /// Writes the profile as JSON.
    pub fn save(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self).map_err(|e| Error::plan(format!("profile: {e}")))?;
        std::fs::write(path, text).map_err(|e| Error::io(path, e))
    }
}

/// The nodes must be those of the graph, in its order.
fn check_nodes(nodes: &[NodeCost], graph: &Graph) -> Result<()> {
    let mut costs = HashSet::new();
    for c in nodes {
        if graph.find(&c.node).is_none() {
            return Err(Error::plan(format!("node {:?} is not in the model", c.node)));
        }
        if !costs.insert(&c.node) {
            return Err(Error::plan(format!("node {:?} stands there twice", c.node)));
        }
    }
    for (at, node) in graph.nodes().iter().enumerate() {
        if !costs.contains(&node.name) {
            return Err(Error::plan(format!("node {:?} of the model is missing", node.name)));
        }
        if nodes[at].node != node.name {
            let (want, got) = (&node.name, &nodes[at].node);
            return Err(Error::plan(format!("node {want:?} expected at place {at}, got {got:?}: another order")));
        }
    }
    Ok(())
}

/// One node set up to be run alone.
struct Bench<'a> {
    node: &'a Node,
    index: NodeId,
    params: Vec<ParamRef>,
    state: Vec<Tensor>,
    inputs: Vec<(Tensor, bool)>,
    samples: usize,
    output_bytes: usize,
}

impl Bench<'_> {
    fn new<'a>(graph: &'a Graph, index: NodeId, samples: usize, dtype: DType, device: &Device) -> Result<Bench<'a>> {
        let node = &graph.nodes()[index];
        let mut params = Vec::new();
        for (i, &p) in node.params.iter().enumerate() {
            let tensor = graph.init_param(p, 0, dtype, device)?;
            params.push(ParamRef { tensor, id: p, slot: i, trainable: graph.params()[p].spec.trainable });
        }
        let state = (0..node.state.len()).map(|i| graph.init_state(index, i, dtype, device)).collect::<Result<_>>()?;
        let mut inputs = Vec::new();
        for (i, &v) in node.inputs.iter().enumerate() {
            let (d, shape) = graph.shape(v, samples, dtype);
            // Ids are zeros, which every vocabulary has.
            let t = if d.is_float() {
                device.normal(Philox::new(i as u64, 0, "profile"), 1.0, &shape, d)?
            } else {
                Tensor::zeros(&shape, d, device)?
            };
            inputs.push((t, graph.needs_grad(v)));
        }
        let output_bytes = (0..graph.output_count(index))
            .map(|output| {
                let (d, shape) = graph.shape(Value { node: index, output }, samples, dtype);
                shape.iter().product::<usize>() * d.size()
            })
            .sum();
        Ok(Bench { node, index, params, state, inputs, samples, output_bytes })
    }

    fn sizes(&self) -> NodeCost {
        let param_bytes = self.params.iter().map(|p| p.tensor.byte_len()).sum();
        NodeCost { node: self.node.name.clone(), output_bytes: self.output_bytes, param_bytes, ..NodeCost::default() }
    }

    fn forward(&self) -> Result<(Option<Tape>, Vec<Var>)> {
        let key = RunKey { samples: (0..self.samples as u64).collect(), ..RunKey::default() };
        let mut cx = Cx::recording(Mode::Train, key);
        cx.enter(Scope { node: &self.node.name, index: self.index, params: &self.params, state: &self.state });
        let x: Vec<Var> = self.inputs.iter().map(|(t, needs)| cx.input(t.clone(), *needs)).collect();
        let outputs = match &self.node.kind {
            NodeKind::Layer(layer) => layer.forward(&mut cx, &x)?.all(),
            _ => Vec::new(),
        };
        Ok((cx.finish().0, outputs))
    }

    /// Runs F, I and W; `after` is called after each.
    fn run(&self, after: &mut dyn FnMut()) -> Result<usize> {
        let (tape, outputs) = self.forward()?;
        after();
        let tape = tape.ok_or_else(|| Error::graph("nothing was recorded"))?;
        let saved = tape.saved_bytes();
        let seeds: Vec<(&Var, Tensor)> =
            outputs.iter().filter(|v| v.needs_grad()).map(|v| (v, v.value().clone())).collect();
        let (_, weights) = tape.backward_input(&seeds)?;
        after();
        weights.run(&mut Grads::default())?;
        after();
        Ok(saved)
    }

    /// Seconds of F, I and W, and the bytes kept between F and B.
    fn once(&self) -> Result<([f64; 3], usize)> {
        let start = Instant::now();
        let mut times = Vec::with_capacity(3);
        let saved = self.run(&mut || times.push(start.elapsed().as_secs_f64()))?;
        match times[..] {
            [f, i, w] => Ok(([f, i - f, w - i], saved)),
            _ => Err(Error::graph("a pass was not timed")),
        }
    }

    /// What the device had counted before and after each of F, I and W, and the bytes kept between F and B.
    fn counts(&self) -> Result<(Vec<(u64, u64)>, usize)> {
        let device = self.inputs.first().map(|(t, _)| t.device().clone());
        let device = device.ok_or_else(|| Error::graph("a layer without inputs"))?;
        let mut counts = vec![device.backend().counted()];
        let saved = self.run(&mut || counts.push(device.backend().counted()))?;
        Ok((counts, saved))
    }
}
