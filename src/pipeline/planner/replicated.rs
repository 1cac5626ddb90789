//! The default planner: stages of any part of the graph, each on any number of neighbouring workers.
use super::{
    compat::plan_compat,
    cost::{Judged, Part, judge, plan_of, shape_of},
    cuts::{Cut, cuts},
    mode::Mode,
    sweep::{Caps, Goal, Sweeper, Swept},
};
use crate::{
    Error, Result,
    layers::Graph,
    pipeline::{
        plan::Plan,
        profile::CostGraph,
        topology::{Topology, Worker},
    },
};
use std::cmp::Ordering;

/// What a plan may not exceed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Limits {
    /// The most stages.
    pub stages: Option<usize>,
    /// The most bytes that a worker holds.
    pub memory: Option<f64>,
    /// One worker a stage.
    pub straight: bool,
}

/// A plan, and what it costs.
#[derive(Clone, Debug)]
pub struct Proposal {
    /// What it was proposed as.
    pub name: String,
    /// The stages, in order.
    pub stages: Vec<Part>,
    /// What they cost.
    pub judged: Judged,
}

/// Times that differ by less than this part of them are equal.
pub(super) const EQUAL: f64 = 1e-9;
/// Steps of dynamic programming that take less than a second: the square of the cuts times that of the workers, for each order of
/// these.
const STEPS: f64 = 1e9;
/// The most cuts of which all pairs are looked at.
const MOST_CUTS: usize = 2000;
/// Cuts of the graph that is planned first, in no time, for a bound.
pub(super) const FEW: usize = 160;
/// Workers of which all orders are tried, if they are unequal.
const ALL_ORDERS: usize = 5;
/// How many of the fastest plans of a search are told.
const RUNNERS_UP: usize = 5;

impl Limits {
    /// # Errors
    /// If a limit is none that can be.
    pub(super) fn check(&self) -> Result<()> {
        if self.stages == Some(0) {
            return Err(Error::plan("0 stages asked for; 1 or more expected"));
        }
        if let Some(memory) = self.memory.filter(|m| m.is_nan() || *m <= 0.0) {
            return Err(Error::plan(format!("{memory} bytes of memory for a worker; more than 0 expected")));
        }
        Ok(())
    }

    /// Which of the limits that are not of memory these stages break, if any.
    pub(super) fn broken_by(&self, stages: &[Part]) -> Option<String> {
        if let Some(most) = self.stages.filter(|most| stages.len() > *most) {
            return Some(format!("{} stages, {most} at most asked for", stages.len()));
        }
        let is_straight = stages.iter().all(|s| s.workers.len() == 1);
        (self.straight && !is_straight).then(|| "one worker a stage asked for".to_string())
    }
}

impl Proposal {
    fn new(name: &str, graph: &CostGraph, topology: &Topology, stages: Vec<Part>) -> Result<Proposal> {
        Ok(Proposal { name: name.to_string(), judged: judge(graph, topology, &stages)?, stages })
    }

    /// The replicas of each stage, joined by dashes: `15-1`.
    pub fn shape(&self) -> String {
        shape_of(&self.stages)
    }

    /// The workers of all stages.
    pub fn workers(&self) -> usize {
        self.stages.iter().map(|s| s.workers.len()).sum()
    }

    /// The plan for the model that it was made for ([`CostGraph::of_model`]).
    ///
    /// # Errors
    /// If it is none for it: see [`Plan::new`].
    pub fn plan(&self, graph: &Graph) -> Result<Plan> {
        plan_of(&self.stages, graph)
    }

    /// Whether it is the better one: faster; else on fewer workers; else with fewer stages; else with less memory.
    fn is_better(&self, other: &Proposal) -> bool {
        let (a, b) = (self.judged.seconds(), other.judged.seconds());
        if a < b * (1.0 - EQUAL) || b < a * (1.0 - EQUAL) {
            return a < b;
        }
        let rest = |p: &Proposal| (p.workers(), p.stages.len(), p.judged.most_memory());
        rest(self) < rest(other)
    }

    /// The limit that it breaks, if any.
    fn breaks(&self, topology: &Topology, limits: &Limits) -> Option<String> {
        for (stage, &held) in self.stages.iter().zip(&self.judged.memory) {
            let room = stage.workers.iter().map(|&w| topology.worker(w).memory);
            let room = room.fold(limits.memory.unwrap_or(f64::INFINITY), f64::min);
            if held > room {
                return Some(format!("a worker would hold {:.0} of {room:.0} bytes", held.ceil()));
            }
        }
        limits.broken_by(&self.stages)
    }

    /// Why it is not `best`, which is chosen within `limits`.
    pub fn lost_to(&self, best: &Proposal, topology: &Topology, limits: &Limits) -> String {
        if let Some(broken) = self.breaks(topology, limits) {
            return broken;
        }
        if self.judged.seconds() > best.judged.seconds() * (1.0 + EQUAL) {
            return self.judged.bottleneck();
        }
        let more = |what: &str, a: usize, b: usize| (a > b).then(|| format!("as fast, on {a} {what} rather than {b}"));
        more("workers", self.workers(), best.workers())
            .or_else(|| more("stages", self.stages.len(), best.stages.len()))
            .unwrap_or_else(|| format!("as fast, with {:.0} bytes a worker", self.judged.most_memory().ceil()))
    }
}

/// The best plan for an asynchronous 1F1B schedule, and the runners-up, best first; some are told although they break a limit.
///
/// Of plans whose times differ by less than one part in 10⁹ it takes the one with fewer workers, then with fewer stages, then the one
/// whose fullest worker holds the fewest bytes. It is the best of all plans whose stages lie on neighbouring workers (the last one on
/// the last workers; unequal workers in any order, if there are five at most) if there are no more ways to cut the graph in two than a
/// second suffices for, nearly 2000 for 16 workers; else of those that cut it along two orders of its nodes. It is never slower than
/// one stage on all workers, or than the published recurrence's plan, where these keep to the limits.
///
/// # Errors
/// If a limit is none that can be, or no plan keeps to them: then it says what would.
pub fn plan_replicated(graph: &CostGraph, topology: &Topology, limits: &Limits) -> Result<(Proposal, Vec<Proposal>)> {
    limits.check()?;
    let mut rivals = rivals(graph, topology)?;
    let orders = orders(topology);
    let most = (STEPS / orders.len() as f64).sqrt() / topology.workers() as f64;
    let (few, fine) = (cuts(graph, FEW), cuts(graph, (most as usize).clamp(FEW, MOST_CUTS)));
    for order in &orders {
        if fine.len() > 2 * FEW {
            // What few cuts come to spares most of the work with many.
            rivals.extend(Search::new(graph, topology, limits, &few, order).best(&rivals)?);
        }
        let search = Search::new(graph, topology, limits, &fine, order);
        rivals.extend(search.straight()?);
        rivals.extend(search.best(&rivals)?);
    }
    let fitting = rivals.iter().filter(|r| r.breaks(topology, limits).is_none());
    let Some(best) = fitting.reduce(|a, b| if b.is_better(a) { b } else { a }).cloned() else {
        return Err(Search::new(graph, topology, limits, &fine, &orders[0]).what_would());
    };
    // The best of each shape, and the best overall not once more.
    let rank = |p: &Proposal| (p.judged.seconds(), p.workers(), p.stages.len(), p.judged.most_memory());
    rivals.sort_by(|a, b| rank(a).partial_cmp(&rank(b)).unwrap_or(Ordering::Equal));
    let mut others: Vec<Proposal> = Vec::new();
    for rival in rivals {
        let is_known = |p: &Proposal| p.shape() == rival.shape();
        if !is_known(&best) && !others.iter().any(is_known) {
            others.push(rival);
        }
    }
    Ok((best, others))
}

/// Plans that are known before any search: data parallelism, and what the published recurrence answers, if it does.
fn rivals(graph: &CostGraph, topology: &Topology) -> Result<Vec<Proposal>> {
    let all = Part { nodes: (0..graph.nodes().len()).collect(), workers: (0..topology.workers()).collect() };
    let mut rivals = vec![Proposal::new("data parallelism", graph, topology, vec![all])?];
    // It knows nothing of places where a graph may not be cut.
    if graph.cuts_in_order().is_none() {
        for (name, transfers) in [("published recurrence", true), ("published recurrence without transfers", false)] {
            // Where the graph can be cut in too many ways for it, it has no answer.
            let Ok(found) = plan_compat(graph, topology, false, transfers) else { break };
            rivals.push(Proposal::new(name, graph, topology, found.stages)?);
        }
    }
    Ok(rivals)
}

/// The orders in which workers are given to stages. Of equal ones there is one; of few unequal ones all that differ, of many some: as
/// they are, and by speed and by memory, either way, with groups left together or not (then the first ones may be left out).
pub(super) fn orders(topology: &Topology) -> Vec<Vec<usize>> {
    let all: Vec<usize> = (0..topology.workers()).collect();
    if topology.is_even() {
        return vec![all];
    }
    if all.len() <= ALL_ORDERS {
        return arrangements(topology, &all);
    }
    let mut orders = vec![all.clone()];
    let keys: [fn(Worker) -> f64; 4] = [|w| w.speed, |w| -w.speed, |w| w.memory, |w| -w.memory];
    for key in keys {
        let least = |w: usize, level: usize| {
            let group = topology.group(level);
            let members = w / group * group..(w / group + 1) * group;
            (members.map(|w| key(topology.worker(w))).fold(f64::INFINITY, f64::min), w / group)
        };
        // By the outermost groups first, or by the workers alone.
        for levels in [topology.levels().len(), 1] {
            let rank = |w: usize| (0..levels).rev().map(move |l| least(w, l)).collect::<Vec<_>>();
            let mut order = all.clone();
            order.sort_by(|&a, &b| rank(a).partial_cmp(&rank(b)).unwrap_or(Ordering::Equal));
            orders.push(order);
        }
    }
    orders.sort_unstable();
    orders.dedup();
    orders
}

/// All orders of `rest` that differ in more than the places of equal workers of one innermost group.
fn arrangements(topology: &Topology, rest: &[usize]) -> Vec<Vec<usize>> {
    if rest.is_empty() {
        return vec![Vec::new()];
    }
    let innermost = topology.levels()[0].count;
    let is_same = |a: usize, b: usize| a / innermost == b / innermost && topology.worker(a) == topology.worker(b);
    let mut orders = Vec::new();
    for (at, &first) in rest.iter().enumerate().filter(|&(at, &w)| !rest[..at].iter().any(|&v| is_same(v, w))) {
        let others: Vec<usize> = [&rest[..at], &rest[at + 1..]].concat();
        let behind = arrangements(topology, &others);
        orders.extend(behind.into_iter().map(|order| [vec![first], order].concat()));
    }
    orders
}

/// A search among some cuts.
struct Search<'a> {
    graph: &'a CostGraph,
    topology: &'a Topology,
    limits: &'a Limits,
    sweeper: Sweeper<'a>,
}

impl<'a> Search<'a> {
    fn new(
        graph: &'a CostGraph,
        topology: &'a Topology,
        limits: &'a Limits,
        cuts: &'a [Cut],
        order: &'a [usize],
    ) -> Search<'a> {
        let sweeper = Sweeper::new(Mode::PIPEDREAM, cuts, topology, order, false);
        Search { graph, topology, limits, sweeper }
    }

    fn memory(&self) -> f64 {
        self.limits.memory.unwrap_or(f64::INFINITY)
    }

    fn stages(&self) -> usize {
        self.limits.stages.unwrap_or(usize::MAX)
    }

    fn sweep(&self, goal: Goal, seconds: f64) -> Swept {
        let caps = Caps { seconds, memory: self.memory(), straight: self.limits.straight };
        self.sweeper.sweep(goal, caps)
    }

    fn proposal(&self, name: &str, swept: &Swept, workers: usize, replicas: usize) -> Result<Proposal> {
        Proposal::new(name, self.graph, self.topology, self.sweeper.stages(swept, workers, replicas))
    }

    /// The best plan that is not slower than all `rivals` that fit, last, and the fastest ones of other shapes.
    fn best(&self, rivals: &[Proposal]) -> Result<Vec<Proposal>> {
        let seconds =
            rivals.iter().filter(|r| r.breaks(self.topology, self.limits).is_none()).map(|r| r.judged.seconds());
        let bound = seconds.fold(f64::INFINITY, f64::min) * (1.0 + EQUAL);
        let swept = self.sweep(Goal::Fastest, bound);
        let mut fastest: Vec<_> = swept.plans().collect();
        fastest.sort_by(|a, b| a.0.partial_cmp(&b.0).unwrap_or(Ordering::Equal));
        let Some(&((seconds, _), ..)) = fastest.first() else { return Ok(Vec::new()) };
        let mut found = Vec::new();
        for &(_, workers, replicas) in fastest.iter().take(RUNNERS_UP) {
            found.push(self.proposal("replicated", &swept, workers, replicas)?);
        }
        found.extend(self.leanest(seconds, bound)?);
        Ok(found)
    }

    /// The best plan of those that have at most as many stages as allowed; without such a limit it takes `least` seconds, with one
    /// up to `most`.
    fn leanest(&self, least: f64, most: f64) -> Result<Option<Proposal>> {
        let mut low = least;
        let mut found = self.within(least)?;
        if found.is_none() {
            found = self.within(most)?;
            // Halving ends at the latest when no number lies between the two.
            while let Some(high) = found.as_ref().map(|p| p.judged.seconds()).filter(|h| *h > low * (1.0 + EQUAL)) {
                let middle = low + (high - low) / 2.0;
                match self.within(middle)? {
                    Some(better) if better.judged.seconds() < high => found = Some(better),
                    _ if middle > low => low = middle,
                    _ => break,
                }
            }
        }
        Ok(found)
    }

    /// The leanest plan that takes at most `seconds` and has at most as many stages as allowed.
    fn within(&self, seconds: f64) -> Result<Option<Proposal>> {
        let swept = self.sweep(Goal::Leanest, seconds * (1.0 + EQUAL));
        let fewest = swept.plans().filter(|p| p.0.0 <= self.stages() as f64);
        let best = fewest.min_by(|a, b| (a.1, a.0).partial_cmp(&(b.1, b.0)).unwrap_or(Ordering::Equal));
        best.map(|(_, workers, replicas)| self.proposal("replicated", &swept, workers, replicas)).transpose()
    }

    /// The fastest straight plan, whatever the limits.
    fn straight(&self) -> Result<Option<Proposal>> {
        let swept =
            self.sweeper.sweep(Goal::Fastest, Caps { seconds: f64::INFINITY, memory: f64::INFINITY, straight: true });
        let best = swept.plans().min_by(|a, b| a.0.partial_cmp(&b.0).unwrap_or(Ordering::Equal));
        best.map(|(_, workers, _)| self.proposal("straight", &swept, workers, 1)).transpose()
    }

    /// Says what would fit, where nothing does.
    fn what_would(&self) -> Error {
        let free = Caps { seconds: f64::INFINITY, memory: f64::INFINITY, straight: self.limits.straight };
        let swept = self.sweeper.sweep(Goal::Smallest, free);
        let least = swept.plans().min_by(|a, b| a.0.partial_cmp(&b.0).unwrap_or(Ordering::Equal));
        let Some(((bytes, _), workers, replicas)) = least else {
            return Error::plan("no plan: the graph cannot be cut");
        };
        let parts = self.sweeper.stages(&swept, workers, replicas);
        let most = (0..self.topology.workers()).map(|w| self.topology.worker(w).memory).fold(0.0, f64::max);
        let (memory, bytes) = (self.memory().min(most), bytes.ceil());
        if bytes > memory {
            return Error::plan(format!(
                "no plan fits into {memory:.0} bytes a worker: the least that one needs on {} workers is {bytes:.0}, in {} stages",
                self.topology.workers(),
                parts.len()
            ));
        }
        Error::plan(format!(
            "no plan of {} fits into what the workers hold; one of {} stages needs {bytes:.0} bytes on each of its workers",
            self.limits.stages.map_or("any number of stages".to_string(), |s| format!("at most {s} stages")),
            parts.len()
        ))
    }
}
