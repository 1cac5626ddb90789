//! The rules that the workers' programs must keep together: the order of the messages of each channel, and no deadlock.
//!
//! What a worker may do never stops being possible while others go on, so that one order of execution decides for all of them.
use super::{
    Sends,
    channels::{Channels, Clash},
    fault::{Broken, Rule, excerpt},
    repeat::Cycles,
    stage::difference,
};
use crate::{
    Error, Result,
    pipeline::schedule::{Inst, LONGEST, MicroBatch, Program, Programs, Wiring, program::lcm},
};
use std::collections::{BTreeMap, BTreeSet};

/// Runs all programs against each other with sends of that kind.
pub(super) fn check(programs: &Programs, wiring: &Wiring, sends: Sends) -> Result<()> {
    let workers = programs.workers.len();
    // Every worker comes to the same place of its period after so many micro-batches, and meets the same ones there.
    let shifts = programs.workers.iter().filter(|p| p.repeats > 0 && p.shift > 0).map(|p| p.shift);
    let pairs = (0..wiring.edges.len()).map(|edge| wiring.pairs(edge));
    let turn = if programs.workers.iter().any(|p| p.repeats > 1) { shifts.chain(pairs).fold(1, lcm) } else { 1 };
    let mut joint = Joint {
        programs,
        wiring,
        positions: vec![0; workers],
        sends_until: vec![0; workers],
        channels: Channels::new(wiring, sends),
        reduces: BTreeMap::new(),
        turn,
        allowed: 0,
        done: 0,
    };
    joint.run()?;
    joint.finish()
}

/// Why a worker stopped.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stop {
    /// At the end of its program.
    Ended,
    /// It is ahead of the others by a turn.
    Ahead,
    /// It needs another worker.
    Blocked,
}

/// Workers of a stage that have come to a `Reduce`.
#[derive(Default)]
struct Meeting {
    here: BTreeSet<usize>,
    /// How many of them have gone on, once all were here.
    gone: usize,
}

struct Joint<'a> {
    programs: &'a Programs,
    wiring: &'a Wiring,
    positions: Vec<usize>,
    /// Where the run of sends ends whose batches have been formed.
    sends_until: Vec<usize>,
    channels: Channels,
    /// Workers that have come to a `Reduce`, by stage and micro-batch; and how many have gone on.
    reduces: BTreeMap<(usize, MicroBatch), Meeting>,
    /// Micro-batches of a turn: workers go on turn by turn, so that none runs far ahead and the state can repeat.
    turn: usize,
    /// Repeats that begin below this micro-batch may be begun.
    allowed: usize,
    /// Instructions done.
    done: usize,
}

impl Joint<'_> {
    fn run(&mut self) -> Result<()> {
        let mut cycles = Some(Cycles::new());
        for turn in 1.. {
            self.allowed = self.allowed.saturating_add(self.turn);
            let before = self.done;
            let stops = self.go_on()?;
            if stops.iter().all(|&s| s == Stop::Ended) {
                return Ok(());
            }
            if self.done == before && !stops.contains(&Stop::Ahead) {
                return Err(self.deadlock(&stops));
            }
            let Some(seen) = cycles.as_mut().filter(|c| c.wants(turn)) else { continue };
            let Some(state) = self.relative() else { continue };
            if let Some(turns) = seen.see(turn, state) {
                self.skip(turns);
                cycles = None;
            }
        }
        Ok(())
    }

    /// Every worker goes on until none can.
    fn go_on(&mut self) -> Result<Vec<Stop>> {
        let workers = self.programs.workers.len();
        let mut stops = vec![Stop::Blocked; workers];
        let mut ready: Vec<usize> = (0..workers).rev().collect();
        let mut woken = Vec::new();
        while let Some(worker) = ready.pop() {
            stops[worker] = self.go_on_with(worker, &mut woken)?;
            // A worker that is woken twice finds nothing to do the second time.
            ready.extend(woken.drain(..).filter(|&w: &usize| w != worker && stops[w] == Stop::Blocked));
            if self.done > LONGEST.saturating_mul(workers) {
                let what = format!("after {} instructions of all workers their state has not repeated", self.done);
                return Err(self.broken(worker, Broken::new(Rule::Length, what)));
            }
        }
        Ok(stops)
    }

    fn go_on_with(&mut self, worker: usize, woken: &mut Vec<usize>) -> Result<Stop> {
        let program = &self.programs.workers[worker];
        loop {
            let position = self.positions[worker];
            let Some(inst) = program.get(position) else { return Ok(Stop::Ended) };
            if let Some((repeat, 0)) = place(program, position)
                && repeat * program.shift >= self.allowed
            {
                return Ok(Stop::Ahead);
            }
            let clash = match inst {
                Inst::Recv(m) if !self.channels.receive(m) => return Ok(Stop::Blocked),
                Inst::Wait(m) if !self.channels.wait(m) => return Ok(Stop::Blocked),
                Inst::Reduce { stage, mb } if !self.meet(worker, stage, mb, woken) => return Ok(Stop::Blocked),
                Inst::Send(m) => {
                    if position >= self.sends_until[worker] {
                        self.sends_until[worker] = self.form_batches(program, position);
                    }
                    self.channels.send(m)
                }
                Inst::Post(m) => self.channels.post(m),
                _ => Ok(()),
            };
            clash.map_err(|c| self.clash(worker, c))?;
            for m in self.channels.take_moved() {
                if let Some((from, to)) = self.wiring.route(m) {
                    woken.extend([from, to]);
                }
            }
            self.positions[worker] += 1;
            self.done += 1;
        }
    }

    /// The sends that stand directly after one another from `position` on, one batch for each goal; where they end.
    fn form_batches(&mut self, program: &Program, position: usize) -> usize {
        let mut sends = Vec::new();
        let mut end = position;
        while let Some(Inst::Send(m)) = program.get(end) {
            sends.push((self.wiring.route(m).map(|(_, to)| to), m));
            end += 1;
        }
        self.channels.form_batches(sends);
        end
    }

    fn broken(&self, worker: usize, broken: Broken) -> Error {
        broken.at(worker, &self.programs.workers[worker], self.positions[worker])
    }

    fn clash(&self, worker: usize, clash: Clash) -> Error {
        let Clash { posted, sent } = clash;
        let what = format!("{sent} is sent where {posted} is posted");
        self.broken(worker, Broken::new(Rule::Channel, what))
    }

    /// The error of workers that wait for each other, beginning with the first one that waits.
    fn deadlock(&self, stops: &[Stop]) -> Error {
        let Some(first) = stops.iter().position(|&s| s == Stop::Blocked) else {
            return Error::schedule(format!("rule {} broken: no worker goes on", Rule::Deadlock));
        };
        let mut text = format!("with {} sends no worker can go on", self.channels.sends);
        let (mut worker, mut seen) = (first, vec![false; stops.len()]);
        while !seen[worker] && stops[worker] == Stop::Blocked {
            seen[worker] = true;
            let (program, position) = (&self.programs.workers[worker], self.positions[worker]);
            let inst = program.get(position);
            let (Some(inst), Some(peer)) = (inst, inst.and_then(|inst| self.peer(worker, inst))) else { break };
            let ended = if stops[peer] == Stop::Ended { ", which has ended" } else { "" };
            text += &format!("\n  worker {worker}, instruction {position}, {inst}, waits for worker {peer}{ended}\n");
            text += &excerpt(program, position);
            worker = peer;
        }
        self.broken(first, Broken::new(Rule::Deadlock, text))
    }

    /// The worker that another one waits for.
    fn peer(&self, worker: usize, inst: Inst) -> Option<usize> {
        if let Inst::Reduce { stage, mb } = inst {
            let here = self.reduces.get(&(stage, mb)).map(|m| &m.here);
            let is_missing = |w: &&usize| **w != worker && here.is_none_or(|here| !here.contains(*w));
            return self.wiring.stages.get(stage)?.iter().find(is_missing).copied();
        }
        let (from, to) = self.wiring.route(inst.message()?)?;
        Some(if worker == to { from } else { to })
    }

    /// A worker is at a `Reduce`; false if others of the stage are not there yet.
    fn meet(&mut self, worker: usize, stage: usize, mb: MicroBatch, woken: &mut Vec<usize>) -> bool {
        let Some(all) = self.wiring.stages.get(stage) else { return true };
        let meeting = self.reduces.entry((stage, mb)).or_default();
        meeting.here.insert(worker);
        if meeting.here.len() < all.len() {
            return false;
        }
        meeting.gone += 1;
        if meeting.gone == 1 {
            woken.extend(all);
        }
        if meeting.gone == all.len() {
            self.reduces.remove(&(stage, mb));
        }
        true
    }

    /// All that what follows depends on, as seen from `allowed`; `None` while a worker is before or after its repeats.
    fn relative(&self) -> Option<Vec<isize>> {
        let mut out = Vec::new();
        for (worker, program) in self.programs.workers.iter().enumerate() {
            let position = self.positions[worker];
            if position >= program.len() {
                out.push(-1);
                continue;
            }
            let (repeat, offset) = place(program, position)?;
            let sends = self.sends_until[worker].saturating_sub(position);
            out.extend([offset as isize, difference(repeat * program.shift, self.allowed), sends as isize]);
        }
        out.push(self.reduces.len() as isize);
        for (&(stage, mb), meeting) in &self.reduces {
            out.extend([stage, meeting.gone, meeting.here.len()].map(|n| n as isize));
            out.push(difference(mb, self.allowed));
            out.extend(meeting.here.iter().map(|&w| w as isize));
        }
        self.channels.relative(self.allowed, &mut out);
        Some(out)
    }

    /// Skips as many cycles of `turns` turns as all workers have before them. In each every worker that has not ended comes
    /// `turns * turn` micro-batches further: its state, seen from `allowed`, is the same.
    fn skip(&mut self, turns: usize) {
        let cycle = turns * self.turn;
        let left = self.programs.workers.iter().zip(&self.positions).filter_map(|(program, &position)| {
            let (repeat, _) = place(program, position)?;
            // One repeat remains, of which this one may be a part.
            Some((program.repeats - repeat - 1) / (cycle / program.shift))
        });
        let Some(times) = left.min() else { return };
        for ((program, position), until) in
            self.programs.workers.iter().zip(&mut self.positions).zip(&mut self.sends_until)
        {
            if place(program, *position).is_some() {
                let instructions = times * (cycle / program.shift) * program.period.len();
                *position += instructions;
                *until += instructions;
            }
        }
        self.allowed += times * cycle;
        let later = |((stage, mb), meeting)| ((stage, mb + times * cycle), meeting);
        self.reduces = std::mem::take(&mut self.reduces).into_iter().map(later).collect();
        self.channels.advance(times * cycle);
    }

    fn finish(&self) -> Result<()> {
        let Some(m) = self.channels.unmatched() else { return Ok(()) };
        let worker = self.wiring.route(m).map_or(0, |(_, to)| to);
        Err(self.broken(worker, Broken::new(Rule::Message, format!("message {m} is sent and never posted"))))
    }
}

/// The repeat that a position lies in, and the offset in it.
fn place(program: &Program, position: usize) -> Option<(usize, usize)> {
    let past = position.checked_sub(program.prologue.len())?;
    let (repeat, offset) = (past.checked_div(program.period.len())?, past.checked_rem(program.period.len())?);
    (repeat < program.repeats).then_some((repeat, offset))
}
