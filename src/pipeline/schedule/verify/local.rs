//! The rules that one worker's program must keep by itself, gone through instruction by instruction.
use super::{
    facts::WorkerFacts,
    fault::{Broken, Rule},
    repeat::{Cycles, WINDOW},
    stage::{StageState, Terms, difference},
};
use crate::{
    Result,
    pipeline::schedule::{Direction, Inst, LONGEST, Link, Message, MicroBatch, Program, Programs, Read, Wiring},
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Goes through the program of a worker; the error of the first broken rule, or what it held, and its stages.
pub(super) fn check(
    worker: usize,
    program: &Program,
    wiring: &Wiring,
    programs: &Programs,
) -> Result<(WorkerFacts, BTreeMap<usize, StageState>)> {
    let mut state = WorkerState::new(worker, wiring, programs);
    let start = program.prologue.len();
    let at = |position: usize| move |broken: Broken| broken.at(worker, program, position);
    let run = |state: &mut WorkerState, insts: &[Inst], position: usize, repeat: usize| -> Result<()> {
        let (mbs, versions) = (repeat * program.shift, repeat * program.version_shift);
        for (i, inst) in insts.iter().enumerate() {
            let shifted = inst.shifted(mbs as isize, versions as isize);
            let inst = shifted.ok_or_else(|| Broken::new(Rule::Length, "its numbers are too large"));
            inst.and_then(|inst| state.execute(inst)).map_err(at(position + i))?;
        }
        Ok(())
    };
    run(&mut state, &program.prologue, 0, 0)?;

    let mut cycles = Some(Cycles::new());
    let mut ends: VecDeque<Vec<usize>> = VecDeque::new();
    let mut repeat = if program.period.is_empty() { program.repeats } else { 0 };
    let mut done = 0;
    while repeat < program.repeats {
        let position = start + repeat * program.period.len();
        done += program.period.len();
        if done > LONGEST {
            let what = format!("after {LONGEST} instructions its state has not repeated");
            return Err(at(position)(Broken::new(Rule::Length, what)));
        }
        run(&mut state, &program.period, position, repeat)?;
        repeat += 1;
        let Some(seen) = &mut cycles else { continue };
        ends.push_back(state.reads());
        if ends.len() > WINDOW + 1 {
            ends.pop_front();
        }
        if !seen.wants(repeat) {
            continue;
        }
        let relative = state.relative(repeat * program.shift, repeat * program.version_shift);
        if let Some(cycle) = seen.see(repeat, relative) {
            // The last repeat is gone through: how many micro-batches there are is no part of the state, and if any repeat
            // goes beyond them the last one does.
            let times = (program.repeats - repeat).saturating_sub(1) / cycle;
            // Forward passes alone make no versions, whatever the program counts.
            let versions = if programs.step_every == 0 { 0 } else { cycle * program.version_shift };
            let mbs = cycle * program.shift;
            state.advance(&ends[ends.len() - 1 - cycle], times, mbs, versions);
            repeat += times * cycle;
            cycles = None;
        }
    }
    run(&mut state, &program.epilogue, start + program.repeats * program.period.len(), program.repeats)?;
    state.finish().map_err(at(program.len()))?;
    Ok((state.peak, state.stages))
}

/// A worker between two instructions.
struct WorkerState<'a> {
    worker: usize,
    wiring: &'a Wiring,
    forward_only: bool,
    stages: BTreeMap<usize, StageState>,
    /// The edges that lead to and from each stage here.
    links: BTreeMap<usize, [Vec<usize>; 2]>,
    posted: BTreeSet<Message>,
    /// Received, and not used yet.
    inbox: BTreeSet<Message>,
    /// Made, and not sent yet.
    outbox: BTreeSet<Message>,
    /// Sent, and not waited for yet.
    sending: BTreeSet<Message>,
    activations: usize,
    pending_weights: usize,
    peak: WorkerFacts,
}

impl<'a> WorkerState<'a> {
    fn new(worker: usize, wiring: &'a Wiring, programs: &Programs) -> WorkerState<'a> {
        let here = |s: usize| Some((s, wiring.replica(s, worker)?));
        let edges = |of: fn(&Link) -> usize, stage: usize| {
            let all = wiring.edges.iter().enumerate();
            all.filter(|(_, link)| of(link) == stage).map(|(edge, _)| edge).collect()
        };
        let stages: Vec<(usize, (usize, usize))> = (0..wiring.stages.len()).filter_map(here).collect();
        let state = |(replica, replicas)| StageState::new(Terms::new(programs, replica, replicas));
        WorkerState {
            worker,
            wiring,
            forward_only: programs.step_every == 0,
            stages: stages.iter().map(|&(s, replica)| (s, state(replica))).collect(),
            links: stages.iter().map(|&(s, _)| (s, [edges(|l| l.to, s), edges(|l| l.from, s)])).collect(),
            posted: BTreeSet::new(),
            inbox: BTreeSet::new(),
            outbox: BTreeSet::new(),
            sending: BTreeSet::new(),
            activations: 0,
            pending_weights: 0,
            peak: WorkerFacts::default(),
        }
    }

    fn execute(&mut self, inst: Inst) -> Result<(), Broken> {
        match inst {
            Inst::F { stage, mb, read } => self.forward(stage, mb, read)?,
            Inst::B { stage, mb } => self.backward(stage, mb, false)?,
            Inst::I { stage, mb } => self.backward(stage, mb, true)?,
            Inst::W { stage, mb } => {
                self.stage(stage)?.do_weight(mb)?;
                self.pending_weights -= 1;
                self.activations -= 1;
            }
            Inst::Reduce { stage, mb } => self.stage(stage)?.do_reduce(mb)?,
            Inst::Step { stage, keep } => self.stage(stage)?.do_step(keep)?,
            Inst::Free { stage, version } => self.stage(stage)?.do_free(version)?,
            Inst::Post(m) => self.post(m)?,
            Inst::Recv(m) => self.receive(m)?,
            Inst::Send(m) => self.send(m)?,
            Inst::Wait(m) => self.wait(m)?,
        }
        let peak = &mut self.peak;
        peak.peak_activations = peak.peak_activations.max(self.activations);
        peak.peak_pending_weights = peak.peak_pending_weights.max(self.pending_weights);
        peak.peak_receives = peak.peak_receives.max(self.posted.len() + self.inbox.len());
        peak.peak_sends = peak.peak_sends.max(self.sending.len());
        Ok(())
    }

    fn stage(&mut self, stage: usize) -> Result<&mut StageState, Broken> {
        let elsewhere = match self.wiring.stages.get(stage).map(Vec::as_slice) {
            Some([w]) => format!("stage {stage} is on worker {w}"),
            Some(on) => format!("stage {stage} is on workers {on:?}"),
            None => format!("there is no stage {stage}"),
        };
        self.stages.get_mut(&stage).ok_or_else(|| Broken::new(Rule::Place, elsewhere))
    }

    /// A stage that works on micro-batch `mb` here.
    fn held(&self, stage: usize, mb: MicroBatch) -> Option<&StageState> {
        self.stages.get(&stage).filter(|_| self.wiring.worker(stage, mb) == Some(self.worker))
    }

    fn forward(&mut self, stage: usize, mb: MicroBatch, read: Read) -> Result<(), Broken> {
        self.stage(stage)?.do_forward(mb, read)?;
        self.pass(stage, mb, Direction::Forward)?;
        self.peak.peak_activations = self.peak.peak_activations.max(self.activations + 1);
        if !self.forward_only {
            self.activations += 1;
        }
        Ok(())
    }

    fn backward(&mut self, stage: usize, mb: MicroBatch, split: bool) -> Result<(), Broken> {
        self.stage(stage)?.do_backward(mb)?;
        self.pass(stage, mb, Direction::Backward)?;
        if split {
            self.pending_weights += 1;
        } else {
            self.stage(stage)?.fold(mb)?;
            self.activations -= 1;
        }
        Ok(())
    }

    /// Takes what a pass needs, and puts what it makes where a `Send` finds it.
    fn pass(&mut self, stage: usize, mb: MicroBatch, direction: Direction) -> Result<(), Broken> {
        let Some([to, from]) = self.links.get(&stage) else { return Ok(()) };
        let (inputs, outputs) = if direction == Direction::Forward { (to, from) } else { (from, to) };
        for &edge in inputs {
            let link = self.wiring.edges[edge];
            let m = Message { edge, mb, direction };
            let (here, what) = match direction {
                Direction::Forward => (self.held(link.from, mb).map(|s| s.forward.contains(mb)), "value"),
                Direction::Backward if !link.grad => continue,
                Direction::Backward => (self.held(link.to, mb).map(|s| s.backward.contains(mb)), "gradient"),
            };
            let between = format!("edge {edge} (stage {} to {})", link.from, link.to);
            match here {
                Some(true) => {}
                Some(false) => return Err(Broken::new(Rule::Order, format!("the {what} of {between} was not made"))),
                None if self.inbox.remove(&m) => {}
                None => return Err(Broken::new(Rule::Order, format!("the {what} of {between} was not received"))),
            }
        }
        for &edge in outputs {
            let m = Message { edge, mb, direction };
            if self.wiring.route(m).is_some() {
                self.outbox.insert(m);
            }
        }
        Ok(())
    }

    /// Whether a message exists, and leads from or to this worker.
    fn check_route(&self, m: Message, receive: bool) -> Result<(), Broken> {
        let Some((from, to)) = self.wiring.route(m) else {
            return Err(Broken::new(Rule::Place, "there is no such message between workers"));
        };
        if self.worker != if receive { to } else { from } {
            return Err(Broken::new(Rule::Place, format!("the message goes from worker {from} to worker {to}")));
        }
        Ok(())
    }

    /// Whether the pass that makes a message (or, of the other side, uses it) was done.
    fn passed(&self, m: Message, receive: bool) -> bool {
        let link = self.wiring.edges[m.edge];
        match m.direction {
            Direction::Forward => {
                self.stages.get(if receive { &link.to } else { &link.from }).is_some_and(|s| s.forward.contains(m.mb))
            }
            Direction::Backward => {
                self.stages.get(if receive { &link.from } else { &link.to }).is_some_and(|s| s.backward.contains(m.mb))
            }
        }
    }

    fn post(&mut self, m: Message) -> Result<(), Broken> {
        self.check_route(m, true)?;
        if self.passed(m, true) || self.inbox.contains(&m) || !self.posted.insert(m) {
            return Err(Broken::new(Rule::Message, "it was posted before"));
        }
        Ok(())
    }

    fn receive(&mut self, m: Message) -> Result<(), Broken> {
        self.check_route(m, true)?;
        if !self.posted.remove(&m) {
            let again = self.passed(m, true) || self.inbox.contains(&m);
            return Err(Broken::new(
                Rule::Message,
                if again { "it was received before" } else { "it was not posted before" },
            ));
        }
        self.inbox.insert(m);
        Ok(())
    }

    fn send(&mut self, m: Message) -> Result<(), Broken> {
        self.check_route(m, false)?;
        if !self.outbox.remove(&m) {
            return Err(if self.passed(m, false) {
                Broken::new(Rule::Message, "it was sent before")
            } else {
                Broken::new(Rule::Order, "what it sends was not made before")
            });
        }
        self.sending.insert(m);
        Ok(())
    }

    fn wait(&mut self, m: Message) -> Result<(), Broken> {
        self.check_route(m, false)?;
        match self.sending.remove(&m) {
            true => Ok(()),
            false => Err(Broken::new(Rule::Message, "no send of it is under way")),
        }
    }

    /// Whether all is done at the end of the program.
    fn finish(&self) -> Result<(), Broken> {
        for (stage, state) in &self.stages {
            state.finish().map_err(|b| Broken::new(b.rule, format!("stage {stage}: {}", b.what)))?;
        }
        let left = [
            (&self.posted, "posted and never received"),
            (&self.inbox, "received and never used"),
            (&self.outbox, "made and never sent"),
            (&self.sending, "sent and never waited for"),
        ];
        for (set, what) in left {
            if let Some(m) = set.first() {
                return Err(Broken::new(Rule::Message, format!("message {m} was {what}")));
            }
        }
        Ok(())
    }

    /// How many readings each stage has recorded.
    fn reads(&self) -> Vec<usize> {
        self.stages.values().map(|s| s.reads.seen().len()).collect()
    }

    fn relative(&self, mbs: usize, versions: usize) -> Vec<isize> {
        let mut out = Vec::new();
        for stage in self.stages.values() {
            stage.relative(mbs, versions, &mut out);
        }
        for set in [&self.posted, &self.inbox, &self.outbox, &self.sending] {
            out.push(set.len() as isize);
            out.extend(set.iter().flat_map(|m| {
                [m.edge as isize, difference(m.mb, mbs), isize::from(m.direction == Direction::Backward)]
            }));
        }
        out
    }

    /// The same state after a cycle of so many micro-batches and versions was done `times` times more; `ends` tells how many
    /// readings there were before its last time.
    fn advance(&mut self, ends: &[usize], times: usize, mbs: usize, versions: usize) {
        for (stage, &first) in self.stages.values_mut().zip(ends) {
            stage.reads.skip(first, times, mbs, versions);
            stage.advance(times * mbs, times * versions);
        }
        for set in [&mut self.posted, &mut self.inbox, &mut self.outbox, &mut self.sending] {
            *set = set.iter().map(|m| Message { mb: m.mb + times * mbs, ..*m }).collect();
        }
    }
}
