//! What a plan promises: the programs that would run, simulated with the times of a profile and of the links.
use super::{
    plan::Plan,
    planner::Link,
    profile::NodeCost,
    schedule::{
        ENDLESS, Kind, Shape, Wiring, lower, make_for, prepare, simulate,
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
    let shape = plan.shape()?;
    let seconds = seconds_with(kind, plan, &shape, costs, micro_batches, crowding);
    seconds.context(|| {
        format!("{:?} workers a stage, which warm up with {:?} forward passes", shape.replicas(), shape.warm_up())
    })
}

fn seconds_with(
    kind: Kind,
    plan: &Plan,
    shape: &Shape,
    costs: &Costs,
    micro_batches: usize,
    crowding: f64,
) -> Result<f64> {
    let minibatches = match kind.is_synchronous() {
        true => SYNCHRONOUS,
        false if shape.is_replicated() => ROUNDS * (shape.period() + shape.workers()),
        false => ASYNCHRONOUS,
    };
    let (timeline, turn) = timeline(kind, plan, shape, costs, (micro_batches, minibatches), crowding)?;
    Ok(turn as f64 * timeline.seconds_per_micro_batch)
}

/// So many minibatches of so many micro-batches from an empty pipeline to an empty one, and the micro-batches from one minibatch to
/// the next.
fn timeline(
    kind: Kind,
    plan: &Plan,
    shape: &Shape,
    costs: &Costs,
    (micro_batches, minibatches): (usize, usize),
    crowding: f64,
) -> Result<(Timeline, usize)> {
    let (wiring, workers) = (plan.wiring(true), plan.workers());
    let written = if kind.is_synchronous() { 1 } else { minibatches };
    let mut programs = lower(&make_for(kind, shape, micro_batches * written)?.placed(&wiring)?, &wiring)?;
    // Micro-batches from one minibatch to the next. Replicas take turns anew in each, so there may be numbers that none has.
    let mut turn = micro_batches;
    if kind.is_synchronous() {
        // A minibatch is a period.
        turn = micro_batches.next_multiple_of(shape.period());
        programs.micro_batches = turn * minibatches;
        programs.workers.iter_mut().for_each(|p| (p.repeats, p.shift) = (minibatches, turn));
    }
    let cores = (crowding > 1.0).then_some(workers as f64 / crowding);
    Ok((simulate(&programs, &wiring, &Costs { cores, ..costs.clone() })?, turn))
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
    let (whole, _) = timeline(kind, plan, &plan.shape()?, costs, (micro_batches, simulated as usize), crowding)?;
    if simulated == minibatches {
        return Ok((whole.makespan, whole.workers));
    }
    // The pipeline fills and drains once; what lies between repeats itself.
    let (half, _) = timeline(kind, plan, &plan.shape()?, costs, (micro_batches, (LONGEST / 2) as usize), crowding)?;
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

/// The most forward passes by which warm-ups of replicated stages are prolonged.
const MOST_EXTRA: usize = 8;
/// What a forward pass more must gain.
const WORTH: f64 = 0.99;

/// The plan with the warm-up of each stage that the schedule needs so that its stages do not wait for each other: the published one,
/// or a longer one where that gains one part in a hundred.
///
/// - With one worker a stage, what slow links take there and back must fit beside the passes.
/// - Rounds of stages whose workers have no common multiple stand in each other's way: of 4-3 a quarter of the time is lost. There the
///   warm-up is prolonged by a forward pass where it gains most (of equals at the latest stage), as long as one does.
///
/// # Errors
/// As for [`seconds_per_minibatch`].
pub fn warmed_up(kind: Kind, plan: Plan, costs: &Costs, micro_batches: usize, crowding: f64) -> Result<Plan> {
    if !kind.has_warm_up() {
        return Ok(plan);
    }
    let wiring = plan.wiring(true);
    // Seconds, unless it is not safe: the stages before cannot feed it, or its messages wait for each other.
    let takes = |warm_up: &[usize]| -> Result<Option<f64>> {
        let shape = Shape::warmed_up(&replicas_of(&wiring), warm_up.to_vec())?;
        let endless = if kind.is_synchronous() { micro_batches } else { ENDLESS };
        if prepare(kind, &shape, &wiring, endless).is_err() {
            return Ok(None);
        }
        seconds_with(kind, &plan, &shape, costs, micro_batches, crowding).map(Some)
    };
    let published = plan.shape()?;
    let seconds = seconds_with(kind, &plan, &published, costs, micro_batches, crowding)?;
    let warm_up = match published.is_replicated() {
        true => prolonged(published.warm_up(), seconds, &takes)?,
        false => {
            let cores = plan.workers() as f64 / crowding.max(1.0);
            let ways = [false, true].map(|others| hiding(&wiring, costs, cores, others));
            shortened(published.warm_up(), seconds, &ways, &takes)?
        }
    };
    Ok(if warm_up == published.warm_up() { plan } else { plan.warmed_up(&warm_up) })
}

fn replicas_of(wiring: &Wiring) -> Vec<usize> {
    wiring.stages.iter().map(Vec::len).collect()
}

/// Warm-ups by stage, prolonged as long as one of them gains.
fn prolonged(
    published: &[usize],
    mut seconds: f64,
    takes: &dyn Fn(&[usize]) -> Result<Option<f64>>,
) -> Result<Vec<usize>> {
    let mut warm_up = published.to_vec();
    for _ in 0..MOST_EXTRA {
        let mut best: Option<(f64, usize)> = None;
        for stage in (0..warm_up.len()).rev() {
            let mut longer = warm_up.clone();
            longer[stage] += 1;
            if let Some(t) = takes(&longer)?.filter(|t| best.is_none_or(|(b, _)| *t < b)) {
                best = Some((t, stage));
            }
        }
        let Some((t, stage)) = best.filter(|(t, _)| *t < seconds * WORTH) else { break };
        warm_up[stage] += 1;
        seconds = t;
    }
    Ok(warm_up)
}

/// The fastest of the warm-ups `tried` if it gains anything over the `published` one, made as short as it can be without losing that,
/// from the latest stage on.
fn shortened(
    published: &[usize],
    seconds: f64,
    tried: &[Vec<usize>],
    takes: &dyn Fn(&[usize]) -> Result<Option<f64>>,
) -> Result<Vec<usize>> {
    let (mut warm_up, mut fastest) = (published.to_vec(), seconds * WORTH);
    for longer in tried.iter().filter(|longer| *longer != published) {
        if let Some(t) = takes(longer)?.filter(|t| *t < fastest) {
            (warm_up, fastest) = (longer.clone(), t);
        }
    }
    // Those before a stage that has one less need not be ahead of it by more than they were.
    for stage in (0..warm_up.len()).rev() {
        while warm_up[..=stage].iter().zip(published).all(|(w, p)| w > p) {
            let mut shorter = warm_up.clone();
            shorter[..=stage].iter_mut().for_each(|w| *w -= 1);
            if takes(&shorter)?.is_none_or(|t| t * WORTH > fastest) {
                break;
            }
            warm_up = shorter;
        }
    }
    Ok(warm_up)
}

/// The shortest warm-ups of a straight pipeline, by stage, that keep up with its slowest stage or link, on so many cores.
///
/// Stage s begins minibatch k + w − v + 1 after it has ended minibatch k, where w is its warm-up and v that of a later stage t, which
/// turns back there: the passes of all stages from s to t and the messages between them, there and back, fit into w − v + 1 turns.
/// With `others` each message waits for all that pass the same links in a turn.
fn hiding(wiring: &Wiring, costs: &Costs, cores: f64, others: bool) -> Vec<usize> {
    let stages = wiring.stages.len();
    let work = |s: usize| {
        let StageCost { forward, input_grad, weight_grad, step, .. } = costs.stages[s];
        forward + input_grad + weight_grad + step
    };
    // Seconds that the link of each worker is busy: out, in.
    let mut busy = vec![[0.0; 2]; stages];
    for (link, cost) in wiring.edges.iter().zip(&costs.edges) {
        busy[link.from][0] += cost.forward;
        busy[link.to][1] += cost.forward;
        if link.grad {
            busy[link.to][0] += cost.backward;
            busy[link.from][1] += cost.backward;
        }
    }
    // Seconds on the links from a stage to a later one, there and back.
    let mut travel = vec![vec![None::<f64>; stages]; stages];
    for (link, cost) in wiring.edges.iter().zip(&costs.edges) {
        let way = |from: usize, to: usize, alone: f64| {
            cost.latency + if others { busy[from][0].max(busy[to][1]) } else { alone }
        };
        let back = if link.grad { way(link.to, link.from, cost.backward) } else { 0.0 };
        let both = way(link.from, link.to, cost.forward) + back;
        let longest = travel[link.from][link.to].get_or_insert(0.0);
        *longest = longest.max(both);
    }
    let all: f64 = (0..stages).map(work).sum();
    let turn = (0..stages).map(work).chain(busy.into_iter().flatten()).fold(all / cores, f64::max) / WORTH;
    let mut warm_up = vec![0usize; stages];
    // The longest way from a stage to each later one and back.
    let mut ways = vec![vec![None::<f64>; stages]; stages];
    for s in (0..stages).rev() {
        ways[s][s] = Some(work(s));
        for t in s + 1..stages {
            let via = (s + 1..=t).filter_map(|u| Some(travel[s][u]? + ways[u][t]?));
            ways[s][t] = via.reduce(f64::max).map(|way| way + work(s));
            let turns = ways[s][t].map_or(0.0, |way| (way / turn).ceil());
            warm_up[s] = warm_up[s].max((turns as usize + warm_up[t]).saturating_sub(1)).max(warm_up[t] + 1);
        }
    }
    warm_up
}
