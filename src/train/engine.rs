//! One worker's side of a run: every worker calls the same functions in the same order.
use super::{
    feed::{Minibatch, Pieces},
    gather,
    settings::{Recipe, Settings},
};
use crate::{
    Context, Error, Result,
    autograd::Mode,
    data::{Batch, Loader, Sampler},
    hex::hex,
    layers::{NodeId, Value},
    pipeline::{
        lead::Lead,
        plan::Plan,
        reduce::SLACK,
        schedule::{self, Kind, Programs, Shape},
        stage::{Measured, Ports, Stage},
        transport::Transport,
        weights::check_memory,
        worker::{self, Mission, Worker},
    },
    tensor::{Device, Tensor},
};
use serde::{Serialize, de::DeserializeOwned};
use sha2::{Digest, Sha256};
use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

/// The loss of a minibatch, known on the worker that has the loss.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, serde::Deserialize)]
pub struct StepLoss {
    /// The minibatch's number since training began.
    pub minibatch: u64,
    /// The mean loss.
    pub loss: f64,
    /// Its total weight.
    pub weight: f64,
    /// Right answers, where the loss counts them.
    pub correct: Option<f64>,
}

/// What an evaluation found.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, serde::Deserialize)]
pub struct Evaluation {
    /// The mean loss.
    pub loss: f64,
    /// Right answers / labels, where the loss counts them.
    pub accuracy: Option<f64>,
}

/// An asynchronous run of the pipeline that has begun and whose end is not known.
struct Streaming {
    /// The number of its first minibatch.
    first: u64,
    /// Minibatches fed.
    fed: usize,
    /// Instructions done.
    done: usize,
    /// Minibatches whose losses were noted, in order, and what is known of later ones: workers of one stage hear of each other's only
    /// when they sum gradients.
    noted: usize,
    early: BTreeMap<usize, Measured>,
}

/// A worker that trains.
pub struct Engine<'t> {
    recipe: Recipe,
    plan: Arc<Plan>,
    ports: Arc<[Ports]>,
    worker: Worker<'t>,
    /// The workers of each stage, and their warm-up.
    shape: Shape,
    feed: Pieces,
    streaming: Option<Streaming>,
    programs: HashMap<(bool, usize), Arc<Programs>>,
    losses: Vec<StepLoss>,
    next: u64,
    lead: Lead,
    /// The most micro-batches that are in flight on this worker at once, by the proof of the programs.
    in_flight: usize,
}

impl<'t> Engine<'t> {
    /// The worker of `transport`, with the first weights of its stages.
    pub fn new(recipe: Recipe, plan: Plan, device: Device, transport: &'t mut dyn Transport) -> Result<Engine<'t>> {
        recipe.settings.check()?;
        if recipe.settings.asp && plan.stages().len() > 1 {
            let n = plan.stages().len();
            return Err(Error::plan(format!("asp: one stage on all workers expected, the plan has {n} stages")));
        }
        if plan.workers() != transport.size() {
            let (a, b) = (plan.workers(), transport.size());
            return Err(Error::plan(format!("the plan is for {a} workers, there are {b}")));
        }
        let setup = recipe.setup(transport.hosts().to_vec());
        let rank = transport.rank();
        let mine = || (0..plan.stages().len()).filter(|&s| plan.stages()[s].workers.contains(&rank));
        if device.backend().has_data() {
            let nodes: Vec<NodeId> = mine().flat_map(|s| plan.stages()[s].nodes.clone()).collect();
            let fits = check_memory(&recipe.graph, &nodes, &*recipe.optimizer, recipe.settings.dtype);
            fits.context(|| format!("the stages of worker {rank}"))?;
        }
        let stages = mine().map(|s| Stage::new(&setup, &plan, s, rank, &device)).collect::<Result<Vec<_>>>()?;
        let replicas = mine().filter_map(|s| plan.replica(s, rank)).collect();
        let feed = Pieces::new(recipe.graph.clone(), recipe.settings.seed, recipe.settings.dtype, replicas);
        let shape = plan.shape()?;
        let leader = plan.stages().first().and_then(|s| s.workers.first()).copied().unwrap_or(0);
        let lead = Lead::new(&device, leader, lead(&recipe.settings, &shape))?;
        let worker = Worker::new(recipe.graph.clone(), recipe.settings.dtype, device, transport, stages);
        let (programs, losses) = (HashMap::new(), Vec::new());
        let ports = ports(&plan);
        let plan = Arc::new(plan);
        Ok(Engine {
            recipe,
            plan,
            ports,
            worker,
            shape,
            feed,
            streaming: None,
            programs,
            losses,
            next: 0,
            lead,
            in_flight: 1,
        })
    }

    /// What it trains, and how.
    pub fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    /// The partition.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The worker.
    pub fn worker(&self) -> &Worker<'t> {
        &self.worker
    }

    /// The worker, to be loaded.
    pub fn worker_mut(&mut self) -> &mut Worker<'t> {
        &mut self.worker
    }

    /// The number of the next minibatch.
    pub fn next_minibatch(&self) -> u64 {
        self.next
    }

    /// Goes on with minibatch `number`, after a checkpoint was loaded.
    pub fn resume_at(&mut self, number: u64) {
        self.next = number;
    }

    /// Whether this worker reads the data: it has the first stage.
    pub fn reads_data(&self) -> bool {
        self.worker.stages().any(|s| s.index() == 0)
    }

    /// The minibatches from `number` on whose data this worker reads: the first of them, and every how many. The workers of a
    /// first stage on several take turns where a minibatch is not cut into micro-batches.
    pub fn reads_from(&self, number: u64) -> Option<(u64, usize)> {
        let (replica, of) = self.plan.replica(0, self.worker.rank())?;
        if self.kind().is_synchronous() {
            return Some((number, 1));
        }
        // Since the pipeline was last empty, as which it counts if nothing is in flight.
        let turn = (number - self.streaming.as_ref().map_or(number, |s| s.first)) % of as u64;
        Some((number + (replica as u64 + of as u64 - turn) % of as u64, of))
    }

    /// Whether this worker is the first of the stage that has the loss, and so knows what became of it.
    pub fn has_loss(&self) -> bool {
        let loss = self.recipe.graph.loss_node();
        let has = |s: &Stage| loss.is_some_and(|n| self.plan.stages()[s.index()].nodes.contains(&n));
        self.worker.stages().any(|s| has(s) && self.is_first_of(s))
    }

    /// Whether this worker is the first of those of a stage: it speaks for the others, whose weights are the same.
    pub fn is_first_of(&self, stage: &Stage) -> bool {
        self.plan.stages()[stage.index()].workers.first() == Some(&self.worker.rank())
    }

    /// Whether all workers go on with the next minibatch: see [`Lead`].
    pub fn goes_on(&mut self, stop: bool) -> Result<bool> {
        self.worker.follow(&mut self.lead, stop)
    }

    /// Proven programs for `n` micro-batches (synchronous: of one minibatch).
    fn programs(&mut self, train: bool, n: usize) -> Result<Arc<Programs>> {
        if let Some(p) = self.programs.get(&(train, n)) {
            return Ok(p.clone());
        }
        let (kind, wiring) = (self.recipe.settings.schedule, self.plan.wiring(train));
        let (proven, facts) = match train {
            true => schedule::prepare(kind, &self.shape, &wiring, n)?,
            false => schedule::prove(schedule::evaluate_for(&self.shape, n)?, &wiring)?,
        };
        // What a replica sent may wait at another worker for the messages of the other replicas.
        let workers = facts.workers.iter().enumerate();
        let held = workers.filter(|(worker, _)| *worker == self.worker.rank() || self.shape.is_replicated());
        let peak = held.map(|(_, facts)| facts.peak_activations).max().unwrap_or(0);
        self.in_flight = self.in_flight.max(if train { peak } else { 0 });
        let proven = Arc::new(proven);
        self.programs.insert((train, n), proven.clone());
        Ok(proven)
    }

    fn mission(&self, mode: Mode) -> Mission {
        let samples = self.recipe.settings.micro_batch();
        let (plan, ports) = (self.plan.clone(), self.ports.clone());
        // What only goes forward is not rounded, so that evaluations do not depend on the cuts.
        let wire = if mode == Mode::Train { self.recipe.settings.wire() } else { self.recipe.settings.dtype };
        Mission { mode, plan, ports, samples, wire, wanted: None, ask: Vec::new() }
    }

    fn kind(&self) -> Kind {
        self.recipe.settings.schedule
    }

    /// Trains on a minibatch. A synchronous schedule has updated the weights when this returns; an asynchronous one keeps it in
    /// flight.
    ///
    /// # Errors
    /// With rank, stage, micro-batch and operation.
    pub fn train(&mut self, minibatch: &Minibatch) -> Result<()> {
        self.train_inner(minibatch).context(|| format!("minibatch {}", minibatch.number))
    }

    fn train_inner(&mut self, minibatch: &Minibatch) -> Result<()> {
        if minibatch.number != self.next {
            return Err(Error::schedule(format!("minibatch {} expected, got {}", self.next, minibatch.number)));
        }
        if minibatch.ids.is_empty() || minibatch.ids.len() > self.recipe.settings.batch {
            let (n, most) = (minibatch.ids.len(), self.recipe.settings.batch);
            return Err(Error::data(format!("1 to {most} samples expected in a minibatch, got {n}")));
        }
        self.next += 1;
        self.worker.note_minibatch(minibatch.number);
        let size = self.recipe.settings.micro_batch();
        let mission = self.mission(Mode::Train);
        let rank = self.worker.rank();
        if self.kind().is_synchronous() {
            let n = self.feed.add(minibatch, 0, size, None)?;
            let programs = self.programs(true, n)?;
            worker::run(&mut self.worker, programs.stream(rank), &mission, &mut self.feed)?;
            self.restart()?;
            let measured = self.worker.take_measured();
            self.losses.extend(fold(minibatch.number, &measured));
            return Ok(());
        }
        let begun = || Streaming { first: minibatch.number, fed: 0, done: 0, noted: 0, early: BTreeMap::new() };
        let mut stream = self.streaming.take().unwrap_or_else(begun);
        self.feed.add(minibatch, stream.fed, size, None)?;
        let fed = stream.fed + 1;
        let programs = self.programs(true, schedule::ENDLESS)?;
        let ready = |inst: &schedule::Inst| inst.mb().is_none_or(|mb| mb < fed);
        let program =
            programs.workers.get(rank).ok_or_else(|| Error::schedule(format!("no program for rank {rank}")))?;
        let mut done = stream.done;
        while let Some(inst) = program.get(done).filter(ready) {
            worker::run(&mut self.worker, [inst], &mission, &mut self.feed)?;
            done += 1;
        }
        (stream.fed, stream.done) = (fed, done);
        self.collect(&mut stream);
        self.streaming = Some(stream);
        Ok(())
    }

    /// The pipeline is empty; micro-batches are numbered from 0 again.
    fn restart(&mut self) -> Result<()> {
        self.feed.restart();
        self.worker.restart()
    }

    /// Notes the losses of an asynchronous run.
    fn collect(&mut self, stream: &mut Streaming) {
        stream.early.extend(self.worker.take_measured().into_iter().map(|m| (m.mb, m)));
        while let Some(measured) = stream.early.remove(&stream.noted) {
            self.losses.extend(fold(stream.first + stream.noted as u64, &[measured]));
            stream.noted += 1;
        }
    }

    /// Lays by the buffers that messages may need beyond those that they needed so far: how long others hold what was sent
    /// depends on the clock, the bound on the schedule.
    pub fn reserve(&mut self) {
        let (graph, dtype) = (&self.recipe.graph, self.recipe.settings.dtype);
        let (samples, wire) = (self.recipe.settings.micro_batch(), self.recipe.settings.wire());
        let pool = self.worker.device().pool();
        let mine: Vec<usize> = self.worker.stages().map(|s| s.index()).collect();
        for edge in self.plan.edges().iter().filter(|e| e.from != e.to) {
            if !mine.contains(&edge.from) && !mine.contains(&edge.to) {
                continue;
            }
            // As it is computed with, and as it travels, if that differs.
            for wire in [Some(dtype), Some(wire).filter(|&w| w != dtype)].into_iter().flatten() {
                let sizes = self.plan.message_bytes(graph, edge, samples, [dtype, wire]);
                sizes.into_iter().for_each(|bytes| pool.reserve(bytes, self.in_flight + 1));
            }
        }
        self.worker.stages().for_each(|s| s.reserve(self.recipe.settings.micro_batches));
    }

    /// Finishes all that is in flight. Where this stands is part of an asynchronous run's definition.
    pub fn drain(&mut self) -> Result<()> {
        let Some(mut stream) = self.streaming.take() else { return Ok(()) };
        let programs = self.programs(true, stream.fed)?;
        let rank = self.worker.rank();
        let rest: Vec<_> = programs.stream(rank).skip(stream.done).collect();
        let mission = self.mission(Mode::Train);
        worker::run(&mut self.worker, rest, &mission, &mut self.feed).context(|| "drain")?;
        self.worker.settle().context(|| "drain")?;
        self.restart()?;
        self.collect(&mut stream);
        Ok(())
    }

    /// Takes the losses noted since the last call.
    pub fn take_losses(&mut self) -> Vec<StepLoss> {
        std::mem::take(&mut self.losses)
    }

    /// Where training stands while nothing is in flight.
    fn place(&self) -> String {
        self.next.checked_sub(1).map_or("before minibatch 0".into(), |last| format!("after minibatch {last}"))
    }

    /// Drains, then runs the samples of `loader` forward and gives loss and accuracy, the same on every worker.
    ///
    /// # Errors
    /// If there are no samples, or with rank, stage, minibatch of the evaluation and operation.
    pub fn evaluate(&mut self, loader: &Loader) -> Result<Evaluation> {
        self.drain()?;
        self.evaluate_inner(loader).context(|| format!("evaluation {}", self.place()))
    }

    fn evaluate_inner(&mut self, loader: &Loader) -> Result<Evaluation> {
        self.worker.note_done(self.next);
        let size = self.recipe.settings.micro_batch();
        let sampler = Sampler::new(loader.dataset().len(), size, 0, false)?;
        let n = sampler.batches_per_epoch();
        let programs = self.programs(false, n as usize)?;
        let mission = self.mission(Mode::Eval);
        let rank = self.worker.rank();
        let mut data = match self.plan.replica(0, rank) {
            Some((replica, of)) => Some(loader.prefetch_every(&sampler, replica as u64..n, of)?),
            None => None,
        };
        let mut fed = 0;
        for inst in programs.stream(rank) {
            if let schedule::Inst::F { mb, .. } = inst
                && mb >= fed
            {
                let batch = data.as_mut().and_then(Iterator::next).transpose()?;
                let (_, ids) = sampler.minibatch(mb as u64)?;
                self.feed.add(&Minibatch { number: mb as u64, ids, batch }, mb, size, None)?;
                fed = mb + 1;
            }
            worker::run(&mut self.worker, [inst], &mission, &mut self.feed)?;
        }
        self.restart()?;
        let mine = self.worker.take_measured();
        let mut measured = self.gather(&mine)?.concat();
        measured.sort_by_key(|m| m.mb);
        let sum = |f: fn(&Measured) -> f64| measured.iter().map(f).sum::<f64>();
        let weight = sum(|m| m.total);
        let found = (!measured.is_empty()).then(|| Evaluation {
            loss: sum(|m| m.loss) / weight,
            accuracy: measured.iter().all(|m| m.correct.is_some()).then(|| sum(|m| m.correct.unwrap_or(0.0)) / weight),
        });
        found.ok_or_else(|| Error::graph("no worker has the loss"))
    }

    /// Drains, then gives `value` for the samples of `batch`, computed forward in evaluation mode, the same on every worker. Only
    /// the fields that `value` depends on are read (so no label is needed for a prediction), and only on the first worker.
    ///
    /// # Errors
    /// If the value does not exist or is not one per sample, the batch is empty or lacks a field, or with rank, stage,
    /// micro-batch and operation.
    pub fn predict(&mut self, batch: &Batch, value: Value) -> Result<Tensor> {
        self.predict_inner(batch, value).context(|| format!("prediction {}", self.place()))
    }

    fn predict_inner(&mut self, batch: &Batch, value: Value) -> Result<Tensor> {
        let graph = self.recipe.graph.clone();
        if value.node >= graph.nodes().len() || value.output >= graph.output_count(value.node) {
            return Err(Error::graph(format!("the graph has no value {value:?}")));
        }
        if !graph.is_per_sample(value) {
            let name = &graph.nodes()[value.node].name;
            return Err(Error::graph(format!("{name:?} does not give a value for each sample")));
        }
        if batch.is_empty() {
            return Err(Error::data("no samples"));
        }
        self.drain()?;
        self.worker.note_done(self.next);
        let wanted = graph.ancestors(value.node);
        let plan = Arc::new(self.plan.forward_of(&wanted));
        let size = self.recipe.settings.micro_batch();
        let minibatch =
            Minibatch { number: 0, ids: batch.ids.clone(), batch: self.reads_data().then(|| batch.clone()) };
        let n = self.feed.add(&minibatch, 0, size, Some(&wanted))?;
        let (programs, _) = schedule::prove(schedule::evaluate_for(&self.shape, n)?, &plan.wiring(false))?;
        let (ports, wanted) = (ports(&plan), Some(wanted.into()));
        let wire = self.recipe.settings.dtype;
        let mission = Mission { mode: Mode::Eval, plan, ports, samples: size, wire, wanted, ask: vec![value] };
        let rank = self.worker.rank();
        worker::run(&mut self.worker, programs.stream(rank), &mission, &mut self.feed)?;
        self.restart()?;
        let pieces = self.worker.take_asked();
        let mine = pieces.into_iter().map(|(mb, _, t)| Ok((mb, t.contiguous()?.host_bytes()?.to_vec())));
        let mine = mine.collect::<Result<Vec<(usize, Vec<u8>)>>>()?;
        let all = self.worker.transport().all_gather(&framed(&mine))?;
        let mut pieces = all.iter().flat_map(|bytes| unframed(bytes)).collect::<Vec<_>>();
        pieces.sort_by_key(|(mb, _)| *mb);
        let bytes = pieces.into_iter().map(|(_, bytes)| bytes).collect::<Vec<_>>().concat();
        let (dtype, shape) = graph.shape(value, batch.len(), self.recipe.settings.dtype);
        Tensor::from_bytes(&bytes, dtype, &shape, self.worker.device())
    }

    /// Waits until everything that was sent has arrived: the end of a run.
    ///
    /// # Errors
    /// If another worker fails.
    pub fn finish(&mut self) -> Result<()> {
        self.drain()?;
        self.lead.finish(self.worker.transport())
    }

    /// Gives every worker the values of all of them, in order of rank.
    pub fn gather<T: Serialize + DeserializeOwned>(&mut self, mine: &T) -> Result<Vec<T>> {
        gather::gather(self.worker.transport(), mine)
    }

    /// Gives every worker what one of them knows; `None` if none does.
    pub fn share<T: Serialize + DeserializeOwned>(&mut self, mine: Option<T>) -> Result<Option<T>> {
        gather::share(self.worker.transport(), mine)
    }

    /// Whether any worker says so.
    pub fn any(&mut self, mine: bool) -> Result<bool> {
        Ok(self.gather(&mine)?.contains(&true))
    }

    /// A hash of all weights and node states, in order of their names: the same for every partition.
    pub fn weights_sha256(&mut self) -> Result<String> {
        let mut mine: Vec<(String, String)> = Vec::new();
        for stage in self.worker.stages().filter(|s| self.is_first_of(s)) {
            let weights = stage.weights().held().iter().map(|w| (w.name.clone(), &w.tensor));
            for (name, t) in weights.chain(stage.states()) {
                mine.push((name, hex(&Sha256::digest(t.contiguous()?.host_bytes()?))));
            }
        }
        let mut all: Vec<(String, String)> = self.gather(&mine)?.into_iter().flatten().collect();
        all.sort();
        let mut hash = Sha256::new();
        for (name, digest) in all {
            hash.update(format!("{name} {digest}\n"));
        }
        Ok(hex(&hash.finalize()))
    }
}

/// The edges of all stages.
fn ports(plan: &Plan) -> Arc<[Ports]> {
    (0..plan.stages().len()).map(|s| Ports::new(plan, s)).collect()
}

/// How many minibatches before it is run the leader says so of a minibatch: more than are in flight at once.
fn lead(settings: &Settings, shape: &Shape) -> u64 {
    let in_flight =
        shape.replicas().iter().zip(shape.warm_up()).map(|(replicas, warm_up)| replicas * (warm_up + 1)).max();
    let in_flight = in_flight.unwrap_or(1) as u64;
    match settings.schedule.is_synchronous() {
        true => 1,
        // A worker is ahead of the others by as many rounds, and one that it has begun.
        false if settings.asp => shape.workers() as u64 * (SLACK + 2),
        false if shape.is_replicated() => 2 * in_flight + shape.workers() as u64,
        false => in_flight,
    }
}

/// Pieces of several micro-batches as bytes: number, length, bytes.
fn framed(pieces: &[(usize, Vec<u8>)]) -> Vec<u8> {
    let word = |n: usize| (n as u64).to_le_bytes();
    pieces.iter().flat_map(|(mb, bytes)| [&word(*mb)[..], &word(bytes.len()), bytes].concat()).collect()
}

/// Reads what [`framed`] wrote.
fn unframed(mut bytes: &[u8]) -> Vec<(usize, &[u8])> {
    let mut pieces = Vec::new();
    while let Some((head, rest)) = bytes.split_at_checked(16) {
        let word = |at: usize| head[at..at + 8].iter().rev().fold(0usize, |w, &b| w << 8 | usize::from(b));
        let Some((piece, rest)) = rest.split_at_checked(word(8)) else { break };
        pieces.push((word(0), piece));
        bytes = rest;
    }
    pieces
}

/// The mean loss of a minibatch: the left fold over its micro-batches.
fn fold(minibatch: u64, measured: &[Measured]) -> Option<StepLoss> {
    let mut in_order = measured.to_vec();
    in_order.sort_by_key(|m| m.mb);
    let weight = in_order.first()?.total;
    let correct = in_order.iter().map(|m| m.correct).sum();
    let loss = in_order.iter().map(|m| m.loss).sum::<f64>();
    Some(StepLoss { minibatch, loss: if weight > 0.0 { loss / weight } else { 0.0 }, weight, correct })
}
