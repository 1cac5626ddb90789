//! Executing the instructions.
use super::Fault;
use pipewright::pipeline::schedule::{
    Direction, Inst, Message, MicroBatch, Programs, Read, Version, WeightPolicy, Wiring,
    verify::{Rule, Sends, WorkerFacts},
};
use std::collections::{BTreeMap, BTreeSet};

/// A tensor, known by the pass that made it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Made {
    stage: usize,
    mb: MicroBatch,
    by: Direction,
}

/// A message that was sent, and by which instruction.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Sent {
    value: Made,
    worker: usize,
    at: usize,
}

/// One direction of an edge between two workers: its n-th post takes what its n-th send sends.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Channel {
    sent: Vec<Sent>,
    posts: usize,
}

impl Channel {
    pub fn is_even(&self) -> bool {
        self.sent.len() == self.posts
    }
}

/// What F leaves for the backward pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tape {
    pub mb: MicroBatch,
    /// The version that F read.
    pub forward: Version,
    /// The version that B or I read, once it is done.
    pub backward: Option<Version>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stage {
    /// The micro-batches of all F, in their order, and the versions that they read.
    pub forwards: Vec<(MicroBatch, Version)>,
    /// The micro-batches of all B and I.
    backwards: Vec<MicroBatch>,
    /// In flight: F is done, B (or I) is not.
    pub tapes: Vec<Tape>,
    /// I is done, W is not.
    pub pending: Vec<Tape>,
    /// The gradients since the last update.
    pub gradients: Vec<Tape>,
    /// The gradients that each update folded.
    pub updates: Vec<Vec<Tape>>,
    /// Up to which micro-batch they were summed over the workers of the stage, since the last update.
    pub summed: Option<MicroBatch>,
    /// The same of each update.
    pub sums: Vec<Option<MicroBatch>>,
    pub kept: BTreeSet<Version>,
    /// The most versions held at once.
    pub versions: usize,
}

impl Stage {
    /// The newest version: each update made one.
    fn newest(&self) -> Version {
        self.updates.len()
    }

    /// The versions in memory: the newest, those kept, and those on the tapes. Tapes count until the gradients of the weights
    /// are made, since the W of some layers reads them too.
    fn held(&self, weights: WeightPolicy) -> BTreeSet<Version> {
        let mut held = self.kept.clone();
        held.insert(self.newest());
        if weights == WeightPolicy::Stashed {
            held.extend(self.tapes.iter().chain(&self.pending).map(|t| t.forward));
        }
        held
    }
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Worker {
    /// The instruction that is next.
    pub at: usize,
    pub fault: Option<Fault>,
    pub stages: BTreeMap<usize, Stage>,
    /// Received, or made here for a stage that is here too.
    pub inbox: BTreeMap<Message, Made>,
    /// Made for a stage elsewhere.
    pub outbox: BTreeMap<Message, Made>,
    /// Which post of its channel it was.
    pub posted: Vec<(Message, usize)>,
    /// Which send of its channel it was.
    pub sending: Vec<(Message, usize)>,
    pub peaks: WorkerFacts,
}

/// All workers between two instructions.
#[derive(Clone, Debug, PartialEq)]
pub struct Machine<'a> {
    pub insts: &'a [Vec<Inst>],
    pub wiring: &'a Wiring,
    weights: WeightPolicy,
    micro_batches: usize,
    forward_only: bool,
    pub sends: Sends,
    pub workers: Vec<Worker>,
    pub channels: BTreeMap<Line, Channel>,
    /// How often each worker has come to a sum of a stage up to a micro-batch.
    meetings: BTreeMap<(usize, MicroBatch), BTreeSet<usize>>,
}

/// Where messages flow in order: edge, direction, sender and receiver.
type Line = (usize, Direction, usize, usize);

/// A broken rule and how, or whether the instruction was executed: if not it must wait for others.
type Executed = Result<bool, (Rule, String)>;

impl<'a> Machine<'a> {
    pub fn new(programs: &Programs, insts: &'a [Vec<Inst>], wiring: &'a Wiring, sends: Sends) -> Machine<'a> {
        let mut workers = vec![Worker::default(); insts.len()];
        for (stage, on) in wiring.stages.iter().enumerate() {
            for &worker in on {
                workers[worker].stages.insert(stage, Stage { versions: 1, ..Stage::default() });
            }
        }
        let Programs { weights, micro_batches, step_every, .. } = *programs;
        let forward_only = step_every == 0;
        let (channels, meetings) = (BTreeMap::new(), BTreeMap::new());
        Machine { insts, wiring, weights, micro_batches, forward_only, sends, workers, channels, meetings }
    }

    /// Executes the next instruction of a worker; false if it cannot go on.
    pub fn go_on(&mut self, worker: usize) -> bool {
        let Worker { at, fault, .. } = &self.workers[worker];
        let at = *at;
        let Some(&inst) = self.insts[worker].get(at).filter(|_| fault.is_none()) else { return false };
        match self.execute(worker, inst) {
            Ok(false) => return false,
            Ok(true) => self.workers[worker].at += 1,
            Err((rule, what)) => {
                self.workers[worker].fault = Some(Fault { rule, worker, at, what: format!("{inst}: {what}") })
            }
        }
        self.count(worker);
        true
    }

    fn execute(&mut self, worker: usize, inst: Inst) -> Executed {
        if let Inst::B { stage, .. }
        | Inst::I { stage, .. }
        | Inst::W { stage, .. }
        | Inst::Reduce { stage, .. }
        | Inst::Step { stage, .. } = inst
            && self.forward_only
        {
            self.stage(worker, stage)?;
            return Err((Rule::Once, "there are only forward passes".into()));
        }
        if let Inst::B { stage, mb } | Inst::I { stage, mb } | Inst::W { stage, mb } = inst {
            self.stage(worker, stage)?;
            if self.worker_of(stage, mb) != worker {
                return Err((Rule::Place, "another worker has it".into()));
            }
        }
        match inst {
            Inst::F { stage, mb, read } => {
                if self.stage(worker, stage)?.forwards.iter().any(|f| f.0 == mb) || mb >= self.micro_batches {
                    return Err((Rule::Once, "there is no such micro-batch, or it was forwarded before".into()));
                }
                if self.worker_of(stage, mb) != worker {
                    return Err((Rule::Place, "another worker has it".into()));
                }
                let newest = self.stage(worker, stage)?.newest();
                let version = match read {
                    Read::Current => newest,
                    Read::At(version) => version,
                };
                if version != newest && !self.stage(worker, stage)?.kept.contains(&version) {
                    return Err((Rule::Version, format!("version {version} is gone, or still to be made")));
                }
                self.take_inputs(worker, stage, mb, Direction::Forward)?;
                let s = self.stage(worker, stage)?;
                s.forwards.push((mb, version));
                s.tapes.push(Tape { mb, forward: version, backward: None });
                self.hand_over(worker, stage, mb, Direction::Forward);
            }
            Inst::B { stage, mb } | Inst::I { stage, mb } => {
                let weights = self.weights;
                let s = self.stage(worker, stage)?;
                if s.backwards.contains(&mb) {
                    return Err((Rule::Once, "it was backwarded before".into()));
                }
                s.backwards.push(mb);
                let newest = s.newest();
                let at = s.tapes.iter().position(|t| t.mb == mb);
                let mut tape = s.tapes.remove(at.ok_or((Rule::Order, "it is not in flight".into()))?);
                tape.backward = Some(if weights == WeightPolicy::Stashed { tape.forward } else { newest });
                let too_late = s.summed.is_some() && matches!(inst, Inst::B { .. });
                let made = if matches!(inst, Inst::B { .. }) { &mut s.gradients } else { &mut s.pending };
                made.push(tape);
                self.take_inputs(worker, stage, mb, Direction::Backward)?;
                if too_late {
                    return Err((Rule::Reduce, "its gradient comes after the sum".into()));
                }
                self.hand_over(worker, stage, mb, Direction::Backward);
            }
            Inst::W { stage, mb } => {
                let s = self.stage(worker, stage)?;
                if s.gradients.iter().chain(s.updates.iter().flatten()).any(|t| t.mb == mb) {
                    return Err((Rule::Once, "its gradient was made before".into()));
                }
                let at = s.pending.iter().position(|t| t.mb == mb);
                let tape = s.pending.remove(at.ok_or((Rule::Order, "there is no I of it".into()))?);
                if s.summed.is_some() {
                    return Err((Rule::Reduce, "its gradient comes after the sum".into()));
                }
                s.gradients.push(tape);
            }
            Inst::Reduce { stage, mb } => {
                let all = self.wiring.stages.get(stage).map_or(0, Vec::len);
                let s = self.stage(worker, stage)?;
                if all == 1 || s.summed.is_some() {
                    return Err((Rule::Reduce, "there is nothing to sum".into()));
                }
                let meeting = self.meetings.entry((stage, mb)).or_default();
                meeting.insert(worker);
                if meeting.len() < all {
                    return Ok(false);
                }
                self.stage(worker, stage)?.summed = Some(mb);
            }
            Inst::Step { stage, keep } => {
                let s = self.stage(worker, stage)?;
                let summed = s.summed.take();
                s.sums.push(summed);
                if keep {
                    s.kept.insert(s.newest());
                }
                let gradients = std::mem::take(&mut s.gradients);
                s.updates.push(gradients);
            }
            Inst::Free { stage, version } => {
                if !self.stage(worker, stage)?.kept.remove(&version) {
                    return Err((Rule::Version, "it is not kept".into()));
                }
            }
            Inst::Post(m) => {
                self.check_end(worker, m, false)?;
                let channel = self.channels.entry(self.line(m)).or_default();
                self.workers[worker].posted.push((m, channel.posts));
                channel.posts += 1;
            }
            Inst::Recv(m) => {
                self.check_end(worker, m, false)?;
                let at = self.workers[worker].posted.iter().position(|(posted, _)| *posted == m);
                let at = at.ok_or((Rule::Message, "it is not posted".into()))?;
                let number = self.workers[worker].posted[at].1;
                if !self.has_arrived(m, number) {
                    return Ok(false);
                }
                let Sent { value, .. } = self.channels[&self.line(m)].sent[number];
                if value != self.made(m) {
                    return Err((Rule::Channel, format!("it gets {value:?}")));
                }
                self.workers[worker].posted.remove(at);
                self.workers[worker].inbox.insert(m, value);
            }
            Inst::Send(m) => {
                self.check_end(worker, m, true)?;
                let channel = self.channels.entry(self.line(m)).or_default();
                let w = &mut self.workers[worker];
                let Some(value) = w.outbox.remove(&m) else {
                    let again = channel.sent.iter().any(|sent| sent.value.mb == m.mb);
                    return Err((if again { Rule::Message } else { Rule::Order }, "there is nothing to send".into()));
                };
                w.sending.push((m, channel.sent.len()));
                channel.sent.push(Sent { value, worker, at: w.at });
            }
            Inst::Wait(m) => {
                self.check_end(worker, m, true)?;
                let at = self.workers[worker].sending.iter().position(|(sent, _)| *sent == m);
                let at = at.ok_or((Rule::Message, "it is not being sent".into()))?;
                if !self.has_left(m, self.workers[worker].sending[at].1) {
                    return Ok(false);
                }
                self.workers[worker].sending.remove(at);
            }
        }
        Ok(true)
    }

    fn stage(&mut self, worker: usize, stage: usize) -> Result<&mut Stage, (Rule, String)> {
        self.workers[worker].stages.get_mut(&stage).ok_or((Rule::Place, "the stage is not here".into()))
    }

    /// The stages that make and use a message.
    fn ends(&self, m: Message) -> (usize, usize) {
        let link = self.wiring.edges[m.edge];
        if m.direction == Direction::Forward { (link.from, link.to) } else { (link.to, link.from) }
    }

    /// What a message must be.
    fn made(&self, m: Message) -> Made {
        Made { stage: self.ends(m).0, mb: m.mb, by: m.direction }
    }

    /// Micro-batches go round the workers of a stage.
    fn worker_of(&self, stage: usize, mb: MicroBatch) -> usize {
        let on = &self.wiring.stages[stage];
        on[mb % on.len()]
    }

    fn line(&self, m: Message) -> Line {
        let (from, to) = self.ends(m);
        (m.edge, m.direction, self.worker_of(from, m.mb), self.worker_of(to, m.mb))
    }

    /// The messages of a micro-batch, of all edges that have some of that direction.
    fn messages(&self, mb: MicroBatch, direction: Direction) -> Vec<Message> {
        let all = self.wiring.edges.iter().enumerate();
        let some = all.filter(|(_, link)| direction == Direction::Forward || link.grad);
        some.map(|(edge, _)| Message { edge, mb, direction }).collect()
    }

    /// Takes from the inbox what a pass needs.
    fn take_inputs(
        &mut self,
        worker: usize,
        stage: usize,
        mb: MicroBatch,
        direction: Direction,
    ) -> Result<(), (Rule, String)> {
        for m in self.messages(mb, direction) {
            if self.ends(m).1 != stage {
                continue;
            }
            match self.workers[worker].inbox.remove(&m) {
                None => return Err((Rule::Order, format!("{m} is not here"))),
                Some(value) if value != self.made(m) => return Err((Rule::Order, format!("{m} is {value:?}"))),
                Some(_) => {}
            }
        }
        Ok(())
    }

    /// Puts what a pass has made where it is needed, or sent from.
    fn hand_over(&mut self, worker: usize, stage: usize, mb: MicroBatch, direction: Direction) {
        for m in self.messages(mb, direction) {
            let (maker, user) = self.ends(m);
            if maker == stage {
                let here = self.worker_of(user, mb) == worker;
                let w = &mut self.workers[worker];
                let place = if here { &mut w.inbox } else { &mut w.outbox };
                place.insert(m, Made { stage, mb, by: direction });
            }
        }
    }

    /// Whether a message exists, goes from worker to worker, and has this end here.
    fn check_end(&self, worker: usize, m: Message, sends: bool) -> Result<(), (Rule, String)> {
        let link = self.wiring.edges.get(m.edge);
        let exists = link.is_some_and(|link| m.direction == Direction::Forward || link.grad);
        let ends =
            exists.then(|| self.ends(m)).map(|(from, to)| (self.worker_of(from, m.mb), self.worker_of(to, m.mb)));
        match ends {
            Some((from, to)) if from != to && worker == if sends { from } else { to } => Ok(()),
            _ => Err((Rule::Place, format!("its ends are {ends:?}"))),
        }
    }

    /// Whether the receive that was post `number` of a channel ends.
    fn has_arrived(&self, m: Message, number: usize) -> bool {
        let channel = &self.channels[&self.line(m)];
        let Some(sent) = channel.sent.get(number) else { return false };
        self.sends != Sends::Batched || self.batch_moves(sent)
    }

    /// Whether the wait for send `number` of a channel ends.
    fn has_left(&self, m: Message, number: usize) -> bool {
        let channel = &self.channels[&self.line(m)];
        match self.sends {
            Sends::Buffered => true,
            Sends::Rendezvous => number < channel.posts,
            Sends::Batched => self.batch_moves(&channel.sent[number]),
        }
    }

    /// Whether all sends to the same worker that stand directly before and after this one were executed and posted.
    fn batch_moves(&self, sent: &Sent) -> bool {
        let insts = &self.insts[sent.worker];
        let send_at = |at: usize| if let Some(&Inst::Send(m)) = insts.get(at) { Some(m) } else { None };
        let first = (0..sent.at).rev().take_while(|&at| send_at(at).is_some()).last().unwrap_or(sent.at);
        let goal = |m: Message| self.worker_of(self.ends(m).1, m.mb);
        let mine = send_at(sent.at).map(goal);
        (first..).map_while(|at| Some((at, send_at(at)?))).all(|(at, m)| {
            // A send that does not exist never moves, and is found out when it is executed.
            let exists = m.edge < self.wiring.edges.len();
            if !exists || Some(goal(m)) != mine {
                return true;
            }
            let channel = self.channels.get(&self.line(m));
            let number = channel.and_then(|c| c.sent.iter().position(|s| (s.worker, s.at) == (sent.worker, at)));
            number.is_some_and(|number| channel.is_some_and(|c| number < c.posts))
        })
    }

    /// Counts what a worker holds after an instruction.
    fn count(&mut self, worker: usize) {
        let stages: Vec<usize> = self.workers[worker].stages.keys().copied().collect();
        let (mut activations, mut pending) = (0, 0);
        for stage in stages {
            let (weights, forward_only) = (self.weights, self.forward_only);
            let Some(s) = self.workers[worker].stages.get_mut(&stage) else { continue };
            activations += s.tapes.len() + s.pending.len();
            pending += s.pending.len();
            if forward_only {
                s.tapes.clear();
            }
            s.versions = s.versions.max(s.held(weights).len());
        }
        let w = &self.workers[worker];
        let received = w.inbox.keys().filter(|m| self.worker_of(self.ends(**m).0, m.mb) != worker).count();
        let (receives, sends) = (w.posted.len() + received, w.sending.len());
        let peaks = &mut self.workers[worker].peaks;
        peaks.peak_activations = peaks.peak_activations.max(activations);
        peaks.peak_pending_weights = peaks.peak_pending_weights.max(pending);
        peaks.peak_receives = peaks.peak_receives.max(receives);
        peaks.peak_sends = peaks.peak_sends.max(sends);
    }
}
