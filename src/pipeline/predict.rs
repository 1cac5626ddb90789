//! What a plan promises: the programs that would run, simulated with the times of a profile and of the links.
use super::{
    plan::Plan,
    planner::Link,
    profile::NodeCost,
    schedule::{
        Kind, lower, make, simulate,
        simulate::{Costs, EdgeCost, StageCost},
    },
};
use crate::{Error, Result, layers::Graph, tensor::DType};

/// Minibatches that show how fast a synchronous schedule repeats.
const SYNCHRONOUS: usize = 8;
/// Minibatches that show the steady state of an asynchronous schedule.
const ASYNCHRONOUS: usize = 1 << 20;

/// What the stages and edges of a plan take for micro-batches of `samples` samples, `micro_batches` of which share an update.
/// `nodes` are what all nodes cost one of them ([`NodeCost::per_micro_batch`]), `link` gives the link between two workers.
///
/// # Errors
/// If the costs are not those of all nodes, or a stage has several workers.
pub fn costs(
    graph: &Graph,
    plan: &Plan,
    nodes: &[NodeCost],
    link: &dyn Fn(usize, usize) -> Link,
    samples: usize,
    micro_batches: usize,
    dtype: DType,
) -> Result<Costs> {
    if nodes.len() != graph.nodes().len() {
        return Err(Error::plan(format!("costs of {} nodes for a model of {}", nodes.len(), graph.nodes().len())));
    }
    let wiring = plan.wiring(true);
    let stages = plan.stages().iter().map(|stage| {
        let sum = |time: fn(&NodeCost) -> f64| -> f64 { stage.nodes.iter().map(|&n| time(&nodes[n])).sum() };
        StageCost {
            forward: sum(|c| c.forward),
            input_grad: sum(|c| c.input_grad),
            weight_grad: sum(|c| c.weight_grad),
            step: micro_batches as f64 * sum(|c| c.update),
        }
    });
    let edge = |edge: &super::plan::Edge| {
        let worker = |stage| {
            wiring.worker(stage).ok_or_else(|| Error::plan(format!("stage {stage} must lie on exactly one worker")))
        };
        let (from, to) = (worker(edge.from)?, worker(edge.to)?);
        if from == to {
            return Ok(EdgeCost::default());
        }
        let [forward, backward] = plan.message_bytes(graph, edge, samples, dtype);
        let Link { latency, bandwidth } = link(from, to);
        Ok(EdgeCost { forward: forward as f64 / bandwidth, backward: backward as f64 / bandwidth, latency })
    };
    Ok(Costs {
        stages: stages.collect(),
        edges: plan.edges().iter().map(edge).collect::<Result<_>>()?,
        ..Costs::default()
    })
}

/// Seconds from one minibatch of `micro_batches` micro-batches to the next.
///
/// `costs` were measured with all workers busy, `crowding` of them on each core: one whose neighbours wait is faster by as much, all
/// of them together are not.
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
    let (wiring, workers) = (plan.wiring(true), plan.workers());
    let minibatches = if kind.is_synchronous() { 1 } else { ASYNCHRONOUS };
    let mut programs = lower(&make(kind, workers, micro_batches * minibatches)?.placed(&wiring)?, &wiring)?;
    if kind.is_synchronous() {
        // A minibatch is a period.
        programs.micro_batches *= SYNCHRONOUS;
        programs.workers.iter_mut().for_each(|p| p.repeats = SYNCHRONOUS);
    }
    let cores = (crowding > 1.0).then_some(workers as f64 / crowding);
    let timeline = simulate(&programs, &wiring, &Costs { cores, ..costs.faster(crowding) })?;
    Ok(micro_batches as f64 * timeline.seconds_per_micro_batch)
}
