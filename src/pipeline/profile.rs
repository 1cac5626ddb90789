//! What each node of a graph costs: measured, estimated from operation counts, or published by others.
mod cost_graph;
mod published;
mod rehearsal;

pub use cost_graph::{CostGraph, CostNode, Trimmed};

use crate::{
    Context, Error, Result,
    clock::seconds_of_this_thread,
    layers::{Graph, NodeId},
    optim::{Optimizer, Sgd},
    tensor::{DType, Device, Machine, backend::Counted},
};
use rehearsal::Rehearsal;
use serde::{Deserialize, Serialize};
use std::{collections::HashSet, ops::Range, path::Path, time::Instant};

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
    /// Adding its gradients to those of the micro-batches before, which W does not count.
    #[serde(default)]
    pub fold: f64,
    /// The optimizer's update of its parameters.
    #[serde(default)]
    pub update: f64,
    /// All outputs.
    pub output_bytes: usize,
    /// All parameters.
    pub param_bytes: usize,
    /// What is kept for the backward pass, parameters left out.
    pub saved_bytes: usize,
}

impl NodeCost {
    /// F and B.
    pub fn passes(&self) -> f64 {
        self.forward + self.input_grad + self.weight_grad
    }

    /// What one of `micro_batches` micro-batches that share an update costs: its part of the folds is in W (the first folds
    /// nothing), `update` is its part of the update.
    pub fn per_micro_batch(&self, micro_batches: usize) -> NodeCost {
        let m = micro_batches.max(1) as f64;
        let weight_grad = self.weight_grad + (m - 1.0) / m * self.fold;
        NodeCost { weight_grad, fold: 0.0, update: self.update / m, ..self.clone() }
    }

    /// All of it.
    pub fn seconds(&self) -> f64 {
        self.passes() + self.fold + self.update
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
    /// How many workers were busy at once on each core while it was taken: 1 where each had a core of its own. Where they share cores,
    /// times are those that a worker had on one.
    pub crowding: f64,
    /// By size, ascending.
    pub samples: Vec<Sample>,
}

/// Steps that are timed: at least, and at most.
const STEPS: Range<usize> = 3..100;
/// Seconds after which no further step is timed.
const BUDGET: f64 = 0.8;
/// Groups of steps whose mean times are compared.
const BLOCKS: usize = 9;
/// Bytes that the nodes of one rehearsal hold; more nodes are rehearsed one part after the other, since a model that is trained in
/// parts need not fit as a whole.
const MEMORY: usize = 2 << 30;

/// More seconds than any node takes.
const LONGEST: f64 = 1e6;

/// The speed assumed where nothing may be measured: a core of today. Only ratios matter for the plan.
const FLOPS: f64 = 1e11;
const BYTES_PER_SECOND: f64 = 1e10;

impl Profile {
    /// The sizes of micro-batches that tell what those of `size` samples cost, and smaller ones: not those that a layer refuses,
    /// as BatchNorm does a single value a channel.
    pub fn sizes(graph: &Graph, dtype: DType, size: usize) -> Vec<usize> {
        let smaller = [size.div_ceil(4), size.div_ceil(2)].into_iter().filter(|&s| s < size);
        smaller.filter(|&s| Profile::operations(graph, dtype, s).is_ok()).chain([size]).collect()
    }

    /// Runs training steps on `device` with micro-batches of each of `sizes`. `together` is called before each part of the
    /// graph, so that workers that share a machine are busy at the same time.
    pub fn measure(
        graph: &Graph,
        optimizer: &dyn Optimizer,
        device: &Device,
        dtype: DType,
        sizes: &[usize],
        crowding: f64,
        together: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Profile> {
        let begin = Instant::now();
        let wall = || begin.elapsed().as_secs_f64();
        // Of a core that others share, only the time that this worker has of it is its own.
        let clock = || if crowding > 1.0 { seconds_of_this_thread() } else { wall() };
        let mut measured = Profile::estimate(graph, optimizer, dtype, sizes)?;
        measured.crowding = crowding;
        for sample in &mut measured.samples {
            let mut costs = Vec::new();
            for part in parts(&sample.nodes, MEMORY) {
                let mut rehearsal = Rehearsal::new(graph, part, sample.micro_batch, optimizer, dtype, device)?;
                together()?;
                // Not timed: the first step meets cold caches and an empty pool, and has nothing to fold.
                rehearsal.run(&clock)?;
                let mut steps = Vec::new();
                let start = wall();
                while steps.len() < STEPS.start || steps.len() < STEPS.end && wall() - start < BUDGET {
                    steps.push(rehearsal.run(&clock)?);
                }
                costs.extend(typical(&steps));
            }
            sample.nodes = costs;
        }
        Ok(measured)
    }

    /// Estimates from floating-point operations and bytes: the same on every machine.
    pub fn estimate(graph: &Graph, optimizer: &dyn Optimizer, dtype: DType, sizes: &[usize]) -> Result<Profile> {
        let seconds = |all: Counted| all.flops as f64 / FLOPS + all.bytes as f64 / BYTES_PER_SECOND;
        Profile::modelled(graph, optimizer, dtype, sizes, &Device::meta(), &seconds)
    }

    /// What a machine would take, by its rates: each kernel its latency and the longer of its operations and its bytes
    /// ([`Machine::seconds`]). It is a lower bound as far as no kernel reaches the rates; those of products of matrices come near.
    ///
    /// # Errors
    /// If there can be no such machine, or a layer fails on micro-batches of one of `sizes`.
    pub fn analytic(
        graph: &Graph,
        optimizer: &dyn Optimizer,
        dtype: DType,
        sizes: &[usize],
        machine: Machine,
    ) -> Result<Profile> {
        Profile::modelled(graph, optimizer, dtype, sizes, &Device::meta_of(machine)?, &|all| all.seconds)
    }

    /// What `meta` counts in a training step with micro-batches of each of `sizes`, in seconds.
    fn modelled(
        graph: &Graph,
        optimizer: &dyn Optimizer,
        dtype: DType,
        sizes: &[usize],
        meta: &Device,
        seconds: &dyn Fn(Counted) -> f64,
    ) -> Result<Profile> {
        let mut sizes: Vec<usize> = sizes.iter().map(|&s| s.max(1)).collect();
        sizes.sort_unstable();
        sizes.dedup();
        let clock = || seconds(meta.backend().counted());
        let count = |&micro_batch: &usize| {
            let all = 0..graph.nodes().len();
            let mut rehearsal = Rehearsal::new(graph, all, micro_batch, optimizer, dtype, meta)?;
            // In the first step there is nothing to fold.
            rehearsal.run(&clock)?;
            Ok(Sample { micro_batch, nodes: rehearsal.run(&clock)? })
        };
        Ok(Profile { crowding: 1.0, samples: sizes.iter().map(count).collect::<Result<_>>()? })
    }

    /// Floating-point operations of the forward and backward passes of a micro-batch of `size` samples; a multiply-add counts as
    /// two.
    ///
    /// # Errors
    /// If a layer fails on so many samples.
    pub fn operations(graph: &Graph, dtype: DType, size: usize) -> Result<f64> {
        Profile::counted(graph, dtype, size, |c| c.flops)
    }

    /// Those of them that are products of matrices, of convolutions and attention too.
    ///
    /// # Errors
    /// If a layer fails on so many samples.
    pub fn products(graph: &Graph, dtype: DType, size: usize) -> Result<f64> {
        Profile::counted(graph, dtype, size, |c| c.products)
    }

    fn counted(graph: &Graph, dtype: DType, size: usize, what: impl Fn(Counted) -> u64) -> Result<f64> {
        let (meta, optimizer) = (Device::meta(), Sgd::new(0.0));
        let all = 0..graph.nodes().len();
        let mut rehearsal = Rehearsal::new(graph, all, size, &optimizer, dtype, &meta)?;
        Ok(rehearsal.run(&|| what(meta.backend().counted()) as f64)?.iter().map(NodeCost::passes).sum())
    }

    /// The profile of several workers: the median of each time.
    ///
    /// # Errors
    /// If they are not of one graph and sizes.
    pub fn merge(all: &[Profile]) -> Result<Profile> {
        let first = all.first().ok_or_else(|| Error::plan("no profile to merge"))?;
        let mut merged = first.clone();
        for (s, sample) in merged.samples.iter_mut().enumerate() {
            let mut nodes = Vec::new();
            for profile in all {
                let theirs = profile.samples.get(s).map_or(&[][..], |sample| &sample.nodes);
                if let Some(at) = (0..sample.nodes.len().max(theirs.len()))
                    .find(|&n| sample.nodes.get(n).map(|c| &c.node) != theirs.get(n).map(|c| &c.node))
                {
                    let name = sample.nodes.get(at).or(theirs.get(at)).map_or("", |c| &c.node);
                    return Err(Error::plan(format!("profiles of different graphs cannot be merged: node {name:?}")));
                }
                nodes.push(theirs);
            }
            sample.nodes = medians(&nodes);
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
            fold: a.fold,
            update: a.update,
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
        let text = Error::read_text(path)?;
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
            for (n, c) in sample.nodes.iter().enumerate() {
                let elements: usize = graph.nodes()[n]
                    .params
                    .iter()
                    .map(|&p| graph.params()[p].spec.shape.iter().product::<usize>())
                    .sum();
                if ![4, 8].map(|size| size * elements).contains(&c.param_bytes) {
                    let (node, bytes) = (&c.node, c.param_bytes);
                    return Err(Error::plan(format!(
                        "node {node:?}: {bytes} bytes of parameters, in the model it has {elements} parameters: a profile of \
                         another model"
                    ))
                    .context(place()));
                }
                let times = [
                    ("forward", c.forward),
                    ("input_grad", c.input_grad),
                    ("weight_grad", c.weight_grad),
                    ("fold", c.fold),
                    ("update", c.update),
                ];
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

/// The median of each time of each node, of the same nodes measured several times.
fn medians(all: &[&[NodeCost]]) -> Vec<NodeCost> {
    let Some(first) = all.first() else { return Vec::new() };
    let node = |(n, cost): (usize, &NodeCost)| {
        let median = |time: fn(&NodeCost) -> f64| median(all.iter().map(|nodes| time(&nodes[n])));
        NodeCost {
            forward: median(|c| c.forward),
            input_grad: median(|c| c.input_grad),
            weight_grad: median(|c| c.weight_grad),
            fold: median(|c| c.fold),
            update: median(|c| c.update),
            ..cost.clone()
        }
    };
    first.iter().enumerate().map(node).collect()
}

/// What nodes cost in a step, of several steps: the medians, lengthened alike so that they add up to what a step takes.
/// Interruptions, those by other workers of the same core above all, hit few passes hard; the medians alone do not see them.
fn typical(steps: &[Vec<NodeCost>]) -> Vec<NodeCost> {
    let mut nodes = medians(&steps.iter().map(Vec::as_slice).collect::<Vec<_>>());
    let total = |nodes: &[NodeCost]| nodes.iter().map(|c| c.seconds()).sum::<f64>();
    // The median of means: of a stall that will not come again it sees nothing.
    let block = |steps: &[Vec<NodeCost>]| steps.iter().map(|s| total(s)).sum::<f64>() / steps.len() as f64;
    let whole = median(steps.chunks(steps.len().div_ceil(BLOCKS).max(1)).map(block));
    let parts = total(&nodes);
    if parts > 0.0 {
        for c in &mut nodes {
            for time in [&mut c.forward, &mut c.input_grad, &mut c.weight_grad, &mut c.fold, &mut c.update] {
                *time *= whole / parts;
            }
        }
    }
    nodes
}

/// The upper median; 0 of nothing.
fn median(times: impl Iterator<Item = f64>) -> f64 {
    let mut times: Vec<f64> = times.collect();
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(0.0)
}

/// Neighbouring nodes that hold at most `memory` bytes at once, or one node that holds more.
fn parts(nodes: &[NodeCost], memory: usize) -> Vec<Range<NodeId>> {
    // Parameters come with two gradients and the optimizer's state.
    let bytes = |c: &NodeCost| c.saved_bytes + c.output_bytes + 5 * c.param_bytes;
    let (mut parts, mut start, mut held) = (Vec::new(), 0, 0);
    for (n, cost) in nodes.iter().enumerate() {
        held += bytes(cost);
        if held > memory && n > start {
            parts.push(start..n);
            (start, held) = (n, bytes(cost));
        }
    }
    parts.push(start..nodes.len());
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interruptions_are_shared_out() {
        let node = |forward: f64| NodeCost { forward, weight_grad: 1.0, ..NodeCost::default() };
        let step = |forward: [f64; 3]| forward.map(node).to_vec();
        // Every step is interrupted for 14 s, each time in another node; one is stalled for good measure.
        let steps = [[15.0, 2.0, 1.0], [1.0, 16.0, 1.0], [1.0, 2.0, 15.0], [1.0, 2.0, 900.0], [1.0, 2.0, 1.0]];
        let nodes = typical(&steps.map(step));
        // The medians add up to 1 + 2 + 1 + 3, a step to 21.
        let times: Vec<[f64; 2]> = nodes.iter().map(|c| [c.forward, c.weight_grad]).collect();
        assert_eq!(times, [[3.0, 3.0], [6.0, 3.0], [3.0, 3.0]]);
    }

    #[test]
    fn parts_fit_into_memory_where_nodes_do() {
        let node = |&saved_bytes: &usize| NodeCost { saved_bytes, ..NodeCost::default() };
        let parts = |bytes: &[usize]| parts(&bytes.iter().map(node).collect::<Vec<_>>(), 10);
        assert!(parts(&[1, 2, 3, 4]).iter().eq([&(0..4)]));
        assert_eq!(parts(&[1, 9, 1, 30, 0, 10, 5]), [0..2, 2..3, 3..4, 4..6, 6..7]);
        let held = NodeCost { output_bytes: 3, param_bytes: 2, ..NodeCost::default() };
        assert_eq!(super::parts(&[held.clone(), held], 25), [0..1, 1..2]);
    }
}
