//! Predicts how long programs take, from the times of their passes and transfers.
//!
//! It takes compute-only programs, whose messages follow from the wiring, and lowered ones; without transfer times both give
//! the same. Sends are buffered. The transfers from one worker to another share a link: its bytes move one message after the
//! other, latencies overlap.
use super::{Direction, Inst, Message, MicroBatch, Program, Programs, Wiring};
use crate::{Error, Result};
use std::collections::{HashMap, HashSet};

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
}

impl Costs {
    /// Equal stages with free transfers: seconds of F, I and W.
    pub fn uniform(wiring: &Wiring, forward: f64, input_grad: f64, weight_grad: f64) -> Costs {
        let stage = StageCost { forward, input_grad, weight_grad, step: 0.0 };
        let (stages, edges) = (vec![stage; wiring.stages.len()], vec![EdgeCost::default(); wiring.edges.len()]);
        Costs { stages, edges, overhead: 0.0 }
    }

    /// The same with passes and updates `times` as fast.
    pub fn faster(&self, times: f64) -> Costs {
        let faster = |s: &StageCost| StageCost {
            forward: s.forward / times,
            input_grad: s.input_grad / times,
            weight_grad: s.weight_grad / times,
            step: s.step / times,
        };
        Costs { stages: self.stages.iter().map(faster).collect(), ..self.clone() }
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
    /// Seconds of passes and updates.
    pub busy: f64,
    /// Seconds of waiting for messages under way, and of overhead.
    pub communication: f64,
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
        time.busy += busy;
        time.last += more;
    }
    Ok(timeline)
}

/// Seconds of a pass or update, without overhead.
fn duration(inst: Inst, costs: &Costs) -> Option<f64> {
    let cost = costs.stages.get(inst.stage()?)?;
    match inst {
        Inst::F { .. } => Some(cost.forward),
        Inst::B { .. } => Some(cost.input_grad + cost.weight_grad),
        Inst::I { .. } => Some(cost.input_grad),
        Inst::W { .. } => Some(cost.weight_grad),
        Inst::Step { .. } => Some(cost.step),
        _ => None,
    }
}

/// A message on its way, or a result that stays on its worker.
#[derive(Clone, Copy)]
struct Transfer {
    sent: f64,
    arrival: f64,
}

/// A simulation under way. Only the sender of a link uses it, in the order of its program, so that workers can be gone through
/// one after the other, each as far as it comes.
struct Run<'a> {
    programs: &'a Programs,
    wiring: &'a Wiring,
    costs: &'a Costs,
    lowered: bool,
    clocks: Vec<f64>,
    positions: Vec<usize>,
    times: Vec<WorkerTime>,
    live: Vec<HashSet<(usize, MicroBatch)>>,
    transfers: HashMap<Message, Transfer>,
    links: HashMap<(usize, usize), f64>,
    /// Arrivals of sends that were not waited for yet.
    sends: HashMap<Message, Transfer>,
    events: Vec<Event>,
    /// When each repeat of the first worker's period begins.
    repeats: Vec<f64>,
}

impl<'a> Run<'a> {
    fn new(programs: &'a Programs, wiring: &'a Wiring, costs: &'a Costs) -> Run<'a> {
        let n = programs.workers.len();
        Run {
            programs,
            wiring,
            costs,
            lowered: programs.is_lowered(),
            clocks: vec![0.0; n],
            positions: vec![0; n],
            times: vec![WorkerTime::default(); n],
            live: vec![HashSet::new(); n],
            transfers: HashMap::new(),
            links: HashMap::new(),
            sends: HashMap::new(),
            events: Vec::new(),
            repeats: Vec::new(),
        }
    }

    fn finish(mut self) -> Result<Timeline> {
        loop {
            let mut moved = false;
            for worker in 0..self.positions.len() {
                while let Some(inst) = self.programs.workers[worker].get(self.positions[worker]) {
                    if !self.execute(worker, inst)? {
                        break;
                    }
                    self.positions[worker] += 1;
                    moved = true;
                }
            }
            let waiting = |w: &usize| self.programs.workers[*w].get(self.positions[*w]).is_some();
            let blocked: Vec<usize> = (0..self.positions.len()).filter(waiting).collect();
            if blocked.is_empty() {
                break;
            }
            if !moved {
                let at = |&w: &usize| {
                    let inst = self.programs.workers[w].get(self.positions[w]);
                    format!("worker {w} at instruction {} ({inst:?})", self.positions[w])
                };
                let list = blocked.iter().map(at).collect::<Vec<_>>().join(", ");
                return Err(Error::schedule(format!("deadlock: nothing can go on: {list}")));
            }
        }
        let makespan = self.clocks.iter().copied().fold(0.0, f64::max);
        self.events.sort_by_key(|e| e.worker);
        let seconds_per_micro_batch = self.steady().unwrap_or(makespan / self.programs.micro_batches.max(1) as f64);
        Ok(Timeline { makespan, workers: self.times, seconds_per_micro_batch, events: self.events })
    }

    /// Seconds a micro-batch in the second half of the first worker's repeats, before the pipeline drains.
    fn steady(&self) -> Option<f64> {
        let (middle, last) = (self.repeats.len() / 2, self.repeats.len().checked_sub(1)?);
        let shift = self.programs.workers.first()?.shift;
        let micro_batches = (last - middle) * shift;
        (last >= 3 && micro_batches > 0).then(|| (self.repeats[last] - self.repeats[middle]) / micro_batches as f64)
    }

    /// Runs an instruction if what it needs has a time; false if it has to wait for another worker.
    fn execute(&mut self, worker: usize, inst: Inst) -> Result<bool> {
        let start = self.clocks[worker];
        let overhead = self.costs.overhead;
        let end = match inst {
            Inst::Recv(m) => {
                let Some(transfer) = self.transfers.remove(&m) else { return Ok(false) };
                self.times[worker].communication += waited(start, transfer);
                start.max(transfer.arrival)
            }
            Inst::Send(m) => {
                let transfer = self.transfer(m, start);
                self.transfers.insert(m, transfer);
                self.sends.insert(m, transfer);
                start
            }
            Inst::Wait(m) => match self.sends.remove(&m) {
                Some(transfer) => {
                    self.times[worker].communication += waited(start, transfer);
                    start.max(transfer.arrival)
                }
                None => return Err(Error::schedule(format!("worker {worker} waits for a send of {m:?} not made"))),
            },
            Inst::Post(_) | Inst::Free { .. } => start,
            _ => return self.compute(worker, inst),
        };
        self.times[worker].communication += overhead;
        self.clocks[worker] = end + overhead;
        self.note_repeat(worker, start);
        Ok(true)
    }

    fn compute(&mut self, worker: usize, inst: Inst) -> Result<bool> {
        let (stage, mb) = (inst.stage().unwrap_or(0), inst.mb().unwrap_or(0));
        if self.wiring.worker(stage) != Some(worker) {
            return Err(Error::schedule(format!("worker {worker} does not hold the stage of {inst:?}")));
        }
        let direction = match inst {
            Inst::F { .. } => Some(Direction::Forward),
            Inst::B { .. } | Inst::I { .. } => Some(Direction::Backward),
            _ => None,
        };
        let before = self.clocks[worker];
        let mut start = before;
        let (needs, makes) =
            direction.map_or((vec![], vec![]), |d| (self.ends(stage, mb, d), self.ends_made(stage, mb, d)));
        if needs.iter().any(|m| !self.transfers.contains_key(m)) {
            return Ok(false);
        }
        for m in &needs {
            if let Some(transfer) = self.transfers.remove(m) {
                self.times[worker].communication += waited(start, transfer);
                start = start.max(transfer.arrival);
            }
        }
        if matches!(inst, Inst::F { .. }) {
            self.live[worker].insert((stage, mb));
            let live = self.live[worker].len();
            self.times[worker].peak_activations = self.times[worker].peak_activations.max(live);
        }
        let seconds = duration(inst, self.costs).unwrap_or(0.0);
        let end = start + seconds;
        if matches!(inst, Inst::B { .. } | Inst::W { .. }) || self.programs.step_every == 0 {
            self.live[worker].remove(&(stage, mb));
        }
        for m in makes {
            let transfer = self.transfer(m, end);
            self.transfers.insert(m, transfer);
        }
        let time = &mut self.times[worker];
        if time.busy == 0.0 {
            time.first = start;
        }
        time.busy += seconds;
        time.communication += self.costs.overhead;
        time.last = end;
        self.events.push(Event { worker, inst, start, end });
        self.clocks[worker] = end + self.costs.overhead;
        self.note_repeat(worker, start);
        Ok(true)
    }

    /// The messages that a pass takes without a `Recv`: all of them if the program has none, else those of its own worker.
    fn ends(&self, stage: usize, mb: MicroBatch, direction: Direction) -> Vec<Message> {
        self.unwritten(mb, direction, |from, to| if direction == Direction::Forward { to } else { from } == stage)
    }

    /// The messages that a pass makes without a `Send`.
    fn ends_made(&self, stage: usize, mb: MicroBatch, direction: Direction) -> Vec<Message> {
        self.unwritten(mb, direction, |from, to| if direction == Direction::Forward { from } else { to } == stage)
    }

    fn unwritten(&self, mb: MicroBatch, direction: Direction, at: impl Fn(usize, usize) -> bool) -> Vec<Message> {
        let edges = self.wiring.edges.iter().enumerate();
        edges
            .filter(|(_, link)| at(link.from, link.to) && (link.grad || direction == Direction::Forward))
            .filter(|(edge, _)| !self.lowered || self.wiring.route(*edge, direction).is_none())
            .map(|(edge, _)| Message { edge, mb, direction })
            .collect()
    }

    /// A message leaves as soon as its link is free.
    fn transfer(&mut self, m: Message, sent: f64) -> Transfer {
        let Some(link) = self.wiring.route(m.edge, m.direction) else { return Transfer { sent, arrival: sent } };
        let cost = self.costs.edges[m.edge];
        let seconds = if m.direction == Direction::Forward { cost.forward } else { cost.backward };
        let free = self.links.entry(link).or_insert(0.0);
        *free = free.max(sent) + seconds;
        Transfer { sent, arrival: *free + cost.latency }
    }

    /// Notes when a repeat of the first worker's period began.
    fn note_repeat(&mut self, worker: usize, start: f64) {
        let Some(program) = self.programs.workers.first().filter(|p| worker == 0 && !p.period.is_empty()) else {
            return;
        };
        let past = self.positions[0].checked_sub(program.prologue.len());
        if past.is_some_and(|n| n % program.period.len() == 0 && n / program.period.len() < program.repeats) {
            self.repeats.push(start);
        }
    }
}

/// How long a worker that is free at `now` waits for a transfer that is under way: before that it waits for another's compute.
fn waited(now: f64, transfer: Transfer) -> f64 {
    (transfer.arrival - now.max(transfer.sent)).max(0.0)
}
