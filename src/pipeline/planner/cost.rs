//! What a plan with replicated stages costs under an asynchronous 1F1B schedule (Narayanan et al., SOSP 2019), and what it holds.
//!
//! - A stage of r replicas takes `(F + max(B, S)) / r` seconds per minibatch, F and B on the slowest of them. S is the all-reduce of
//!   its gradients, once a round of r minibatches: a ring moves `2(r-1)/r` of them over the slowest link among the replicas, in
//!   `2(r-1)` messages, while B runs. F of the next round reads the weights that it updates, so F hides none of it.
//! - An edge takes as long as the busiest of the links that its messages pass, each way: minibatch j goes from replica `j mod r` to
//!   replica `j mod r'`, and each worker, and each group of workers, has one link to the others. What is read some stages later counts
//!   at every cut that it passes. A latency delays messages, but the next one need not wait for it.
//! - The minibatches follow each other at the pace of the slowest of these.
//! - A stage with a warm-up of w minibatches holds `(w + 1)` of each of: what its nodes keep for B, what it receives, and its
//!   weights; and its gradients and the state of the optimizer once. The state is taken to be as large as the weights (momentum).
use super::mode::Mode;
use crate::{
    Error, Result,
    layers::{Graph, NodeId},
    pipeline::{
        plan::{Plan, StagePlan},
        profile::CostGraph,
        schedule::warm_up,
        topology::{Link, Topology},
    },
};

/// A stage: its nodes, ascending, and the workers that hold it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The nodes.
    pub nodes: Vec<usize>,
    /// The workers, in any order: minibatch j runs on `workers[j % workers.len()]`.
    pub workers: Vec<usize>,
}

/// The workers of each stage, joined by dashes: `15-1`.
pub fn shape_of(stages: &[Part]) -> String {
    stages.iter().map(|s| s.workers.len().to_string()).collect::<Vec<_>>().join("-")
}

/// The plan that `stages` are for the model whose layers their nodes are.
///
/// # Errors
/// If it is none for it: see [`Plan::new`].
pub(super) fn plan_of(stages: &[Part], graph: &Graph) -> Result<Plan> {
    let layers: Vec<NodeId> = graph.layers().collect();
    let layer = |&n: &usize| {
        layers.get(n).copied().ok_or_else(|| Error::plan(format!("there is no layer {n} of {}", layers.len())))
    };
    let stage = |part: &Part| {
        let nodes = part.nodes.iter().map(layer).collect::<Result<_>>()?;
        Ok(StagePlan { nodes, workers: part.workers.clone(), warm_up: None })
    };
    let mut stages = stages.iter().map(stage).collect::<Result<Vec<StagePlan>>>()?;
    if let Some(first) = stages.first_mut() {
        first.nodes.extend((0..graph.nodes().len()).filter(|&n| !graph.is_layer(n)));
    }
    Plan::new(graph, stages)
}

/// What a plan costs and holds.
#[derive(Clone, Debug, PartialEq)]
pub struct Judged {
    /// Seconds of each stage per minibatch.
    pub stage_seconds: Vec<f64>,
    /// Seconds of each all-reduce, per minibatch, hidden or not.
    pub sync_seconds: Vec<f64>,
    /// Whether each all-reduce is over before the backward pass that it runs beside.
    pub is_hidden: Vec<bool>,
    /// Seconds of each edge between neighbouring stages per minibatch, the same each way.
    pub edge_seconds: Vec<f64>,
    /// Minibatches that each stage has in flight before its first backward pass.
    pub warm_up: Vec<usize>,
    /// Bytes that each worker of a stage holds.
    pub memory: Vec<f64>,
    /// Of these, bytes of a micro-batch in flight: what its nodes keep of it, and what it brings from the stage before,
    pub in_flight_bytes: Vec<f64>,
    /// and of one version of its parameters.
    pub param_bytes: Vec<f64>,
}

impl Judged {
    /// Seconds per minibatch in steady state: the slowest stage or edge.
    pub fn seconds(&self) -> f64 {
        self.stage_seconds.iter().chain(&self.edge_seconds).copied().fold(0.0, f64::max)
    }

    /// What takes longest, in words.
    pub fn bottleneck(&self) -> String {
        let ms = |seconds: f64| format!("{:.3} ms", 1e3 * seconds);
        let slowest = |times: &[f64]| (0..times.len()).max_by(|&a, &b| times[a].total_cmp(&times[b]));
        match (slowest(&self.stage_seconds), slowest(&self.edge_seconds)) {
            (Some(s), Some(e)) if self.edge_seconds[e] > self.stage_seconds[s] => {
                format!("what crosses from stage {e} to stage {} takes {}", e + 1, ms(self.edge_seconds[e]))
            }
            (Some(s), _) if self.is_hidden[s] => format!("stage {s} computes for {}", ms(self.stage_seconds[s])),
            (Some(s), _) => {
                format!(
                    "stage {s} takes {}: its all-reduce of {} outlasts B",
                    ms(self.stage_seconds[s]),
                    ms(self.sync_seconds[s])
                )
            }
            _ => "there is no stage".to_string(),
        }
    }

    /// The bytes of the worker that holds the most.
    pub fn most_memory(&self) -> f64 {
        self.memory.iter().copied().fold(0.0, f64::max)
    }
}

/// What `stages`, in order, cost and hold.
///
/// # Errors
/// If they are no plan: a node or a worker is in two stages or is not there, a node is in none, a stage has no node or no worker, or a
/// node reads one of a later stage.
pub fn judge(graph: &CostGraph, topology: &Topology, stages: &[Part]) -> Result<Judged> {
    judge_as(Mode::PIPEDREAM, graph, topology, stages)
}

/// What they cost and hold under another schedule, for a micro-batch each: `graph` is of micro-batches.
///
/// # Errors
/// As for [`judge`].
pub(super) fn judge_as(mode: Mode, graph: &CostGraph, topology: &Topology, stages: &[Part]) -> Result<Judged> {
    let stage_of = check(graph, topology, stages)?;
    // What crosses the cut after each stage.
    let mut crossing = vec![0.0; stages.len()];
    for (n, node) in graph.nodes().iter().enumerate() {
        let last = graph.readers(n).iter().map(|&r| stage_of[r]).max().unwrap_or(0);
        (stage_of[n]..last).for_each(|cut| crossing[cut] += node.output_bytes);
    }
    let warm_up = warm_up(&stages.iter().map(|s| s.workers.len()).collect::<Vec<_>>());
    let mut judged = Judged {
        stage_seconds: Vec::new(),
        sync_seconds: Vec::new(),
        is_hidden: Vec::new(),
        edge_seconds: stages
            .windows(2)
            .zip(&crossing)
            .map(|(s, bytes)| bytes * seconds_per_byte(topology, &s[0].workers, &s[1].workers))
            .collect(),
        warm_up,
        memory: Vec::new(),
        in_flight_bytes: Vec::new(),
        param_bytes: Vec::new(),
    };
    for (s, stage) in stages.iter().enumerate() {
        let mut held = Held::default();
        stage.nodes.iter().for_each(|&n| held.add(graph, n));
        let received = if s > 0 { crossing[s - 1] } else { 0.0 };
        let replicas = stage.workers.len();
        let sync = all_reduce(replicas, held.param_bytes, link_among(topology, &stage.workers));
        let speed = stage.workers.iter().map(|&w| topology.worker(w).speed).fold(f64::INFINITY, f64::min);
        judged.stage_seconds.push(held.seconds(mode, replicas, sync, speed));
        judged.sync_seconds.push(sync / replicas as f64);
        judged.is_hidden.push(sync <= held.backward / speed);
        judged.memory.push(held.memory(mode, received, judged.warm_up[s], replicas));
        judged.in_flight_bytes.push(held.saved_bytes + received);
        judged.param_bytes.push(held.param_bytes);
    }
    Ok(judged)
}

/// The stage of each node.
fn check(graph: &CostGraph, topology: &Topology, stages: &[Part]) -> Result<Vec<usize>> {
    let mut stage_of = vec![None; graph.nodes().len()];
    let mut is_taken = vec![false; topology.workers()];
    for (s, stage) in stages.iter().enumerate() {
        if stage.nodes.is_empty() || stage.workers.is_empty() {
            return Err(Error::plan(format!(
                "stage {s} has no {}",
                if stage.nodes.is_empty() { "node" } else { "worker" }
            )));
        }
        for &n in &stage.nodes {
            if stage_of.get_mut(n).is_none_or(|of| of.replace(s).is_some()) {
                return Err(Error::plan(format!("node {n} of stage {s} is in another too, or is not there")));
            }
        }
        for &w in &stage.workers {
            if is_taken.get_mut(w).is_none_or(|taken| std::mem::replace(taken, true)) {
                return Err(Error::plan(format!("worker {w} of stage {s} is in another too, or is not there")));
            }
        }
    }
    let name = |n: usize| &graph.nodes()[n].name;
    let place =
        |(n, of): (usize, Option<usize>)| of.ok_or_else(|| Error::plan(format!("node {:?} is in no stage", name(n))));
    let stage_of = stage_of.into_iter().enumerate().map(place).collect::<Result<Vec<usize>>>()?;
    for (n, of) in stage_of.iter().enumerate() {
        if let Some(&s) = graph.sources(n).iter().find(|&&s| stage_of[s] > *of) {
            let later = stage_of[s];
            return Err(Error::plan(format!("{:?} in stage {of} reads {:?} in stage {later}", name(n), name(s))));
        }
    }
    Ok(stage_of)
}

/// The sums over the nodes of a stage.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Held {
    pub(super) forward: f64,
    pub(super) backward: f64,
    pub(super) param_bytes: f64,
    pub(super) saved_bytes: f64,
}

impl Held {
    pub(super) fn add(&mut self, graph: &CostGraph, node: usize) {
        let node = &graph.nodes()[node];
        self.forward += node.forward;
        self.backward += node.backward;
        self.param_bytes += node.param_bytes;
        self.saved_bytes += node.saved_bytes;
    }

    /// The sums over the nodes that are not in `other`, all of whose nodes are.
    pub(super) fn less(&self, other: &Held) -> Held {
        Held {
            forward: self.forward - other.forward,
            backward: self.backward - other.backward,
            param_bytes: self.param_bytes - other.param_bytes,
            saved_bytes: self.saved_bytes - other.saved_bytes,
        }
    }

    /// Seconds of F and B on the worker that was profiled.
    pub(super) fn work(&self) -> f64 {
        self.forward + self.backward
    }

    /// Seconds per micro-batch on so many replicas, whose all-reduce takes `sync` seconds and the slowest of which has this speed.
    pub(super) fn seconds(&self, mode: Mode, replicas: usize, sync: f64, speed: f64) -> f64 {
        mode.seconds([self.forward / speed, self.backward / speed], sync, replicas)
    }

    /// Bytes that each of so many workers holds, of which `received` are what a micro-batch brings from the stage before.
    pub(super) fn memory(&self, mode: Mode, received: f64, warm_up: usize, replicas: usize) -> f64 {
        let (in_flight, versions) = (mode.in_flight(warm_up, replicas), mode.versions(warm_up));
        bytes_held((in_flight, self.saved_bytes + received), (versions, self.param_bytes))
    }
}

/// Bytes that a worker holds with so many micro-batches in flight and so many versions of its parameters, each of so many bytes; and
/// its gradients and the state of the optimizer.
pub(super) fn bytes_held((in_flight, of_each): (usize, f64), (versions, param_bytes): (usize, f64)) -> f64 {
    in_flight as f64 * of_each + (versions as f64 + 2.0) * param_bytes
}

/// Seconds of a ring all-reduce of `bytes` among `replicas` workers.
pub(super) fn all_reduce(replicas: usize, bytes: f64, link: Link) -> f64 {
    let steps = 2.0 * (replicas as f64 - 1.0);
    if replicas < 2 { 0.0 } else { steps / replicas as f64 * bytes / link.bandwidth + steps * link.latency }
}

/// The slowest link that messages among `workers` pass.
pub(super) fn link_among(topology: &Topology, workers: &[usize]) -> Link {
    let level = workers.iter().filter_map(|&w| topology.between(workers[0], w)).max();
    level.map_or(Link::FREE, |l| topology.slowest(l))
}

/// Seconds that a byte of each minibatch keeps the busiest link busy, from a stage on `from` to one on `to`.
pub(super) fn seconds_per_byte(topology: &Topology, from: &[usize], to: &[usize]) -> f64 {
    // Every worker sends, or receives, as much as all others of its stage.
    let mut busiest = 1.0 / from.len().min(to.len()) as f64 / topology.levels()[0].link.bandwidth;
    // After the period of both round robins all repeats.
    let period = (1..=to.len()).map(|k| k * from.len()).find(|p| p % to.len() == 0).unwrap_or(1);
    for (level, l) in topology.levels().iter().enumerate().skip(1) {
        let group = topology.group(level);
        if from.iter().chain(to).all(|w| w / group == from[0] / group) {
            break;
        }
        let mut messages = vec![[0usize; 2]; topology.workers() / group];
        for j in 0..period {
            let (a, b) = (from[j % from.len()] / group, to[j % to.len()] / group);
            if a != b {
                messages[a][0] += 1;
                messages[b][1] += 1;
            }
        }
        let most = messages.iter().flatten().max().copied().unwrap_or(0);
        busiest = busiest.max(most as f64 / period as f64 / l.link.bandwidth);
    }
    busiest
}
