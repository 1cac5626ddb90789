//! A worker: one short interpreter of instructions. What a schedule means is where its instructions stand; nothing here knows
//! its name.
use super::{
    lead::Lead,
    plan::Plan,
    schedule::{Direction, Inst, Message, MicroBatch, whose_turn},
    stage::{Forward, Measured, Ports, Stage, Task, Wire},
    status::{Doing, Operation, Pass, Status},
    transport::{Channel, Header, Ticket, Transport},
};
use crate::{
    Context, Error, Result,
    autograd::{Mode, RunKey},
    layers::{Graph, NodeId, Value},
    tensor::{DType, Device, Tensor},
};
use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Instant,
};

/// Where a worker's micro-batches come from.
pub trait Feed {
    /// What random numbers of micro-batch `mb` are drawn from.
    fn key(&mut self, mb: MicroBatch) -> Result<RunKey>;
    /// The graph's inputs for micro-batch `mb`, on the worker of the first stage.
    fn sources(&mut self, mb: MicroBatch) -> Result<HashMap<NodeId, Tensor>>;
    /// Micro-batch `mb` has been forwarded by all stages here.
    fn done(&mut self, mb: MicroBatch);
    /// How many samples micro-batch `mb` has, on whichever worker; `None` if there is no such micro-batch.
    fn samples(&self, mb: MicroBatch) -> Option<usize>;
}

/// How instructions are to be run between two moments at which the pipeline is empty.
#[derive(Clone)]
pub struct Mission {
    /// Training, or forward passes only.
    pub mode: Mode,
    /// The partition and its edges.
    pub plan: Arc<Plan>,
    /// The edges of each of its stages.
    pub ports: Arc<[Ports]>,
    /// The most samples of a micro-batch: the size of receive buffers.
    pub samples: usize,
    /// What values that have a gradient, and their gradients, travel as.
    pub wire: DType,
    /// Nodes to run; all if `None`.
    pub wanted: Option<Arc<[bool]>>,
    /// Values to be handed out.
    pub ask: Vec<Value>,
}

/// Kinds of operations that a worker's time goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Spent {
    /// F, B, I and W.
    Compute,
    /// Optimizer updates.
    Step,
    /// Reading data.
    Data,
    /// Waiting for messages of other workers.
    Receive,
    /// Starting receives and sends, and waiting for the end of sends.
    Send,
    /// Summing gradients over the workers of a stage,
    Reduce,
    /// and waiting for the other workers in it.
    ReduceWait,
}

/// Seconds by kind, and the number of instructions.
#[derive(Clone, Debug, Default)]
pub struct Times {
    seconds: BTreeMap<Spent, f64>,
    /// Instructions done.
    pub instructions: u64,
}

impl Times {
    /// Seconds that went to `kind`.
    pub fn seconds(&self, kind: Spent) -> f64 {
        self.seconds.get(&kind).copied().unwrap_or(0.0)
    }

    /// Adds the times of another part of the run.
    pub fn merge(&mut self, other: &Times) {
        for (&kind, seconds) in &other.seconds {
            *self.seconds.entry(kind).or_default() += seconds;
        }
        self.instructions += other.instructions;
    }

    fn add(&mut self, kind: Spent, since: Instant) {
        *self.seconds.entry(kind).or_default() += since.elapsed().as_secs_f64();
    }

    /// Of the seconds that were added to sums `waited` were spent waiting.
    fn waited_in_sums(&mut self, waited: f64) {
        let sums = self.seconds.entry(Spent::Reduce).or_default();
        let waited = waited.min(*sums);
        *sums -= waited;
        *self.seconds.entry(Spent::ReduceWait).or_default() += waited;
    }
}

/// One worker with its stages and its connection.
pub struct Worker<'t> {
    graph: Arc<Graph>,
    dtype: DType,
    device: Device,
    transport: &'t mut dyn Transport,
    status: Status,
    stages: BTreeMap<usize, Stage>,
    inbox: HashMap<Message, Tensor>,
    outbox: HashMap<Message, Tensor>,
    posted: HashMap<Message, Ticket>,
    sending: HashMap<Message, Ticket>,
    times: Times,
    measured: Vec<Measured>,
    /// What the other workers of the stage that has the loss have not been told of it.
    untold: Vec<Measured>,
    asked: Vec<(MicroBatch, Value, Tensor)>,
}

impl<'t> Worker<'t> {
    /// A worker that holds `stages`.
    pub fn new(
        graph: Arc<Graph>,
        dtype: DType,
        device: Device,
        transport: &'t mut dyn Transport,
        stages: Vec<Stage>,
    ) -> Worker<'t> {
        Worker {
            graph,
            dtype,
            device,
            status: transport.status().clone(),
            transport,
            stages: stages.into_iter().map(|s| (s.index(), s)).collect(),
            inbox: HashMap::new(),
            outbox: HashMap::new(),
            posted: HashMap::new(),
            sending: HashMap::new(),
            times: Times::default(),
            measured: Vec::new(),
            untold: Vec::new(),
            asked: Vec::new(),
        }
    }

    /// Its number.
    pub fn rank(&self) -> usize {
        self.transport.rank()
    }

    /// Its connection.
    pub fn transport(&mut self) -> &mut dyn Transport {
        self.transport
    }

    /// Its device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Its stages.
    pub fn stages(&self) -> impl Iterator<Item = &Stage> {
        self.stages.values()
    }

    /// Its stages, to be loaded.
    pub fn stages_mut(&mut self) -> impl Iterator<Item = &mut Stage> {
        self.stages.values_mut()
    }

    /// Takes the times, which begin anew.
    pub fn take_times(&mut self) -> Times {
        std::mem::take(&mut self.times)
    }

    /// Takes what the loss measured since the last call, in order of execution; empty on workers without the loss.
    pub fn take_measured(&mut self) -> Vec<Measured> {
        std::mem::take(&mut self.measured)
    }

    /// Takes the values that were asked for.
    pub fn take_asked(&mut self) -> Vec<(MicroBatch, Value, Tensor)> {
        std::mem::take(&mut self.asked)
    }

    /// The pipeline is empty; micro-batches and versions are numbered from 0 again.
    ///
    /// # Errors
    /// If something is left: a fault of the schedule.
    pub fn restart(&mut self) -> Result<()> {
        let left = [self.inbox.len(), self.outbox.len(), self.posted.len(), self.sending.len()];
        if left.iter().any(|&n| n > 0) {
            return Err(Error::schedule(format!(
                "worker {}: tensors received, to be sent, receives and sends are left over: {left:?}",
                self.rank()
            )));
        }
        self.stages.values_mut().try_for_each(Stage::restart)
    }

    /// Does one instruction.
    pub fn execute(&mut self, inst: Inst, mission: &Mission, feed: &mut dyn Feed) -> Result<()> {
        self.times.instructions += 1;
        self.status.begin(doing(inst, mission));
        let (start, waited) = (Instant::now(), self.status.waited());
        let (kind, done) = match inst {
            Inst::F { stage, mb, read } => return self.forward(stage, mb, read, mission, feed),
            Inst::B { stage, mb } => (Spent::Compute, self.backward(stage, mb, mission, feed, false)),
            Inst::I { stage, mb } => (Spent::Compute, self.backward(stage, mb, mission, feed, true)),
            Inst::W { stage, mb } => (Spent::Compute, self.stage(stage).and_then(|s| s.weight(mb))),
            Inst::Reduce { stage, mb } => (Spent::Reduce, self.reduce(stage, mb, feed)),
            Inst::Step { stage, keep } => (Spent::Step, self.stage(stage).and_then(|s| s.step(keep))),
            Inst::Free { stage, version } => (Spent::Step, self.stage(stage).and_then(|s| s.free(version))),
            Inst::Post(m) => (Spent::Send, self.post(m, mission)),
            Inst::Recv(m) => (Spent::Receive, self.receive(m, mission)),
            Inst::Send(m) => (Spent::Send, self.send(m, mission)),
            Inst::Wait(m) => (Spent::Send, self.wait(m)),
        };
        self.times.add(kind, start);
        if kind == Spent::Reduce {
            self.times.waited_in_sums(self.status.waited() - waited);
        }
        done
    }

    fn stage(&mut self, stage: usize) -> Result<&mut Stage> {
        held(&mut self.stages, stage, self.transport.rank())
    }

    fn forward(
        &mut self,
        stage: usize,
        mb: MicroBatch,
        read: super::schedule::Read,
        mission: &Mission,
        feed: &mut dyn Feed,
    ) -> Result<()> {
        let ports = ports(mission, stage)?;
        let start = Instant::now();
        let key = feed.key(mb)?;
        let sources = if stage == 0 { feed.sources(mb)? } else { HashMap::new() };
        self.times.add(Spent::Data, start);
        let start = Instant::now();
        let arrived = self.arrived(ports.inputs(), mb, Direction::Forward)?;
        let wanted = mission.wanted.as_deref();
        let task = Task { mode: mission.mode, key, ports, sources, arrived, wanted, ask: &mission.ask };
        let Forward { sends, measured, asked } = self.stage(stage)?.forward(mb, read, task)?;
        self.hand_over(sends, mb, Direction::Forward, &mission.plan);
        let is_shared = self.stages.get(&stage).is_some_and(Stage::is_shared);
        self.untold.extend(measured.filter(|_| mission.mode == Mode::Train && is_shared));
        self.measured.extend(measured);
        self.asked.extend(asked.into_iter().map(|(v, t)| (mb, v, t)));
        self.times.add(Spent::Compute, start);
        if self.stages.last_key_value().is_none_or(|(&last, _)| last == stage) {
            feed.done(mb);
        }
        Ok(())
    }

    fn backward(
        &mut self,
        stage: usize,
        mb: MicroBatch,
        mission: &Mission,
        feed: &dyn Feed,
        split: bool,
    ) -> Result<()> {
        let ports = ports(mission, stage)?;
        let wanting = ports.outputs().filter(|&e| mission.plan.edges()[e].needs_grad);
        let arrived = self.arrived(wanting, mb, Direction::Backward)?;
        let held = held(&mut self.stages, stage, self.transport.rank())?;
        let samples = feed.samples(mb).filter(|_| held.completes(mb, &|mb| feed.samples(mb).is_some()));
        let wire = samples.map(|samples| Wire { transport: self.transport, samples });
        let sends = held.backward(mb, ports, arrived, split, wire)?;
        self.hand_over(sends, mb, Direction::Backward, &mission.plan);
        Ok(())
    }

    fn reduce(&mut self, stage: usize, mb: MicroBatch, feed: &dyn Feed) -> Result<()> {
        let held = held(&mut self.stages, stage, self.transport.rank())?;
        // A stage without the loss has nothing to tell.
        let (told, later) = self.untold.iter().partition(|m| m.mb <= mb);
        self.untold = later;
        let others = held.reduce(mb, self.transport, &|mb| feed.samples(mb), told)?;
        self.measured.extend(others);
        Ok(())
    }

    fn arrived(
        &mut self,
        edges: impl Iterator<Item = usize>,
        mb: MicroBatch,
        direction: Direction,
    ) -> Result<HashMap<usize, Tensor>> {
        edges
            .map(|edge| {
                let t = self.inbox.remove(&Message { edge, mb, direction });
                t.map(|t| (edge, t))
                    .ok_or_else(|| Error::schedule(format!("edge {edge} of micro-batch {mb} was not received")))
            })
            .collect()
    }

    /// Puts results where a `Send` finds them, or straight into the inbox if the other stage is here.
    fn hand_over(&mut self, results: Vec<(usize, Tensor)>, mb: MicroBatch, direction: Direction, plan: &Plan) {
        for (edge, t) in results {
            let e = &plan.edges()[edge];
            let goal = if direction == Direction::Forward { e.to } else { e.from };
            let place = if self.stages.contains_key(&goal) { &mut self.inbox } else { &mut self.outbox };
            place.insert(Message { edge, mb, direction }, t);
        }
    }

    fn post(&mut self, m: Message, mission: &Mission) -> Result<()> {
        let edge = edge(mission, m)?;
        let [forward, backward] =
            mission.plan.message_bytes(&self.graph, edge, mission.samples, [self.dtype, mission.wire]);
        let (stage, bytes) = if m.direction == Direction::Forward { (edge.from, forward) } else { (edge.to, backward) };
        let ticket = self.transport.post_recv(worker_of(mission, stage, m.mb)?, channel(m), bytes, &self.device)?;
        self.posted.insert(m, ticket);
        Ok(())
    }

    fn receive(&mut self, m: Message, mission: &Mission) -> Result<()> {
        let ticket = self.posted.remove(&m).ok_or_else(|| Error::schedule("a receive that was not posted"))?;
        let (header, t) =
            self.transport.wait(ticket)?.ok_or_else(|| Error::transport("a receive without a message"))?;
        let expected = (m.edge as u32, m.direction == Direction::Backward, m.mb as u64);
        if (header.edge, header.backward, header.mb) != expected {
            return Err(Error::transport(format!(
                "edge {}, backward {}, micro-batch {} expected, got {header:?}",
                expected.0, expected.1, expected.2
            )));
        }
        let is_rounded = edge(mission, m)?.needs_grad;
        self.inbox.insert(m, if is_rounded { t.cast(self.dtype)? } else { t });
        Ok(())
    }

    fn send(&mut self, m: Message, mission: &Mission) -> Result<()> {
        let edge = edge(mission, m)?;
        let backward = m.direction == Direction::Backward;
        let (from, to) = if backward { (edge.to, edge.from) } else { (edge.from, edge.to) };
        let t = self.outbox.remove(&m).ok_or_else(|| Error::schedule("a send of what was not computed"))?;
        let t = if edge.needs_grad { t.cast(mission.wire)? } else { t };
        let header = Header {
            edge: m.edge as u32,
            backward,
            mb: m.mb as u64,
            version: self.stages.get(&from).map_or(0, |s| s.weights().minibatches()),
            dtype: t.dtype(),
            shape: t.shape().to_vec(),
        };
        let ticket = self.transport.send(worker_of(mission, to, m.mb)?, channel(m), header, &t)?;
        self.sending.insert(m, ticket);
        Ok(())
    }

    fn wait(&mut self, m: Message) -> Result<()> {
        let ticket = self.sending.remove(&m).ok_or_else(|| Error::schedule("a wait for what was not sent"))?;
        self.transport.wait(ticket).map(|_| ())
    }

    /// All updates of all workers are in the weights: see [`Stage::settle`].
    pub fn settle(&mut self) -> Result<()> {
        let (start, waited) = (Instant::now(), self.status.waited());
        let rank = self.transport.rank();
        for (&index, stage) in self.stages.iter_mut().filter(|(_, stage)| stage.settles()) {
            let doing = Doing { stage: Some(index), ..Doing::only(Operation::Settle) };
            self.status.begin(doing);
            let others = stage.settle(self.transport).context(|| format!("rank {rank}, {doing}"))?;
            self.measured.extend(others);
        }
        self.times.add(Spent::Reduce, start);
        self.times.waited_in_sums(self.status.waited() - waited);
        Ok(())
    }

    /// Whether training goes on with the next minibatch: see [`Lead::goes_on`].
    pub fn follow(&mut self, lead: &mut Lead, stop: bool) -> Result<bool> {
        self.status.begin(Doing::only(Operation::Follow));
        let start = Instant::now();
        let goes_on = lead.goes_on(self.transport, stop);
        self.times.add(Spent::Receive, start);
        goes_on
    }

    /// Training goes on to minibatch `number`, for the status page.
    pub fn note_minibatch(&self, number: u64) {
        self.note_done(number.saturating_add(1));
    }

    /// Training stands after `n` minibatches, for the status page.
    pub fn note_done(&self, n: u64) {
        self.status.minibatches(n);
    }
}

/// Runs `insts` one after the other; an error says rank, stage, micro-batch and operation.
pub fn run(
    worker: &mut Worker<'_>,
    insts: impl IntoIterator<Item = Inst>,
    mission: &Mission,
    feed: &mut dyn Feed,
) -> Result<()> {
    for inst in insts {
        let result = worker.execute(inst, mission, feed);
        result.context(|| format!("rank {}, {}", worker.rank(), doing(inst, mission)))?;
    }
    Ok(())
}

/// A stage of the worker of that rank.
fn held(stages: &mut BTreeMap<usize, Stage>, stage: usize, rank: usize) -> Result<&mut Stage> {
    stages.get_mut(&stage).ok_or_else(|| Error::schedule(format!("stage {stage} is not on worker {rank}")))
}

/// What an instruction is, and for which stage of its worker.
fn doing(inst: Inst, mission: &Mission) -> Doing {
    let pass = match mission.mode {
        Mode::Train => Pass::Training,
        Mode::Eval if mission.ask.is_empty() => Pass::Evaluation,
        Mode::Eval => Pass::Prediction,
    };
    let work = |operation, stage, mb| Doing { operation, pass, stage: Some(stage), mb, ..Doing::default() };
    let message = |operation, m: Message, receives: bool| {
        let edge = mission.plan.edges().get(m.edge);
        // A gradient flows from the edge's end to its beginning.
        let ends = edge.map(|e| if m.direction == Direction::Forward { (e.from, e.to) } else { (e.to, e.from) });
        let ends = ends.map(|(from, to)| if receives { (to, from) } else { (from, to) });
        Doing {
            operation,
            pass,
            stage: ends.map(|e| e.0),
            mb: Some(m.mb),
            edge: Some(m.edge),
            gradient: m.direction == Direction::Backward,
            peer: ends.and_then(|e| worker_of(mission, e.1, m.mb).ok()),
        }
    };
    match inst {
        Inst::F { stage, mb, .. } => work(Operation::Forward, stage, Some(mb)),
        Inst::B { stage, mb } => work(Operation::Backward, stage, Some(mb)),
        Inst::I { stage, mb } => work(Operation::InputGradient, stage, Some(mb)),
        Inst::W { stage, mb } => work(Operation::WeightGradient, stage, Some(mb)),
        Inst::Reduce { stage, mb } => work(Operation::Reduce, stage, Some(mb)),
        Inst::Step { stage, .. } => work(Operation::Step, stage, None),
        Inst::Free { stage, .. } => work(Operation::Free, stage, None),
        Inst::Post(m) => message(Operation::Post, m, true),
        Inst::Recv(m) => message(Operation::Receive, m, true),
        Inst::Send(m) => message(Operation::Send, m, false),
        Inst::Wait(m) => message(Operation::Wait, m, false),
    }
}

fn edge(mission: &Mission, m: Message) -> Result<&super::plan::Edge> {
    mission.plan.edges().get(m.edge).ok_or_else(|| Error::schedule(format!("there is no edge {}", m.edge)))
}

fn ports(mission: &Mission, stage: usize) -> Result<&Ports> {
    mission.ports.get(stage).ok_or_else(|| Error::schedule(format!("there is no stage {stage}")))
}

fn worker_of(mission: &Mission, stage: usize, mb: MicroBatch) -> Result<usize> {
    let worker = mission.plan.stages().get(stage).and_then(|s| whose_turn(&s.workers, mb));
    worker.ok_or_else(|| Error::plan(format!("stage {stage} is on no worker")))
}

/// The channel of an edge and direction.
fn channel(m: Message) -> Channel {
    Channel(m.edge as u32 * 2 + u32::from(m.direction == Direction::Backward))
}
