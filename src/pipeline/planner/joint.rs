//! Split, replicas, schedule and number of micro-batches, chosen together and judged by the simulator.
//!
//! For every schedule and number of micro-batches dynamic programming gives the fastest plans by the costs of `cost`, on each number of
//! workers and with each number of replicas in front, and within some times those with fewest stages and those that send least, since
//! both take less time to fill and to drain. What a plan takes at least follows from its costs; in the order of that they are simulated, each with the warm-up
//! that suits it, until no other can be faster than the best.
use super::{
    cost::{Judged, Part, plan_of, shape_of},
    cuts::{Cut, cuts, cuts_at},
    mode::Mode,
    replicated::{EQUAL, FEW, Limits, orders, plan_replicated},
    sweep::{Caps, Goal, Sweeper},
    trial::Trial,
};
use crate::{
    Error, Result,
    layers::Graph,
    pipeline::{plan::Plan, profile::CostGraph, topology::Topology},
};
use std::{cmp::Ordering, collections::HashSet};

/// What may be chosen, and what a choice may not exceed.
#[derive(Clone, Debug)]
pub struct Space {
    /// The schedules, each with numbers of micro-batches; of equal choices the first one is taken.
    pub modes: Vec<Mode>,
    /// Stages, memory, and replicas.
    pub limits: Limits,
    /// The most weight versions that a worker holds.
    pub versions: Option<usize>,
    /// The most updates between the weights that a gradient is made with and those that it changes.
    pub staleness: Option<usize>,
    /// Nodes, ascending in the order of the graph, that stages begin with, after the first stage; and no others do.
    pub cuts: Option<Vec<usize>>,
    /// How many workers are to have work; as many as are useful if it is not said.
    pub workers: Option<usize>,
    /// Workers for each core.
    pub crowding: f64,
}

impl Space {
    /// Any plan under one of these schedules, on workers with a core each.
    pub fn of(modes: Vec<Mode>) -> Space {
        let limits = Limits::default();
        Space { modes, limits, versions: None, staleness: None, cuts: None, workers: None, crowding: 1.0 }
    }
}

/// A plan with its schedule, and what the simulator makes of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// The schedule.
    pub mode: Mode,
    /// The stages, in order.
    pub stages: Vec<Part>,
    /// What they cost for a micro-batch, and hold, with the warm-up that was chosen.
    pub judged: Judged,
    /// Seconds per minibatch.
    pub seconds: f64,
    /// The most weight versions that a worker of each stage holds.
    pub versions: Vec<usize>,
    /// The most updates between the weights that a gradient of each stage is made with and those that it changes.
    pub staleness: Vec<usize>,
    /// What it takes longest for, in words.
    pub bottleneck: String,
}

impl Choice {
    /// The replicas of each stage, joined by dashes: `15-1`.
    pub fn shape(&self) -> String {
        shape_of(&self.stages)
    }

    /// The plan for the model that it was made for ([`CostGraph::of_model`]); [`Plan::warmed_up`] gives it the warm-up.
    ///
    /// # Errors
    /// If it is none for it: see [`Plan::new`].
    pub fn plan(&self, graph: &Graph) -> Result<Plan> {
        plan_of(&self.stages, graph)
    }

    /// Whether it is the better one: faster; else on fewer workers; else with fewer stages; else with less memory.
    fn is_better(&self, other: &Choice) -> bool {
        let (a, b) = (self.seconds, other.seconds);
        if a < b * (1.0 - EQUAL) || b < a * (1.0 - EQUAL) {
            return a < b;
        }
        self.rest() < other.rest()
    }

    fn rest(&self) -> (usize, usize, f64) {
        let workers = self.stages.iter().map(|s| s.workers.len()).sum();
        (workers, self.stages.len(), self.judged.most_memory())
    }
}

/// A plan that was not chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Rival {
    /// Its schedule.
    pub mode: Mode,
    /// The replicas of each stage, joined by dashes.
    pub shape: String,
    /// Seconds per minibatch; at least these if it was not simulated.
    pub seconds: f64,
    /// Whether it was.
    pub is_simulated: bool,
    /// Why it was not chosen.
    pub why: String,
}

/// Cuts of a graph of which plans are made for each schedule.
const CUTS: usize = 2 * FEW;
/// How many times longer than the fastest plan's the stages of those plans may take.
const SLOWER: [f64; 7] = [1.0 + EQUAL, 1.05, 1.1, 1.2, 1.4, 1.8, 3.0];
/// The most plans that are simulated,
const SIMULATED: usize = 64;
/// and of those of replicated stages the most whose warm-ups are searched for, which takes as long as all that simulating.
const SEARCHED: usize = 8;
/// The most plans told that were not chosen.
const TOLD: usize = 8;

/// What became of a plan.
enum Fate {
    Unknown,
    Broken(String),
    Known(Box<Choice>),
}

/// A plan that may be chosen.
struct Candidate<'a> {
    trial: Trial<'a>,
    fate: Fate,
}

/// The best choice, and others with why they were not chosen, best first.
///
/// `graphs` gives the costs of a micro-batch where a minibatch is cut into so many. Of choices whose times differ by less than one part
/// in 10⁹ it takes the one on fewer workers, then with fewer stages, then with less memory, then the first of the schedules.
///
/// # Errors
/// If a limit is none that can be, a schedule is for no micro-batch or asynchronous of several, or nothing keeps to the limits: then
/// it says by how little.
pub fn plan_jointly(
    graphs: &dyn Fn(usize) -> Result<CostGraph>,
    topology: &Topology,
    space: &Space,
) -> Result<(Choice, Vec<Rival>)> {
    space.check()?;
    let graphs = space.modes.iter().map(|m| graphs(m.micro_batches)).collect::<Result<Vec<CostGraph>>>()?;
    let mut candidates = Vec::new();
    for (&mode, graph) in space.modes.iter().zip(&graphs) {
        for stages in proposed(mode, graph, topology, space)? {
            let trial = Trial::new(mode, graph, topology, space, stages)?;
            candidates.push(Candidate { fate: trial.broken().map_or(Fate::Unknown, Fate::Broken), trial });
        }
    }
    candidates.sort_by(|a, b| a.trial.least().total_cmp(&b.trial.least()));
    let open: Vec<usize> = (0..candidates.len()).filter(|&c| matches!(candidates[c].fate, Fate::Unknown)).collect();
    for &c in open.iter().take(SIMULATED) {
        if candidates[c].is_hopeless(best(&candidates)) {
            break;
        }
        let thorough = !candidates[c].trial.is_replicated();
        candidates[c].simulate(thorough);
    }
    let seconds = |c: usize| candidates[c].known().map_or(f64::INFINITY, |k| k.seconds);
    let mut ranked: Vec<usize> = open.into_iter().filter(|&c| candidates[c].known().is_some()).collect();
    ranked.retain(|&c| candidates[c].trial.is_replicated());
    ranked.sort_by(|&a, &b| seconds(a).total_cmp(&seconds(b)));
    for &c in ranked.iter().take(SEARCHED) {
        if !candidates[c].is_hopeless(best(&candidates)) {
            candidates[c].simulate(true);
        }
    }
    let Some(choice) = best(&candidates).cloned() else { return Err(nothing_fits(&candidates)) };
    let others = others(&choice, &candidates);
    Ok((choice, others))
}

/// The best of those that were simulated.
fn best<'a>(candidates: &'a [Candidate]) -> Option<&'a Choice> {
    candidates.iter().filter_map(Candidate::known).reduce(|a, b| if b.is_better(a) { b } else { a })
}

/// What the simulator makes of a plan: `graph` is of micro-batches of the schedule.
///
/// # Errors
/// If the stages are no plan ([`judge`](super::judge)), break a limit of `space`, or cannot be run under the schedule.
pub fn evaluate(
    mode: Mode,
    graph: &CostGraph,
    topology: &Topology,
    space: &Space,
    stages: Vec<Part>,
) -> Result<Choice> {
    let trial = Trial::new(mode, graph, topology, space, stages)?;
    match trial.broken() {
        Some(broken) => Err(Error::plan(broken)),
        None => trial.run(true),
    }
}

impl Space {
    fn check(&self) -> Result<()> {
        self.limits.check()?;
        if self.modes.is_empty() {
            return Err(Error::plan("no schedule to choose from; one or more expected"));
        }
        for Mode { schedule, micro_batches } in &self.modes {
            if *micro_batches == 0 || !schedule.is_synchronous() && *micro_batches != 1 {
                let expected = if schedule.is_synchronous() { "1 or more" } else { "1" };
                return Err(Error::plan(format!("{micro_batches} micro-batches of {schedule}; {expected} expected")));
            }
        }
        if self.versions == Some(0) {
            return Err(Error::plan("0 weight versions at most; 1 or more expected"));
        }
        if !(self.crowding.is_finite() && self.crowding > 0.0) {
            return Err(Error::plan(format!("{} workers for each core; more than 0 expected", self.crowding)));
        }
        Ok(())
    }
}

impl Candidate<'_> {
    fn known(&self) -> Option<&Choice> {
        match &self.fate {
            Fate::Known(choice) => Some(choice),
            _ => None,
        }
    }

    /// Whether it would take longer at least than `best` does.
    fn is_hopeless(&self, best: Option<&Choice>) -> bool {
        best.is_some_and(|b| self.trial.least() > b.seconds * (1.0 + EQUAL))
    }

    /// Simulates it, with a search for its warm-up if that is to be `thorough`.
    fn simulate(&mut self, thorough: bool) {
        self.fate = match self.trial.run(thorough) {
            Ok(choice) => Fate::Known(Box::new(choice)),
            Err(e) => Fate::Broken(format!("it cannot be run: {e}")),
        };
    }

    fn is(&self, mode: Mode, shape: &str) -> bool {
        self.trial.mode == mode && shape_of(&self.trial.stages) == shape
    }

    /// In words, why it is not `best`.
    fn rival(&self, best: &Choice) -> Rival {
        let (seconds, why) = match &self.fate {
            Fate::Known(choice) if choice.seconds > best.seconds * (1.0 + EQUAL) => {
                (choice.seconds, choice.bottleneck.clone())
            }
            Fate::Known(choice) => (choice.seconds, "as fast, with more workers, stages or memory".to_string()),
            Fate::Broken(why) => (self.trial.least(), why.clone()),
            Fate::Unknown => (self.trial.least(), self.trial.bottleneck()),
        };
        let is_simulated = matches!(self.fate, Fate::Known(_));
        Rival { mode: self.trial.mode, shape: shape_of(&self.trial.stages), seconds, is_simulated, why }
    }
}

/// Plans to choose from under one schedule, none twice.
fn proposed(mode: Mode, graph: &CostGraph, topology: &Topology, space: &Space) -> Result<Vec<Vec<Part>>> {
    let fine = match &space.cuts {
        Some(places) => cuts_at(graph, places)?,
        None => cuts(graph, CUTS),
    };
    let mut found: Vec<Vec<Part>> = Vec::new();
    for order in orders(topology) {
        found.extend(swept(mode, &fine, topology, space, &order));
    }
    if space.cuts.is_none() {
        let all = Part { nodes: (0..graph.nodes().len()).collect(), workers: (0..topology.workers()).collect() };
        found.push(vec![all]);
        // By its own costs, and along more cuts, where something keeps to the limits there.
        if !mode.schedule.is_synchronous()
            && let Ok((best, others)) = plan_replicated(graph, topology, &space.limits)
        {
            found.extend([best].into_iter().chain(others).map(|p| p.stages));
        }
    }
    let mut known = HashSet::new();
    found
        .retain(|stages| known.insert(stages.iter().map(|s| (s.nodes.clone(), s.workers.clone())).collect::<Vec<_>>()));
    Ok(found)
}

/// The plans of several searches among `cuts`, with workers in this order.
fn swept(mode: Mode, cuts: &[Cut], topology: &Topology, space: &Space, order: &[usize]) -> Vec<Vec<Part>> {
    let sweeper = Sweeper::new(mode, cuts, topology, order, space.cuts.is_some());
    let mut found = Vec::new();
    let memory = space.limits.memory.unwrap_or(f64::INFINITY);
    // What does not fit may do with fewer minibatches in flight.
    for goal in [Goal::Fastest, Goal::Smallest] {
        let caps = Caps { seconds: f64::INFINITY, memory, straight: space.limits.straight || mode.is_straight() };
        let swept = sweeper.sweep(goal, caps);
        let plans: Vec<_> = swept.plans().collect();
        found.extend(plans.iter().map(|&(_, workers, replicas)| sweeper.stages(&swept, workers, replicas)));
        let fastest = plans.iter().map(|p| p.0.0).fold(f64::INFINITY, f64::min);
        if goal == Goal::Fastest && fastest.is_finite() && space.cuts.is_none() {
            for (slower, goal) in SLOWER.into_iter().flat_map(|s| [(s, Goal::Leanest), (s, Goal::Nearest)]) {
                let swept = sweeper.sweep(goal, Caps { seconds: fastest * slower, ..caps });
                found.extend(swept.plans().map(|(_, workers, replicas)| sweeper.stages(&swept, workers, replicas)));
            }
        }
    }
    found
}

/// Of each schedule the best that was not chosen, and the other shapes under the schedule that was.
fn others(best: &Choice, candidates: &[Candidate]) -> Vec<Rival> {
    let mut told: Vec<Rival> = Vec::new();
    let mut ranked: Vec<&Candidate> = candidates.iter().filter(|c| !c.is(best.mode, &best.shape())).collect();
    let worth = |c: &Candidate| c.known().map_or(c.trial.least(), |k| k.seconds);
    ranked.sort_by(|a, b| worth(a).partial_cmp(&worth(b)).unwrap_or(Ordering::Equal));
    // What was simulated says more than what was not.
    ranked.sort_by_key(|c| matches!(c.fate, Fate::Unknown));
    for candidate in ranked {
        let rival = candidate.rival(best);
        let mode = rival.mode;
        let of_mode = told.iter().filter(|t| t.mode.schedule == mode.schedule).count();
        let most = if mode == best.mode { TOLD / 2 } else { TOLD / 4 };
        if told.len() < TOLD && of_mode < most && !told.iter().any(|t| t.mode == mode && t.shape == rival.shape) {
            told.push(rival);
        }
    }
    told.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
    told
}

/// Says what the plan lacks that lacks least.
fn nothing_fits(candidates: &[Candidate]) -> Error {
    let least = candidates.iter().min_by(|a, b| a.trial.least_memory().total_cmp(&b.trial.least_memory()));
    let Some(Candidate { trial, fate }) = least else { return Error::plan("no plan: the graph cannot be cut") };
    let why = match fate {
        Fate::Broken(why) => why.as_str(),
        _ => "it is not safe",
    };
    let (mode, shape) = (trial.mode, shape_of(&trial.stages));
    Error::plan(format!("no plan keeps to the limits; the smallest there is, {shape} under {mode}: {why}"))
}
