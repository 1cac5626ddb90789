//! One plan under one schedule, tried by the simulator.
use super::{
    cost::{Judged, Part, all_reduce, bytes_held, judge_as, link_among},
    joint::{Choice, Space},
    mode::Mode,
};
use crate::{
    Error, Result,
    pipeline::{
        predict::Run,
        profile::{CostGraph, CostNode},
        schedule::{
            ENDLESS, Link, Shape, Wiring, prepare,
            simulate::{Costs, EdgeCost, StageCost},
            verify::StageFacts,
        },
        topology::Topology,
    },
};
use std::collections::BTreeMap;

/// A plan, and what the simulator needs to know of it.
pub(super) struct Trial<'a> {
    pub(super) mode: Mode,
    pub(super) stages: Vec<Part>,
    judged: Judged,
    space: &'a Space,
    wiring: Wiring,
    costs: Costs,
    /// By stage, bytes that a worker has room for.
    room: Vec<f64>,
}

const TOO_STALE: &str = "it needs more weight versions, or staler ones, than asked for";

impl<'a> Trial<'a> {
    /// # Errors
    /// If the stages are no plan.
    pub(super) fn new(
        mode: Mode,
        graph: &CostGraph,
        topology: &Topology,
        space: &'a Space,
        stages: Vec<Part>,
    ) -> Result<Trial<'a>> {
        let judged = judge_as(mode, graph, topology, &stages)?;
        let (wiring, costs) = staged(graph, topology, &stages);
        let limit = space.limits.memory.unwrap_or(f64::INFINITY);
        let room = |s: &Part| s.workers.iter().map(|&w| topology.worker(w).memory).fold(limit, f64::min);
        let room = stages.iter().map(room).collect();
        Ok(Trial { mode, stages, judged, space, wiring, costs, room })
    }

    /// Bytes that each worker of a stage holds with so many micro-batches in flight and versions.
    fn memory(&self, stage: usize, in_flight: usize, versions: usize) -> f64 {
        bytes_held((in_flight, self.judged.in_flight_bytes[stage]), (versions, self.judged.param_bytes[stage]))
    }

    /// Bytes that each of its workers holds with this warm-up.
    fn memory_with(&self, stage: usize, warm_up: usize) -> f64 {
        let in_flight = self.mode.in_flight(warm_up, self.stages[stage].workers.len());
        self.memory(stage, in_flight, self.mode.versions(warm_up))
    }

    /// The shortest warm-up of a stage: where the plan has no say in it, the published one.
    fn shortest(&self, stage: usize) -> usize {
        if self.mode.schedule.has_warm_up() { 0 } else { self.judged.warm_up[stage] }
    }

    /// Says so if a worker of a stage would hold more than it has room for.
    fn too_full(&self, held: impl Fn(usize) -> f64) -> Option<String> {
        let over = (0..self.stages.len()).map(|s| (s, held(s))).find(|&(s, held)| held > self.room[s]);
        over.map(|(s, held)| {
            format!("a worker of stage {s} would hold {:.0} of {:.0} bytes", held.ceil(), self.room[s])
        })
    }

    /// Whether a stage keeps to the limits with this warm-up.
    fn fits(&self, stage: usize, warm_up: usize) -> bool {
        self.memory_with(stage, warm_up) <= self.room[stage]
            && self.space.versions.is_none_or(|most| self.mode.versions(warm_up) <= most)
            && self.space.staleness.is_none_or(|most| self.mode.staleness(warm_up) <= most)
    }

    /// Bytes that the fullest worker holds at least.
    pub(super) fn least_memory(&self) -> f64 {
        (0..self.stages.len()).map(|s| self.least_of(s)).fold(0.0, f64::max)
    }

    /// The longest warm-ups within the limits that are not above the published ones.
    fn start(&self) -> Option<Vec<usize>> {
        let mut most = usize::MAX;
        let mut start = Vec::new();
        for (s, part) in self.stages.iter().enumerate() {
            let (published, least) = (self.judged.warm_up[s], self.shortest(s));
            let replicas = part.workers.len();
            // A stage is not ahead of the one that feeds it.
            let fed = (least..=published.min(most / replicas).max(least)).rev().find(|&w| self.fits(s, w))?;
            most = fed.saturating_mul(replicas).saturating_add(replicas - 1);
            start.push(fed);
        }
        Some(start)
    }

    /// The limit that it breaks, if any.
    pub(super) fn broken(&self) -> Option<String> {
        if let Some(broken) = self.space.limits.broken_by(&self.stages) {
            return Some(broken);
        }
        let (used, all) = (self.wiring.stages.iter().map(Vec::len).sum::<usize>(), self.space.workers);
        if let Some(all) = all.filter(|all| used < *all) {
            return Some(format!("{used} of {all} workers have work, all asked for"));
        }
        if self.start().is_some() {
            return None;
        }
        Some(self.too_full(|s| self.least_of(s)).unwrap_or_else(|| TOO_STALE.to_string()))
    }

    /// Bytes that a worker of a stage holds at least.
    fn least_of(&self, s: usize) -> f64 {
        self.memory_with(s, self.shortest(s))
    }

    /// Seconds per minibatch that no warm-up falls below.
    pub(super) fn least(&self) -> f64 {
        let steady = self.mode.micro_batches as f64 * self.judged.seconds();
        if !self.mode.schedule.is_synchronous() {
            return steady;
        }
        // The first micro-batch comes to each stage through those before it, and the last one goes back through them.
        let mut way = 0.0;
        let mut least = steady;
        for (s, cost) in self.costs.stages.iter().enumerate() {
            let most = self.mode.micro_batches.div_ceil(self.stages[s].workers.len()) as f64;
            let passes = cost.forward + cost.input_grad + cost.weight_grad;
            least = least.max(way + most * passes);
            way += passes;
        }
        least
    }

    /// What takes longest by the costs, in words.
    pub(super) fn bottleneck(&self) -> String {
        let per = self.mode.micro_batches as f64 * self.judged.seconds();
        let all = self.least();
        if all > per * 1.001 {
            return format!("filling and draining takes {:.0} % of the time", 100.0 * (1.0 - per / all));
        }
        self.judged.bottleneck()
    }

    /// Whether any stage has several workers.
    pub(super) fn is_replicated(&self) -> bool {
        self.stages.iter().any(|s| s.workers.len() > 1)
    }

    /// Simulates it, with the warm-up that suits it if that is to be `thorough`, else with the published one or what of it fits.
    ///
    /// # Errors
    /// If it breaks a limit, or cannot be made or waits for ever under the schedule.
    pub(super) fn run(&self, thorough: bool) -> Result<Choice> {
        let Mode { schedule, micro_batches } = self.mode;
        let start = self.start().ok_or_else(|| Error::plan("no warm-up keeps to the limits"))?;
        let replicas: Vec<usize> = self.stages.iter().map(|s| s.workers.len()).collect();
        let shape = Shape::warmed_up(&replicas, start)?;
        let run = Run {
            kind: schedule,
            wiring: &self.wiring,
            costs: &self.costs,
            micro_batches,
            crowding: self.space.crowding,
        };
        let allowed = |warm_up: &[usize]| warm_up.iter().enumerate().all(|(s, &w)| self.fits(s, w));
        let least = self.least();
        let (warm_up, seconds) = run.warm_up(&shape, if thorough { least } else { f64::INFINITY }, &allowed)?;
        let shape = Shape::warmed_up(&replicas, warm_up)?;
        let endless = if schedule.is_synchronous() { micro_batches } else { ENDLESS };
        let (_, facts) = prepare(schedule, &shape, &self.wiring, endless)?;
        let stages = 0..self.stages.len();
        let of = |s: usize| facts.stages.iter().filter(move |f| f.stage == s);
        let most = |s: usize, what: fn(&StageFacts) -> usize| of(s).map(what).max().unwrap_or(0);
        let in_flight = |s: usize| of(s).map(|f| facts.workers[f.worker].peak_activations).max().unwrap_or(0);
        let versions: Vec<usize> = stages.clone().map(|s| most(s, |f| f.weight_versions)).collect();
        let seconds = seconds.max(least);
        let waits = 1.0 - least / seconds;
        let choice = Choice {
            mode: self.mode,
            judged: Judged {
                warm_up: shape.warm_up().to_vec(),
                memory: stages.clone().map(|s| self.memory(s, in_flight(s), versions[s])).collect(),
                ..self.judged.clone()
            },
            seconds,
            staleness: stages.map(|s| most(s, |f| f.staleness)).collect(),
            bottleneck: match waits > 0.01 {
                true => format!("its stages wait {:.0} % of the time beyond what they must", 100.0 * waits),
                false => self.bottleneck(),
            },
            stages: self.stages.clone(),
            versions,
        };
        // Of schedules without a warm-up of the plan's only the proof tells.
        let is_over = |limit: Option<usize>, found: &[usize]| limit.is_some_and(|most| found.iter().any(|f| *f > most));
        if is_over(self.space.versions, &choice.versions) || is_over(self.space.staleness, &choice.staleness) {
            return Err(Error::plan(TOO_STALE));
        }
        match self.too_full(|s| choice.judged.memory[s]) {
            Some(full) => Err(Error::plan(full)),
            None => Ok(choice),
        }
    }
}

/// The stages on workers numbered in their order, what passes from one to another, and what all takes.
fn staged(graph: &CostGraph, topology: &Topology, stages: &[Part]) -> (Wiring, Costs) {
    let mut wiring = Wiring::replicated(&stages.iter().map(|s| s.workers.len()).collect::<Vec<_>>());
    let mut stage_of = vec![0; graph.nodes().len()];
    stages.iter().enumerate().for_each(|(s, part)| part.nodes.iter().for_each(|&n| stage_of[n] = s));
    // Bytes from a stage to another that reads them.
    let mut crossing: BTreeMap<(usize, usize), f64> = BTreeMap::new();
    for (n, node) in graph.nodes().iter().enumerate() {
        let mut readers: Vec<usize> = graph.readers(n).iter().map(|&r| stage_of[r]).collect();
        readers.sort_unstable();
        readers.dedup();
        for to in readers.into_iter().filter(|&to| to != stage_of[n]) {
            *crossing.entry((stage_of[n], to)).or_default() += node.output_bytes;
        }
    }
    wiring.edges = crossing.keys().map(|&(from, to)| Link { from, to, grad: true }).collect();
    let edge = |(&(from, to), &bytes): (&(usize, usize), &f64)| {
        let both: Vec<usize> = stages[from].workers.iter().chain(&stages[to].workers).copied().collect();
        let link = link_among(topology, &both);
        EdgeCost {
            forward: bytes / link.bandwidth,
            backward: bytes / link.bandwidth,
            latency: link.latency,
            ..EdgeCost::default()
        }
    };
    let stage = |part: &Part| {
        let sum = |of: fn(&CostNode) -> f64| -> f64 { part.nodes.iter().map(|&n| of(&graph.nodes()[n])).sum() };
        let speed = part.workers.iter().map(|&w| topology.worker(w).speed).fold(f64::INFINITY, f64::min);
        let (forward, backward) = (sum(|n| n.forward) / speed, sum(|n| n.backward) / speed);
        let sync = all_reduce(part.workers.len(), sum(|n| n.param_bytes), link_among(topology, &part.workers));
        let half = backward / 2.0;
        // Only what outlasts B is waited for.
        StageCost {
            forward,
            input_grad: half,
            weight_grad: half,
            step: 0.0,
            reduce: (sync - backward).max(0.0),
            ..StageCost::default()
        }
    };
    let costs = Costs {
        stages: stages.iter().map(stage).collect(),
        edges: crossing.iter().map(edge).collect(),
        ..Costs::default()
    };
    (wiring, costs)
}
