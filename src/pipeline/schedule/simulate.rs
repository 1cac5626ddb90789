//! Predicts how long programs take, from the times of their passes and transfers.
//!
//! It takes compute-only programs, whose messages follow from the wiring, and lowered ones; without transfer times both give
//! the same. Sends are buffered. Each worker has a link of its own, in and out at once: the messages of a direction, to or from
//! whichever workers, and the sums of gradients move through it one after the other in the order in which they were sent, latencies
//! overlap. What a message takes of a core comes out of the pass that it meets; a worker that waits has it for nothing. Workers that
//! share cores slow each other down while they compute.
mod run;

use super::{Inst, Program, Programs, Wiring};
use crate::{Error, Result};
use run::Run;

/// Seconds that the instructions of a stage take.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StageCost {
    /// F.
    pub forward: f64,
    /// I.
    pub input_grad: f64,
    /// W; B takes I and W together.
    pub weight_grad: f64,
    /// `Step`.
    pub step: f64,
    /// What a sum of gradients takes of a worker's core, at the beginning of `Reduce`; in truth much of it is between the layers of B.
    pub sum: f64,
    /// `Reduce`, from when the last worker of the stage has come to the end of that until all can go on.
    pub reduce: f64,
}

/// What a message of an edge takes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EdgeCost {
    /// Seconds for which the value occupies the link: bytes / bandwidth.
    pub forward: f64,
    /// Seconds for which the gradient occupies the link.
    pub backward: f64,
    /// Seconds from the end of that to arrival.
    pub latency: f64,
    /// Seconds by which a message lengthens the pass that it meets at either end: the thread that moves it takes the core.
    pub handling: f64,
}

/// What everything takes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Costs {
    /// By stage.
    pub stages: Vec<StageCost>,
    /// By edge.
    pub edges: Vec<EdgeCost>,
    /// Seconds by which every instruction takes longer.
    pub overhead: f64,
    /// Workers that compute at full speed at once; more of them share the cores evenly. `None`: each has a core of its own.
    pub cores: Option<f64>,
}

impl Costs {
    /// Equal stages with free transfers: seconds of F, I and W.
    pub fn uniform(wiring: &Wiring, forward: f64, input_grad: f64, weight_grad: f64) -> Costs {
        let stage = StageCost { forward, input_grad, weight_grad, ..StageCost::default() };
        let (stages, edges) = (vec![stage; wiring.stages.len()], vec![EdgeCost::default(); wiring.edges.len()]);
        Costs { stages, edges, ..Costs::default() }
    }
}

/// An instruction, when it ran.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Event {
    /// The worker.
    pub worker: usize,
    /// The instruction.
    pub inst: Inst,
    /// Its start, in seconds.
    pub start: f64,
    /// Its end, in seconds.
    pub end: f64,
}

/// Where a worker's time goes; the rest of the makespan is idle.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct WorkerTime {
    /// Seconds of passes and updates; what they take longer because others share the cores does not count.
    pub busy: f64,
    /// Seconds of waiting for messages under way, and of overhead.
    pub communication: f64,
    /// Seconds from the start to the end of passes and updates, with what they take longer because others share the cores.
    pub elapsed: f64,
    /// Seconds of waiting for the messages that passes need, sent or not.
    pub blocked: f64,
    /// Seconds from the start to its last instruction's end: what is neither elapsed nor blocked went to sums, sends and overhead.
    pub end: f64,
    /// When its first pass begins.
    pub first: f64,
    /// When its last pass or update ends.
    pub last: f64,
    /// The most micro-batches whose activations are held at once.
    pub peak_activations: usize,
}

/// What a simulation found. For a long asynchronous run `events` covers a shorter one; all else is of the whole.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// Seconds from the first start to the last end.
    pub makespan: f64,
    /// By worker.
    pub workers: Vec<WorkerTime>,
    /// Seconds from one micro-batch to the next: in the steady state, or on average where there is none.
    pub seconds_per_micro_batch: f64,
    /// Passes and updates, by worker and in the order in which they ran.
    pub events: Vec<Event>,
}

impl Timeline {
    /// 1 − Σ busy / (workers · makespan).
    pub fn bubble_fraction(&self) -> f64 {
        let total = self.workers.len() as f64 * self.makespan;
        if total > 0.0 { 1.0 - self.workers.iter().map(|w| w.busy).sum::<f64>() / total } else { 0.0 }
    }

    /// The longest time that a worker does not compute between its first start and its last end.
    pub fn local_bubble(&self) -> f64 {
        self.workers.iter().map(|w| w.last - w.first - w.busy).fold(0.0, f64::max)
    }

    /// Seconds of the shortest pass: a good `cell` to draw with. Passes that take less than a sixteenth of the longest do not
    /// count.
    pub fn shortest_pass(&self) -> f64 {
        let passes = || self.events.iter().filter(|e| e.inst.mb().is_some()).map(|e| e.end - e.start);
        let longest = passes().fold(0.0, f64::max);
        passes().filter(|&t| t >= longest / 16.0).fold(longest, f64::min)
    }

    /// A row a worker, `cell` seconds a character: digits are F, small letters B or I, capitals W, `|` an update; the digit or
    /// letter is that of the micro-batch, mod 10. Rows end after `columns` characters, with `…` if there is more.
    pub fn draw(&self, cell: f64, columns: usize) -> String {
        let column = |time: f64| (time / cell).round() as usize;
        let end = column(self.events.iter().map(|e| e.end).fold(0.0, f64::max));
        let width = end.min(columns);
        let mut rows = vec![vec!['.'; width]; self.workers.len()];
        for event in &self.events {
            let letter = |first: u8| (first + (event.inst.mb().unwrap_or(0) % 10) as u8) as char;
            let mark = match event.inst {
                Inst::F { .. } => letter(b'0'),
                Inst::W { .. } => letter(b'A'),
                Inst::Step { .. } => '|',
                _ => letter(b'a'),
            };
            let cells = column(event.start).min(width)..column(event.end).min(width);
            rows[event.worker][cells].fill(mark);
        }
        let more = if width < end { "…" } else { "" };
        let lines = rows.into_iter().enumerate();
        lines.map(|(worker, row)| format!("{worker:>3} {}{more}\n", row.into_iter().collect::<String>())).collect()
    }
}

/// Instructions beyond which a periodic run is simulated shorter and prolonged by its steady state.
const LONG: usize = 1 << 18;
/// Repeats that show the steady state.
const SAMPLE: usize = 512;

/// Predicts the time of programs.
///
/// # Errors
/// If costs are missing, a pass stands on the wrong worker, or the programs wait for each other for ever.
pub fn simulate(programs: &Programs, wiring: &Wiring, costs: &Costs) -> Result<Timeline> {
    wiring.check(programs.workers.len())?;
    if costs.stages.len() != wiring.stages.len() || costs.edges.len() != wiring.edges.len() {
        return Err(Error::schedule(format!(
            "costs of {} stages and {} edges given, but there are {} and {}",
            costs.stages.len(),
            costs.edges.len(),
            wiring.stages.len(),
            wiring.edges.len()
        )));
    }
    if let Some(cores) = costs.cores.filter(|cores| cores.is_nan() || *cores <= 0.0) {
        return Err(Error::schedule(format!("{cores} cores; more than 0 expected")));
    }
    let instructions = programs.workers.iter().fold(0usize, |n, p| n.saturating_add(p.len()));
    let fewest = programs.workers.iter().map(|p| p.repeats).min().unwrap_or(0);
    if instructions <= LONG {
        return Run::new(programs, wiring, costs).finish();
    }
    let shift = programs.workers.first().map_or(0, |p| p.shift);
    let alike = programs.workers.iter().all(|p| p.shift == shift && shift > 0);
    if fewest <= SAMPLE || !alike {
        return match instructions <= 1 << 26 {
            true => Run::new(programs, wiring, costs).finish(),
            false => Err(Error::schedule(format!("{instructions} instructions without a common period"))),
        };
    }
    let skipped = fewest - SAMPLE;
    let shorten = |p: &Program| Program { repeats: p.repeats - skipped, ..p.clone() };
    let short = Programs { workers: programs.workers.iter().map(shorten).collect(), ..programs.clone() };
    let mut timeline = Run::new(&short, wiring, costs).finish()?;
    let more = skipped as f64 * shift as f64 * timeline.seconds_per_micro_batch;
    timeline.makespan += more;
    for (worker, time) in timeline.workers.iter_mut().enumerate() {
        let period = &programs.workers[worker].period;
        let busy = period.iter().filter_map(|&i| duration(i, costs)).sum::<f64>() * skipped as f64;
        // Of what is not busy in the steady state the same part is communication as before.
        let idle = (timeline.makespan - more - time.busy).max(f64::MIN_POSITIVE);
        time.communication += (more - busy).max(0.0) * time.communication / idle;
        if time.busy > 0.0 {
            // Others share the cores as before.
            let elapsed = (time.elapsed * busy / time.busy).min(more);
            let rest = (time.end - time.elapsed).max(f64::MIN_POSITIVE);
            time.blocked += (more - elapsed) * time.blocked / rest;
            time.elapsed += elapsed;
        }
        time.end += more;
        time.busy += busy;
        time.last += more;
    }
    Ok(timeline)
}

/// Seconds of a pass or update, or of the adding of a sum, without overhead.
fn duration(inst: Inst, costs: &Costs) -> Option<f64> {
    let cost = costs.stages.get(inst.stage()?)?;
    match inst {
        Inst::F { .. } => Some(cost.forward),
        Inst::B { .. } => Some(cost.input_grad + cost.weight_grad),
        Inst::I { .. } => Some(cost.input_grad),
        Inst::W { .. } => Some(cost.weight_grad),
        Inst::Step { .. } => Some(cost.step),
        Inst::Reduce { .. } => Some(cost.sum),
        _ => None,
    }
}
