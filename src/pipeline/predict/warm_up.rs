//! How many minibatches each stage has in flight.
use super::{Run, Written};
use crate::{
    Result,
    pipeline::{
        plan::Plan,
        schedule::{
            ENDLESS, Kind, Shape, Wiring, prepare,
            simulate::{Costs, StageCost},
        },
    },
};

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
/// As for [`seconds_per_minibatch`](super::seconds_per_minibatch).
pub fn warmed_up(kind: Kind, plan: Plan, costs: &Costs, micro_batches: usize, crowding: f64) -> Result<Plan> {
    if !kind.has_warm_up() {
        return Ok(plan);
    }
    let published = plan.shape()?;
    let run = Run { kind, wiring: &plan.wiring(true), costs, micro_batches, crowding };
    let (warm_up, _) = run.warm_up(&published, 0.0, &|_| true)?;
    Ok(if warm_up == published.warm_up() { plan } else { plan.warmed_up(&warm_up) })
}

/// Seconds a minibatch with some warm-up, if it may be.
type Takes<'a> = dyn Fn(&[usize]) -> Option<f64> + 'a;
/// Whether one is safe: the stages before can feed it, and its messages do not wait for each other.
type IsSafe<'a> = dyn Fn(&[usize]) -> bool + 'a;

impl Run<'_> {
    /// The warm-up, by stage, and the seconds a minibatch with it where nothing waits for its messages to have left: that of `shape`, or
    /// a longer one of those that are `allowed` where it gains. `bound` are seconds that no warm-up falls below.
    ///
    /// # Errors
    /// If the schedule cannot be made for `shape`.
    pub(in crate::pipeline) fn warm_up(
        &self,
        shape: &Shape,
        bound: f64,
        allowed: &dyn Fn(&[usize]) -> bool,
    ) -> Result<(Vec<usize>, f64)> {
        let (kind, start) = (self.kind, shape.warm_up());
        // To write out the messages of all that is tried, and to prove it, would take longer than all else.
        let seconds = |shape: &Shape| self.seconds(shape, Written::Compute);
        let first = seconds(shape)?;
        if !kind.has_warm_up() || first * WORTH <= bound {
            return Ok((start.to_vec(), first));
        }
        let with = |warm_up: &[usize]| Shape::warmed_up(shape.replicas(), warm_up.to_vec());
        let takes = |warm_up: &[usize]| seconds(&with(warm_up).ok().filter(|_| allowed(warm_up))?).ok();
        let endless = if kind.is_synchronous() { self.micro_batches } else { ENDLESS };
        let is_safe =
            |warm_up: &[usize]| with(warm_up).and_then(|longer| prepare(kind, &longer, self.wiring, endless)).is_ok();
        if shape.is_replicated() {
            return Ok(prolonged(start, first, &takes, &is_safe));
        }
        let cores = shape.workers() as f64 / self.crowding.max(1.0);
        let ways = [false, true].map(|others| hiding(self.wiring, self.costs, cores, others));
        Ok(shortened(start, first, &ways, &takes, &is_safe))
    }
}

/// Warm-ups by stage, prolonged as long as one of them gains.
fn prolonged(start: &[usize], mut seconds: f64, takes: &Takes, is_safe: &IsSafe) -> (Vec<usize>, f64) {
    let mut warm_up = start.to_vec();
    for _ in 0..MOST_EXTRA {
        let longer = |stage: usize| {
            let mut longer = warm_up.clone();
            longer[stage] += 1;
            longer
        };
        // Of equals at the latest stage.
        let tried = (0..warm_up.len()).rev().filter_map(|stage| Some((takes(&longer(stage))?, longer(stage))));
        let mut tried: Vec<(f64, Vec<usize>)> = tried.filter(|(t, _)| *t < seconds * WORTH).collect();
        tried.sort_by(|a, b| a.0.total_cmp(&b.0));
        let Some(best) = tried.into_iter().find(|(_, longer)| is_safe(longer)) else { break };
        (seconds, warm_up) = best;
    }
    (warm_up, seconds)
}

/// The fastest of the warm-ups `tried` if it gains anything over the one to `start` from, made as short as it can be without losing that,
/// from the latest stage on.
fn shortened(start: &[usize], first: f64, tried: &[Vec<usize>], takes: &Takes, is_safe: &IsSafe) -> (Vec<usize>, f64) {
    let (mut warm_up, mut seconds, mut fastest) = (start.to_vec(), first, first * WORTH);
    for longer in tried.iter().filter(|longer| *longer != start) {
        if let Some(t) = takes(longer).filter(|t| *t < fastest && is_safe(longer)) {
            (warm_up, seconds, fastest) = (longer.clone(), t, t);
        }
    }
    // Those before a stage that has one less need not be ahead of it by more than they were.
    for stage in (0..warm_up.len()).rev() {
        while warm_up[..=stage].iter().zip(start).all(|(w, least)| w > least) {
            let mut shorter = warm_up.clone();
            shorter[..=stage].iter_mut().for_each(|w| *w -= 1);
            let Some(t) = takes(&shorter).filter(|t| t * WORTH <= fastest && is_safe(&shorter)) else { break };
            (warm_up, seconds) = (shorter, t);
        }
    }
    (warm_up, seconds)
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
