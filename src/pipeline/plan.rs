//! The partition of a layer graph into stages, and the tensors that cross between them.
use super::schedule::{Link, Shape, Wiring, place_in, warm_up};
use crate::{
    Error, Result,
    layers::{Graph, NodeId, NodeKind, Value},
    tensor::DType,
};

/// More forward passes than any worker does before its first backward pass.
const LONGEST_WARM_UP: usize = 1 << 16;

/// The nodes of one stage and the workers that hold it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StagePlan {
    /// Its nodes, in order. The layers of a stage are neighbours in the order of the graph; the inputs of the graph belong to
    /// the first stage, whose workers read the data.
    pub nodes: Vec<NodeId>,
    /// The workers that hold it, in the order in which they take micro-batches in turn.
    pub workers: Vec<usize>,
    /// Forward passes that each of them does before its first backward pass in an asynchronous schedule, if not the
    /// [published](super::schedule::warm_up) number.
    pub warm_up: Option<usize>,
}

/// A value that crosses from the stage that makes it to a later one that reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edge {
    /// The value.
    pub value: Value,
    /// The stage that makes it.
    pub from: usize,
    /// The stage that reads it.
    pub to: usize,
    /// The nodes there that read it, in order.
    pub consumers: Vec<NodeId>,
    /// Whether a gradient comes back.
    pub needs_grad: bool,
    /// Whether the consumers' gradients come back as their sum. The producer folds one gradient per consumer in descending
    /// order (NUMERICS.md, rule 3), so only the last stage that reads the value may begin that sum; the others send theirs
    /// one by one, stacked along a new first axis, last consumer first.
    pub folded: bool,
}

impl Edge {
    /// Gradients in one message on the way back.
    pub fn stacked(&self) -> usize {
        if self.folded { 1 } else { self.consumers.len() }
    }
}

/// Which stage runs which nodes, and on which worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    stages: Vec<StagePlan>,
    edges: Vec<Edge>,
}

impl Plan {
    /// A checked plan with its edges.
    ///
    /// # Errors
    /// If a node is missing or stands twice, a stage has no layer or no worker, layers of stages interleave, an input is not in
    /// the first stage, or nodes of different stages share a parameter.
    pub fn new(graph: &Graph, stages: Vec<StagePlan>) -> Result<Plan> {
        let name = |n: NodeId| graph.nodes().get(n).map_or_else(|| format!("{n}"), |n| n.name.clone());
        let mut stage_of = vec![None; graph.nodes().len()];
        if stages.is_empty() {
            return Err(Error::plan("a plan needs at least one stage"));
        }
        for (s, stage) in stages.iter().enumerate() {
            if stage.workers.is_empty() {
                return Err(Error::plan(format!("stage {s} has no worker")));
            }
            let again = |(i, w)| stage.workers[..i].contains(w).then_some(*w);
            if let Some(worker) = stage.workers.iter().enumerate().find_map(again) {
                return Err(Error::plan(format!("stage {s} names worker {worker} twice")));
            }
            for &n in &stage.nodes {
                match stage_of.get_mut(n) {
                    None => {
                        return Err(Error::plan(format!(
                            "stage {s} names node {n}, the graph has {}",
                            graph.nodes().len()
                        )));
                    }
                    Some(Some(other)) => {
                        return Err(Error::plan(format!("node {:?} is in stage {other} and in stage {s}", name(n))));
                    }
                    Some(free) => *free = Some(s),
                }
            }
        }
        let stage_of: Vec<usize> = (0..stage_of.len())
            .map(|n| stage_of[n].ok_or_else(|| Error::plan(format!("node {:?} is in no stage", name(n)))))
            .collect::<Result<_>>()?;
        let mut last = 0;
        for (n, node) in graph.nodes().iter().enumerate() {
            match node.kind {
                NodeKind::Layer(_) if stage_of[n] < last => {
                    return Err(Error::plan(format!(
                        "layer {:?} of stage {} comes after layers of stage {last}",
                        node.name, stage_of[n]
                    )));
                }
                NodeKind::Layer(_) => last = stage_of[n],
                _ if stage_of[n] != 0 => {
                    return Err(Error::plan(format!(
                        "input {:?} is in stage {}; inputs belong to stage 0",
                        node.name, stage_of[n]
                    )));
                }
                _ => {}
            }
        }
        for (s, stage) in stages.iter().enumerate() {
            if !stage.nodes.iter().any(|&n| graph.is_layer(n)) {
                return Err(Error::plan(format!("stage {s} has no layer; {} stages are too many", stages.len())));
            }
        }
        check_tied(graph, &stage_of)?;
        let mut stages = stages;
        stages.iter_mut().for_each(|s| s.nodes.sort_unstable());
        let edges = edges(graph, &stage_of);
        Ok(Plan { stages, edges })
    }

    /// A straight plan: stage s on worker s, each cut before the layer nodes given (ascending). Inputs go to stage 0.
    ///
    /// # Errors
    /// If the cuts leave a stage without layers or are out of order, or as [`Plan::new`] says.
    pub fn straight(graph: &Graph, cuts: &[NodeId]) -> Result<Plan> {
        Plan::replicated(graph, cuts, &vec![1; cuts.len() + 1])
    }

    /// The same with so many workers for each stage, numbered in the order of the stages.
    ///
    /// # Errors
    /// As for [`straight`](Plan::straight), or if there is not one number of workers a stage.
    pub fn replicated(graph: &Graph, cuts: &[NodeId], replicas: &[usize]) -> Result<Plan> {
        if !cuts.is_sorted() || cuts.last().is_some_and(|&c| c >= graph.nodes().len()) {
            return Err(Error::plan(format!(
                "cuts must ascend and lie within the {} nodes, got {cuts:?}",
                graph.nodes().len()
            )));
        }
        if replicas.len() != cuts.len() + 1 {
            let (a, b) = (replicas.len(), cuts.len() + 1);
            return Err(Error::plan(format!("workers of {a} stages for {b} stages")));
        }
        let workers = Wiring::replicated(replicas).stages.into_iter();
        let mut stages: Vec<StagePlan> =
            workers.map(|workers| StagePlan { nodes: Vec::new(), workers, warm_up: None }).collect();
        for n in 0..graph.nodes().len() {
            let stage = if graph.is_layer(n) { cuts.partition_point(|&c| c <= n) } else { 0 };
            stages[stage].nodes.push(n);
        }
        Plan::new(graph, stages)
    }

    /// The stages, in order.
    pub fn stages(&self) -> &[StagePlan] {
        &self.stages
    }

    /// The values that cross, by value and stage.
    pub fn edges(&self) -> &[Edge] {
        &self.edges
    }

    /// The number of workers.
    pub fn workers(&self) -> usize {
        self.stages.iter().flat_map(|s| &s.workers).max().map_or(0, |w| w + 1)
    }

    /// Which of the workers of `stage` a worker is: replica k of R, as (k, R).
    pub fn replica(&self, stage: usize, worker: usize) -> Option<(usize, usize)> {
        place_in(&self.stages.get(stage)?.workers, worker)
    }

    /// The workers of each stage, and their warm-up.
    ///
    /// # Errors
    /// As for [`Shape::new`], or if a warm-up is none that can be.
    pub fn shape(&self) -> Result<Shape> {
        let replicas: Vec<usize> = self.stages.iter().map(|s| s.workers.len()).collect();
        let mut warm_up = warm_up(&replicas);
        for (s, (stage, published)) in self.stages.iter().zip(&mut warm_up).enumerate() {
            match stage.warm_up {
                Some(w) if w > LONGEST_WARM_UP => {
                    return Err(Error::plan(format!("stage {s}: warm_up = {w}, at most {LONGEST_WARM_UP} expected")));
                }
                Some(w) => *published = w,
                None => {}
            }
        }
        Shape::warmed_up(&replicas, warm_up)
    }

    /// The same plan with these warm-ups, one a stage.
    pub fn warmed_up(mut self, warm_up: &[usize]) -> Plan {
        self.stages.iter_mut().zip(warm_up).for_each(|(stage, &w)| stage.warm_up = Some(w));
        self
    }

    /// The same plan on workers that are numbered in the order of the stages.
    ///
    /// # Errors
    /// If two stages have a worker in common, or there are workers without a stage.
    pub fn renumbered(self) -> Result<Plan> {
        let of_stages: Vec<usize> = self.stages.iter().flat_map(|s| s.workers.clone()).collect();
        let number = |w| of_stages.iter().position(|&v| v == w).unwrap_or(of_stages.len());
        let numbers: Vec<usize> = (0..self.workers()).map(number).collect();
        self.on(&numbers)
    }

    /// The same plan with worker `workers[w]` in place of worker w.
    ///
    /// # Errors
    /// If `workers` does not have the workers of the plan, each once.
    pub fn on(mut self, workers: &[usize]) -> Result<Plan> {
        let mut all = workers.to_vec();
        all.sort_unstable();
        if all.len() != self.workers() || all.iter().enumerate().any(|(i, &w)| i != w) {
            let n = self.workers();
            return Err(Error::plan(format!("workers {workers:?} in place of 0 to {}", n.saturating_sub(1))));
        }
        let of_stages = self.stages.iter_mut().flat_map(|s| &mut s.workers);
        of_stages.for_each(|w| *w = workers[*w]);
        Ok(self)
    }

    /// What a schedule needs to know; with `gradients` false, as in evaluation, nothing comes back.
    pub fn wiring(&self, gradients: bool) -> Wiring {
        let link = |e: &Edge| Link { from: e.from, to: e.to, grad: e.needs_grad && gradients };
        Wiring {
            stages: self.stages.iter().map(|s| s.workers.clone()).collect(),
            edges: self.edges.iter().map(link).collect(),
        }
    }

    /// The same stages with only what crosses between them when just the `wanted` nodes run, forward only.
    pub fn forward_of(&self, wanted: &[bool]) -> Plan {
        let is_wanted = |n: &NodeId| wanted.get(*n).copied().unwrap_or(false);
        let edges = self.edges.iter().filter_map(|e| {
            let consumers: Vec<NodeId> = e.consumers.iter().copied().filter(is_wanted).collect();
            (!consumers.is_empty()).then(|| Edge { consumers, needs_grad: false, folded: true, ..e.clone() })
        });
        Plan { stages: self.stages.clone(), edges: edges.collect() }
    }

    /// The most bytes of data that a message of `edge` holds for `samples` samples a micro-batch: forward, backward; of a model that
    /// computes in `float`, where values that have a gradient travel as `wire`.
    pub fn message_bytes(&self, graph: &Graph, edge: &Edge, samples: usize, [float, wire]: [DType; 2]) -> [usize; 2] {
        let (dtype, shape) = graph.shape(edge.value, samples, if edge.needs_grad { wire } else { float });
        let bytes = shape.iter().product::<usize>() * dtype.size();
        [bytes, if edge.needs_grad { bytes * edge.stacked() } else { 0 }]
    }
}

fn check_tied(graph: &Graph, stage_of: &[usize]) -> Result<()> {
    let mut user: Vec<Option<NodeId>> = vec![None; graph.params().len()];
    for (n, node) in graph.nodes().iter().enumerate() {
        for &p in &node.params {
            let first = *user[p].get_or_insert(n);
            if stage_of[first] != stage_of[n] {
                let (a, b) = (&graph.nodes()[first].name, &node.name);
                return Err(Error::plan(format!(
                    "{a:?} in stage {} and {b:?} in stage {} share {:?}; they must be in one stage",
                    stage_of[first],
                    stage_of[n],
                    graph.params()[p].name
                )));
            }
        }
    }
    Ok(())
}

fn edges(graph: &Graph, stage_of: &[usize]) -> Vec<Edge> {
    let mut edges = Vec::new();
    for (node, &from) in stage_of.iter().enumerate() {
        for output in 0..graph.output_count(node) {
            let value = Value { node, output };
            let mut by_stage: Vec<(usize, Vec<NodeId>)> = Vec::new();
            for n in graph.consumers(value).iter().copied().filter(|&n| stage_of[n] != from) {
                match by_stage.last_mut() {
                    Some((to, consumers)) if *to == stage_of[n] => consumers.push(n),
                    _ => by_stage.push((stage_of[n], vec![n])),
                }
            }
            let count = by_stage.len();
            let needs_grad = graph.needs_grad(value);
            edges.extend(by_stage.into_iter().enumerate().map(|(i, (to, consumers))| {
                let folded = i + 1 == count || consumers.len() == 1;
                Edge { value, from, to, consumers, needs_grad, folded }
            }));
        }
    }
    edges
}
