//! What a plan promises: the programs that would run, simulated with the times of a profile and of the links.
mod warm_up;

pub use warm_up::warmed_up;

use super::{
    plan::Plan,
    planner::Link,
    profile::NodeCost,
    schedule::{
        Kind, Shape, Wiring, lower, make_for, simulate,
        simulate::{Costs, EdgeCost, StageCost, Timeline, WorkerTime},
    },
};
use crate::{Context, Error, Result, layers::Graph, tensor::DType};

/// Minibatches that show how fast a synchronous schedule repeats.
const SYNCHRONOUS: usize = 8;
/// Minibatches that show the steady state of an asynchronous schedule.
const ASYNCHRONOUS: usize = 1 << 20;
/// Rounds of all stages that do where they are replicated: the programs have no period in common that could be skipped.
const ROUNDS: usize = 16;

/// What the stages and edges of a plan take for micro-batches of `samples` samples, `micro_batches` of which share an update.
/// `nodes` are what all nodes cost one of them ([`NodeCost::per_micro_batch`]), `link` gives the link between two workers; `types` are
/// those that the model computes in, and that values which have a gradient travel as. `sums` are the seconds that a sum of each stage's
/// gradients takes of a worker's core, if they were measured; else it is taken for as long as an update, which moves as many bytes.
///
/// # Errors
/// If the costs are not those of all nodes.
pub fn costs(
    graph: &Graph,
    plan: &Plan,
    nodes: &[NodeCost],
    link: &dyn Fn(usize, usize) -> Link,
    samples: usize,
    micro_batches: usize,
    types: [DType; 2],
    sums: Option<&[f64]>,
) -> Result<Costs> {
    if nodes.len() != graph.nodes().len() {
        return Err(Error::plan(format!("costs of {} nodes for a model of {}", nodes.len(), graph.nodes().len())));
    }
    let wiring = plan.wiring(true);
    // Of the pairs of workers in two groups the slowest link.
    let slowest = |from: &[usize], to: &[usize]| {
        let pairs = from.iter().flat_map(|&a| to.iter().map(move |&b| (a, b))).filter(|(a, b)| a != b);
        pairs.map(|(a, b)| link(a, b)).reduce(Link::and)
    };
    let stages = plan.stages().iter().enumerate().map(|(s, stage)| {
        let sum = |time: fn(&NodeCost) -> f64| -> f64 { stage.nodes.iter().map(|&n| time(&nodes[n])).sum() };
        let step = micro_batches as f64 * sum(|c| c.update);
        let [adding, reduce] = slowest(&stage.workers, &stage.workers).map_or([0.0; 2], |link| {
            let adding = sums.and_then(|sums| sums.get(s).copied()).unwrap_or(step);
            let last_first: Vec<&NodeCost> = stage.nodes.iter().rev().map(|&n| &nodes[n]).collect();
            [adding, exposed(&last_first, stage.workers.len(), link, adding)]
        });
        StageCost {
            forward: sum(|c| c.forward),
            input_grad: sum(|c| c.input_grad),
            weight_grad: sum(|c| c.weight_grad),
            step,
            sum: adding,
            reduce,
        }
    });
    let edge = |edge: &super::plan::Edge| {
        let workers = |stage: usize| &wiring.stages[stage][..];
        let Some(Link { latency, bandwidth }) = slowest(workers(edge.from), workers(edge.to)) else {
            return EdgeCost::default();
        };
        let [forward, backward] = plan.message_bytes(graph, edge, samples, types);
        let (forward, backward) = (forward as f64 / bandwidth, backward as f64 / bandwidth);
        EdgeCost { forward, backward, latency, ..EdgeCost::default() }
    };
    Ok(Costs { stages: stages.collect(), edges: plan.edges().iter().map(edge).collect(), ..Costs::default() })
}

/// Seconds for which the workers of a stage wait for the sum of their gradients after B and the `adding`, of nodes in the order of B: each
/// gradient is on its way as soon as it is made, 2(R−1)/R of it in and out of every worker, there and back, while the worker adds up its
/// part of the adding and makes the next ones.
fn exposed(nodes: &[&NodeCost], replicas: usize, link: Link, adding: f64) -> f64 {
    let moved = 2.0 * (replicas as f64 - 1.0) / replicas as f64;
    let bytes: f64 = nodes.iter().map(|node| node.param_bytes as f64).sum();
    let (mut done, mut sent) = (0.0, 0.0f64);
    for node in nodes {
        done += node.input_grad + node.weight_grad;
        sent = sent.max(done) + moved * node.param_bytes as f64 / link.bandwidth;
        done += adding * node.param_bytes as f64 / bytes.max(1.0);
    }
    (sent - done).max(0.0) + 2.0 * link.latency
}

/// Seconds from one minibatch of `micro_batches` micro-batches to the next.
///
/// `costs` are what a worker takes on a core of its own; there are `crowding` of them for each core.
///
/// # Errors
/// If the schedule cannot be made for the plan.
pub fn seconds_per_minibatch(
    kind: Kind,
    plan: &Plan,
    costs: &Costs,
    micro_batches: usize,
    crowding: f64,
) -> Result<f64> {
    let (shape, wiring) = (plan.shape()?, plan.wiring(true));
    let run = Run { kind, wiring: &wiring, costs, micro_batches, crowding };
    run.seconds(&shape, Written::Messages).context(|| {
        format!("{:?} workers a stage, which warm up with {:?} forward passes", shape.replicas(), shape.warm_up())
    })
}

/// What is written out of programs to simulate.
#[derive(Clone, Copy, PartialEq)]
enum Written {
    /// Passes and updates, whose messages follow from the wiring.
    Compute,
    /// Messages too.
    Messages,
}

/// A schedule on the workers of some wiring, `crowding` of them for each core; a synchronous one cuts minibatches into micro-batches.
pub(super) struct Run<'a> {
    pub(super) kind: Kind,
    pub(super) wiring: &'a Wiring,
    pub(super) costs: &'a Costs,
    pub(super) micro_batches: usize,
    pub(super) crowding: f64,
}

impl Run<'_> {
    /// Seconds from one minibatch to the next.
    fn seconds(&self, shape: &Shape, written: Written) -> Result<f64> {
        let minibatches = match self.kind.is_synchronous() {
            true => SYNCHRONOUS,
            false if shape.is_replicated() => ROUNDS * (shape.period() + shape.workers()),
            false => ASYNCHRONOUS,
        };
        let (timeline, turn) = self.timeline(shape, minibatches, written)?;
        Ok(turn as f64 * timeline.seconds_per_micro_batch)
    }

    /// So many minibatches from an empty pipeline to an empty one, and the micro-batches from one minibatch to the next.
    fn timeline(&self, shape: &Shape, minibatches: usize, written: Written) -> Result<(Timeline, usize)> {
        let &Run { kind, wiring, costs, micro_batches, crowding } = self;
        let at_once = if kind.is_synchronous() { 1 } else { minibatches };
        let mut programs = make_for(kind, shape, micro_batches * at_once)?.placed(wiring)?;
        if written == Written::Messages {
            programs = lower(&programs, wiring)?;
        }
        // Micro-batches from one minibatch to the next. Replicas take turns anew in each, so there may be numbers that none has.
        let mut turn = micro_batches;
        if kind.is_synchronous() {
            // A minibatch is a period.
            turn = micro_batches.next_multiple_of(shape.period());
            programs.micro_batches = turn * minibatches;
            programs.workers.iter_mut().for_each(|p| (p.repeats, p.shift) = (minibatches, turn));
        }
        let cores = (crowding > 1.0).then_some(shape.workers() as f64 / crowding);
        Ok((simulate(&programs, wiring, &Costs { cores, ..costs.clone() })?, turn))
    }
}

/// Minibatches beyond which a run is simulated shorter and prolonged by what its second half takes.
const LONGEST: u64 = 256;

/// Seconds that `minibatches` take from an empty pipeline until it is empty again, and where the time of each worker goes.
///
/// # Errors
/// As for [`seconds_per_minibatch`], or if there is no minibatch.
pub fn run_of(
    kind: Kind,
    plan: &Plan,
    costs: &Costs,
    micro_batches: usize,
    crowding: f64,
    minibatches: u64,
) -> Result<(f64, Vec<WorkerTime>)> {
    let simulated = minibatches.min(LONGEST);
    let (wiring, shape) = (plan.wiring(true), plan.shape()?);
    let run = Run { kind, wiring: &wiring, costs, micro_batches, crowding };
    let (whole, _) = run.timeline(&shape, simulated as usize, Written::Messages)?;
    if simulated == minibatches {
        return Ok((whole.makespan, whole.workers));
    }
    // The pipeline fills and drains once; what lies between repeats itself.
    let (half, _) = run.timeline(&shape, (LONGEST / 2) as usize, Written::Messages)?;
    let more = (minibatches - simulated) as f64 / (LONGEST - LONGEST / 2) as f64;
    let longer = |long: f64, short: f64| long + more * (long - short);
    let workers = whole.workers.iter().zip(&half.workers).map(|(a, b)| WorkerTime {
        busy: longer(a.busy, b.busy),
        communication: longer(a.communication, b.communication),
        elapsed: longer(a.elapsed, b.elapsed),
        blocked: longer(a.blocked, b.blocked),
        end: longer(a.end, b.end),
        last: longer(a.last, b.last),
        ..*a
    });
    Ok((longer(whole.makespan, half.makespan), workers.collect()))
}
