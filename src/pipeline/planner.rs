//! The best straight partition: stages of neighbouring layers, one worker each.
use super::{plan::Plan, profile::NodeCost};
use crate::{
    Error, Result,
    layers::{Graph, NodeId, NodeKind, Value},
    tensor::DType,
};

/// A link between two workers.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Link {
    /// Seconds before the first byte arrives.
    pub latency: f64,
    /// Bytes per second, per direction.
    pub bandwidth: f64,
}

impl Link {
    /// Seconds that a message of `bytes` takes.
    pub fn seconds(&self, bytes: usize) -> f64 {
        self.latency + bytes as f64 / self.bandwidth
    }
}

/// A plan and what it was chosen for.
#[derive(Clone, Debug)]
pub struct Planned {
    /// The plan.
    pub plan: Plan,
    /// Seconds of F and B of each stage for a micro-batch.
    pub stage_seconds: Vec<f64>,
    /// Seconds that crossing each cut takes for a micro-batch, there and back.
    pub cut_seconds: Vec<f64>,
}

impl Planned {
    /// Seconds per micro-batch in steady state: the slowest stage or cut.
    pub fn bottleneck(&self) -> f64 {
        self.stage_seconds.iter().chain(&self.cut_seconds).copied().fold(0.0, f64::max)
    }
}

/// Cuts the graph into `stages` stages so that the slowest stage or cut is as fast as can be: dynamic programming over the
/// places between neighbouring layers, O(stages · layers²). Of equal plans it takes the one that moves fewer bytes, then the
/// earlier cuts.
///
/// `costs` are those of the micro-batch of `samples` samples that will run.
///
/// # Errors
/// If there are more stages than layers, or only cuts that would separate nodes with shared parameters.
pub fn plan_straight(
    graph: &Graph,
    costs: &[NodeCost],
    link: Link,
    stages: usize,
    samples: usize,
    dtype: DType,
) -> Result<Planned> {
    let layers: Vec<NodeId> =
        (0..graph.nodes().len()).filter(|&n| matches!(graph.nodes()[n].kind, NodeKind::Layer(_))).collect();
    let n = layers.len();
    if stages == 0 || stages > n {
        return Err(Error::plan(format!("{stages} stages asked for, the model has {n} layers; 1 to {n} are possible")));
    }
    if costs.len() != graph.nodes().len() {
        return Err(Error::plan(format!("costs of {} nodes for a model of {}", costs.len(), graph.nodes().len())));
    }
    let mut until = vec![0.0; n + 1];
    for (i, &l) in layers.iter().enumerate() {
        until[i + 1] = until[i] + costs[l].seconds();
    }
    let crossing = crossing_bytes(graph, &layers, samples, dtype);
    let allowed = allowed_cuts(graph, &layers);
    let cut_seconds = |at: usize| {
        let [forward, backward] = crossing[at];
        link.seconds(forward) + if backward > 0 { link.seconds(backward) } else { 0.0 }
    };
    // best[s][j]: the first j layers in s + 1 stages: (slowest, bytes moved, where the last stage begins).
    type Best = (f64, usize, usize);
    let mut best: Vec<Vec<Option<Best>>> = vec![(0..=n).map(|j| (j > 0).then_some((until[j], 0, 0))).collect()];
    for s in 1..stages {
        let row = (0..=n).map(|j| {
            let mut found: Option<Best> = None;
            for i in (s..j).filter(|&i| allowed[i]) {
                let Some((slowest, bytes, _)) = best[s - 1][i] else { continue };
                let time = slowest.max(cut_seconds(i)).max(until[j] - until[i]);
                let bytes = bytes + crossing[i][0] + crossing[i][1];
                if found.is_none_or(|(t, b, _)| time < t || time == t && bytes < b) {
                    found = Some((time, bytes, i));
                }
            }
            found
        });
        let row = row.collect();
        best.push(row);
    }
    let (mut cuts, mut j) = (Vec::new(), n);
    for s in (1..stages).rev() {
        let none = || Error::plan(format!("no {stages} stages: layers that share parameters must stay together"));
        j = best[s][j].ok_or_else(none)?.2;
        cuts.push(j);
    }
    cuts.reverse();
    let bounds: Vec<usize> = [0].into_iter().chain(cuts.iter().copied()).chain([n]).collect();
    Ok(Planned {
        plan: Plan::straight(graph, &cuts.iter().map(|&c| layers[c]).collect::<Vec<_>>())?,
        stage_seconds: bounds.windows(2).map(|b| until[b[1]] - until[b[0]]).collect(),
        cut_seconds: cuts.iter().map(|&c| cut_seconds(c)).collect(),
    })
}

/// For a cut before each layer: bytes of the values made before it that are read after it, and of their gradients.
fn crossing_bytes(graph: &Graph, layers: &[NodeId], samples: usize, dtype: DType) -> Vec<[usize; 2]> {
    let place = |node: NodeId| layers.partition_point(|&l| l < node);
    let is_layer = |node: NodeId| matches!(graph.nodes()[node].kind, NodeKind::Layer(_));
    // Differences along the cuts, summed up at the end.
    let mut change = vec![[0isize; 2]; layers.len() + 2];
    for node in 0..graph.nodes().len() {
        for output in 0..graph.output_count(node) {
            let v = Value { node, output };
            let Some(&last) = graph.consumers(v).last() else { continue };
            // An input is there from the first cut on.
            let from = if is_layer(node) { place(node) + 1 } else { 1 };
            let to = place(last) + 1;
            let (d, shape) = graph.shape(v, samples, dtype);
            let bytes = (shape.iter().product::<usize>() * d.size()) as isize;
            if from < to {
                let both = [bytes, if graph.needs_grad(v) { bytes } else { 0 }];
                for i in 0..2 {
                    change[from][i] += both[i];
                    change[to][i] -= both[i];
                }
            }
        }
    }
    let mut sum = [0isize; 2];
    let mut crossing = Vec::new();
    for c in change.iter().take(layers.len() + 1) {
        sum = [sum[0] + c[0], sum[1] + c[1]];
        crossing.push(sum.map(|b| b as usize));
    }
    crossing
}

/// Which cuts leave nodes with shared parameters together.
fn allowed_cuts(graph: &Graph, layers: &[NodeId]) -> Vec<bool> {
    let mut allowed = vec![true; layers.len() + 1];
    for p in 0..graph.params().len() {
        let uses = |l: &NodeId| graph.nodes()[*l].params.contains(&p);
        let first = layers.iter().position(uses);
        let last = layers.iter().rposition(uses);
        if let (Some(a), Some(b)) = (first, last) {
            allowed[a + 1..=b].fill(false);
        }
    }
    allowed
}
