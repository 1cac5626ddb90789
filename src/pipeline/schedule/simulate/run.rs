//! A simulation: workers go through their programs, computing at the same time.
use super::{Costs, Event, Timeline, WorkerTime, duration};
use crate::{
    Error, Result,
    pipeline::schedule::{Direction, Inst, Message, MicroBatch, Programs, Wiring},
};
use std::collections::{HashMap, HashSet};

/// A message on its way, or a result that stays on its worker.
#[derive(Clone, Copy)]
struct Transfer {
    sent: f64,
    arrival: f64,
}

/// A pass or update that was begun, or will be.
#[derive(Clone, Copy)]
struct Pass {
    inst: Inst,
    start: f64,
    /// Seconds of a whole core that it still takes.
    left: f64,
}

/// A message on its way to a worker.
struct Coming {
    worker: usize,
    at: f64,
    handling: f64,
}

/// The workers of a stage at a `Reduce`.
#[derive(Default)]
struct Meeting {
    /// When each came.
    came: HashMap<usize, f64>,
    /// When the sum is made, once all are there.
    end: Option<f64>,
    /// How many have gone on.
    gone: usize,
}

/// A simulation under way. Workers go on in the order of their clocks, so that messages come to their links in the order in which
/// they are sent.
pub(super) struct Run<'a> {
    programs: &'a Programs,
    wiring: &'a Wiring,
    costs: &'a Costs,
    lowered: bool,
    /// All passes have come as far as this, and no worker that can go on is behind it.
    now: f64,
    passes: Vec<Option<Pass>>,
    clocks: Vec<f64>,
    positions: Vec<usize>,
    times: Vec<WorkerTime>,
    live: Vec<HashSet<(usize, MicroBatch)>>,
    transfers: HashMap<Message, Transfer>,
    /// When the link of each worker is free: out, and in.
    free: [Vec<f64>; 2],
    /// Messages that will be at a worker, and what they take of its core.
    coming: Vec<Coming>,
    /// What the messages that a worker has just sent still take of its core, and since when.
    leaving: Vec<(f64, f64)>,
    /// Whether a worker that comes to a `Reduce` has added up its part.
    added: Vec<bool>,
    /// By stage and micro-batch.
    reduces: HashMap<(usize, MicroBatch), Meeting>,
    /// Arrivals of sends that were not waited for yet.
    sends: HashMap<Message, Transfer>,
    events: Vec<Event>,
    /// When each repeat of the first worker's period begins.
    repeats: Vec<f64>,
}

impl<'a> Run<'a> {
    pub(super) fn new(programs: &'a Programs, wiring: &'a Wiring, costs: &'a Costs) -> Run<'a> {
        let n = programs.workers.len();
        Run {
            programs,
            wiring,
            costs,
            lowered: programs.is_lowered(),
            now: 0.0,
            passes: vec![None; n],
            clocks: vec![0.0; n],
            positions: vec![0; n],
            times: vec![WorkerTime::default(); n],
            live: vec![HashSet::new(); n],
            transfers: HashMap::new(),
            free: [vec![0.0; n], vec![0.0; n]],
            coming: Vec::new(),
            leaving: vec![(0.0, 0.0); n],
            added: vec![false; n],
            reduces: HashMap::new(),
            sends: HashMap::new(),
            events: Vec::new(),
            repeats: Vec::new(),
        }
    }

    pub(super) fn finish(mut self) -> Result<Timeline> {
        loop {
            let mut moved = false;
            for worker in 0..self.positions.len() {
                while let (None, true, Some(inst)) =
                    (self.passes[worker], self.clocks[worker] <= self.now, self.inst(worker))
                {
                    if !self.execute(worker, inst)? {
                        break;
                    }
                    moved = true;
                }
            }
            if moved || self.advance() {
                continue;
            }
            let at =
                |w: usize| self.inst(w).map(|inst| format!("worker {w} at instruction {} ({inst})", self.positions[w]));
            let blocked: Vec<String> = (0..self.positions.len()).filter_map(at).collect();
            if blocked.is_empty() {
                break;
            }
            return Err(Error::schedule(format!("deadlock: nothing can go on: {}", blocked.join(", "))));
        }
        let makespan = self.clocks.iter().copied().fold(0.0, f64::max);
        self.events.sort_by_key(|e| e.worker);
        self.times.iter_mut().zip(&self.clocks).for_each(|(time, &clock)| time.end = clock);
        let seconds_per_micro_batch = self.steady().unwrap_or(makespan / self.programs.micro_batches.max(1) as f64);
        Ok(Timeline { makespan, workers: self.times, seconds_per_micro_batch, events: self.events })
    }

    /// The next instruction of a worker.
    fn inst(&self, worker: usize) -> Option<Inst> {
        self.programs.workers[worker].get(self.positions[worker])
    }

    /// Lets time pass until a pass ends or begins, or a worker is free for its next instruction, and ends the passes that do; false
    /// if there is nothing of these to come.
    fn advance(&mut self) -> bool {
        let now = self.now;
        let active = self.passes.iter().flatten().filter(|p| p.start <= now).count() as f64;
        let speed = self.costs.cores.map_or(1.0, |cores| (cores / active).min(1.0));
        let until = |p: &Pass| if p.start <= now { now + p.left / speed } else { p.start };
        let idle = self.passes.iter().zip(&self.clocks).filter(|(pass, clock)| pass.is_none() && **clock > now);
        let next = self.passes.iter().flatten().map(until).chain(idle.map(|(_, &clock)| clock)).reduce(f64::min);
        let Some(next) = next else { return false };
        let next = self.coming.iter().map(|c| c.at).fold(next, f64::min).max(now);
        self.now = next;
        for worker in 0..self.passes.len() {
            let Some(pass) = self.passes[worker].as_mut().filter(|p| p.start <= now) else { continue };
            if now + pass.left / speed > next {
                pass.left = (pass.left - (next - now) * speed).max(0.0);
            } else if let Some(pass) = self.passes[worker].take() {
                self.end(worker, pass);
            }
        }
        for Coming { worker, handling, .. } in self.coming.extract_if(.., |c| c.at <= next) {
            // A worker that waits has waited for the thread that handles the message, too: the time of links includes it.
            if let Some(pass) = self.passes[worker].as_mut().filter(|p| p.start < next) {
                pass.left += handling;
            }
        }
        true
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
                self.times[worker].blocked += (transfer.arrival - start).max(0.0);
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
            Inst::Reduce { stage, .. }
                if !self.added[worker] && self.costs.stages.get(stage).is_some_and(|c| c.sum > 0.0) =>
            {
                self.passes[worker] = Some(Pass { inst, start, left: self.length(worker, inst, start) });
                self.note_repeat(worker, start);
                return Ok(true);
            }
            Inst::Reduce { stage, mb } => {
                let Some(end) = self.reduced(worker, stage, mb, start) else { return Ok(false) };
                self.added[worker] = false;
                end
            }
            Inst::Post(_) | Inst::Free { .. } => start,
            _ => return self.begin(worker, inst),
        };
        self.times[worker].communication += overhead;
        self.clocks[worker] = end + overhead;
        self.note_repeat(worker, start);
        self.positions[worker] += 1;
        Ok(true)
    }

    /// Begins a pass or an update, if what it needs has a time.
    fn begin(&mut self, worker: usize, inst: Inst) -> Result<bool> {
        let (stage, mb) = (inst.stage().unwrap_or(0), inst.mb().unwrap_or(0));
        let held = match inst.mb() {
            Some(mb) => self.wiring.worker(stage, mb) == Some(worker),
            None => self.wiring.replica(stage, worker).is_some(),
        };
        if !held {
            return Err(Error::schedule(format!("worker {worker} does not hold the stage of {inst:?}")));
        }
        let needs = direction(inst).map_or(Vec::new(), |d| self.ends(stage, mb, d));
        if needs.iter().any(|m| !self.transfers.contains_key(m)) {
            return Ok(false);
        }
        let mut start = self.clocks[worker];
        for m in &needs {
            if let Some(transfer) = self.transfers.remove(m) {
                self.times[worker].communication += waited(start, transfer);
                self.times[worker].blocked += (transfer.arrival - start).max(0.0);
                start = start.max(transfer.arrival);
            }
        }
        if matches!(inst, Inst::F { .. }) {
            self.live[worker].insert((stage, mb));
            let live = self.live[worker].len();
            self.times[worker].peak_activations = self.times[worker].peak_activations.max(live);
        }
        self.passes[worker] = Some(Pass { inst, start, left: self.length(worker, inst, start) });
        self.note_repeat(worker, start);
        self.positions[worker] += 1;
        Ok(true)
    }

    /// What a pass takes of a core that begins at `start`: with what the messages still take that the worker has sent.
    fn length(&mut self, worker: usize, inst: Inst, start: f64) -> f64 {
        let (since, left) = std::mem::take(&mut self.leaving[worker]);
        duration(inst, self.costs).unwrap_or(0.0) + (left - (start - since)).max(0.0)
    }

    /// Ends a pass or an update now.
    fn end(&mut self, worker: usize, Pass { inst, start, .. }: Pass) {
        let (stage, mb, end) = (inst.stage().unwrap_or(0), inst.mb().unwrap_or(0), self.now);
        if matches!(inst, Inst::Reduce { .. }) {
            // It comes to the instruction again, to wait for the others.
            (self.added[worker], self.clocks[worker]) = (true, end);
            self.times[worker].busy += duration(inst, self.costs).unwrap_or(0.0);
            self.times[worker].elapsed += end - start;
            return;
        }
        if matches!(inst, Inst::B { .. } | Inst::W { .. }) || self.programs.step_every == 0 {
            self.live[worker].remove(&(stage, mb));
        }
        for m in direction(inst).map_or(Vec::new(), |d| self.ends_made(stage, mb, d)) {
            let transfer = self.transfer(m, end);
            self.transfers.insert(m, transfer);
        }
        let time = &mut self.times[worker];
        if time.busy == 0.0 {
            time.first = start;
        }
        time.busy += duration(inst, self.costs).unwrap_or(0.0);
        time.communication += self.costs.overhead;
        time.elapsed += end - start;
        time.last = end;
        self.events.push(Event { worker, inst, start, end });
        self.clocks[worker] = end + self.costs.overhead;
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
            .map(|(edge, _)| Message { edge, mb, direction })
            .filter(|&m| !self.lowered || self.wiring.route(m).is_none())
            .collect()
    }

    /// When a `Reduce` ends to which `worker` came at `now`, if all others have come to it.
    fn reduced(&mut self, worker: usize, stage: usize, mb: MicroBatch, now: f64) -> Option<f64> {
        let all = self.wiring.stages.get(stage)?.len();
        let meeting = self.reduces.entry((stage, mb)).or_default();
        meeting.came.entry(worker).or_insert(now);
        if meeting.came.len() < all {
            return None;
        }
        let takes = self.costs.stages.get(stage)?.reduce;
        let end = match meeting.end {
            Some(end) => end,
            None => {
                let mut begins = meeting.came.values().copied().fold(0.0, f64::max);
                let members = &self.wiring.stages[stage];
                if takes > 0.0 {
                    // What their links still have to move goes first.
                    begins = self.free.iter().flat_map(|way| members.iter().map(|&w| way[w])).fold(begins, f64::max);
                    self.free.iter_mut().for_each(|way| members.iter().for_each(|&w| way[w] = begins + takes));
                }
                *meeting.end.insert(begins + takes)
            }
        };
        meeting.gone += 1;
        if meeting.gone == all {
            self.reduces.remove(&(stage, mb));
        }
        self.times[worker].communication += takes;
        Some(end)
    }

    /// A message leaves as soon as the links of both workers are free.
    fn transfer(&mut self, m: Message, sent: f64) -> Transfer {
        let Some((from, to)) = self.wiring.route(m) else { return Transfer { sent, arrival: sent } };
        let cost = self.costs.edges[m.edge];
        let seconds = if m.direction == Direction::Forward { cost.forward } else { cost.backward };
        let [out, into] = &mut self.free;
        let end = if seconds > 0.0 { sent.max(out[from]).max(into[to]) + seconds } else { sent };
        if seconds > 0.0 {
            (out[from], into[to]) = (end, end);
        }
        let arrival = end + cost.latency;
        if cost.handling > 0.0 {
            let (since, left) = self.leaving[from];
            self.leaving[from] = (sent, (left - (sent - since)).max(0.0) + cost.handling);
            self.coming.push(Coming { worker: to, at: arrival, handling: cost.handling });
        }
        Transfer { sent, arrival }
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

/// Which way the messages go that a pass needs and makes.
fn direction(inst: Inst) -> Option<Direction> {
    match inst {
        Inst::F { .. } => Some(Direction::Forward),
        Inst::B { .. } | Inst::I { .. } => Some(Direction::Backward),
        _ => None,
    }
}
