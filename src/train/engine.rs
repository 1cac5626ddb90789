//! One worker's side of a run: every worker calls the same functions in the same order.
use super::{
    feed::{Minibatch, Pieces},
    gather,
    settings::Recipe,
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
        schedule::{self, Kind, Programs, Wiring, verify::Facts},
        stage::{Measured, Ports, Stage},
        transport::Transport,
        weights::check_memory,
        worker::{self, Mission, Worker},
    },
    tensor::{Device, Tensor},
};
use serde::{Serialize, de::DeserializeOwned};
use sha2::{Digest, Sha256};
use std::{collections::HashMap, sync::Arc};

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
}

/// A worker that trains.
pub struct Engine<'t> {
    recipe: Recipe,
    plan: Arc<Plan>,
    ports: Arc<[Ports]>,
    worker: Worker<'t>,
    feed: Pieces,
    streaming: Option<Streaming>,
    programs: HashMap<(bool, usize), Arc<Programs>>,
    losses: Vec<StepLoss>,
    next: u64,
    lead: Lead,
    /// The most micro-batches that are in flight on this worker at once, by the proof of the programs.
    in_flight: usize,
}

/// More minibatches than any run has: the end of a stream that is not known yet.
const ENDLESS: usize = 1 << 40;

impl<'t> Engine<'t> {
    /// The worker of `transport`, with the first weights of its stages.
    pub fn new(recipe: Recipe, plan: Plan, device: Device, transport: &'t mut dyn Transport) -> Result<Engine<'t>> {
        recipe.settings.check()?;
        if plan.workers() != transport.size() {
            let (a, b) = (plan.workers(), transport.size());
            return Err(Error::plan(format!("the plan is for {a} workers, there are {b}")));
        }
        let setup = recipe.setup();
        let rank = transport.rank();
        let mine = || (0..plan.stages().len()).filter(|&s| plan.stages()[s].workers.contains(&rank));
        if device.backend().has_data() {
            let nodes: Vec<NodeId> = mine().flat_map(|s| plan.stages()[s].nodes.clone()).collect();
            let fits = check_memory(&recipe.graph, &nodes, &*recipe.optimizer, recipe.settings.dtype);
            fits.context(|| format!("the stages of worker {rank}"))?;
        }
        let stages = mine().map(|s| Stage::new(&setup, &plan, s, &device)).collect::<Result<Vec<_>>>()?;
        let feed = Pieces::new(recipe.graph.clone(), recipe.settings.seed, recipe.settings.dtype);
        let in_flight = if recipe.settings.schedule.is_synchronous() { 1 } else { plan.stages().len() as u64 };
        let lead = Lead::new(&device, in_flight)?;
        let worker = Worker::new(recipe.graph.clone(), recipe.settings.dtype, device, transport, stages);
        let (programs, losses) = (HashMap::new(), Vec::new());
        let ports = ports(&plan);
        let plan = Arc::new(plan);
        Ok(Engine { recipe, plan, ports, worker, feed, streaming: None, programs, losses, next: 0, lead, in_flight: 1 })
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

    /// Whether this worker has the loss, and so what is known of it.
    pub fn has_loss(&self) -> bool {
        let loss = self.recipe.graph.loss_node();
        self.worker.stages().any(|s| loss.is_some_and(|n| self.plan.stages()[s.index()].nodes.contains(&n)))
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
        let workers = self.plan.stages().len();
        let kind = self.recipe.settings.schedule;
        let plain = if train { schedule::make(kind, workers, n)? } else { schedule::evaluate(workers, n)? };
        let (proven, facts) = proven(plain, &self.plan.wiring(train))?;
        let peak = facts.workers.get(self.worker.rank()).map_or(0, |w| w.peak_activations);
        self.in_flight = self.in_flight.max(if train { peak } else { 0 });
        let proven = Arc::new(proven);
        self.programs.insert((train, n), proven.clone());
        Ok(proven)
    }

    fn mission(&self, mode: Mode) -> Mission {
        let samples = self.recipe.settings.micro_batch();
        let (plan, ports) = (self.plan.clone(), self.ports.clone());
        Mission { mode, plan, ports, samples, wanted: None, ask: Vec::new() }
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
            self.worker.restart()?;
            let measured = self.worker.take_measured();
            self.losses.extend(fold(minibatch.number, &measured));
            return Ok(());
        }
        let stream = self.streaming.take().unwrap_or(Streaming { first: minibatch.number, fed: 0, done: 0 });
        self.feed.add(minibatch, stream.fed, size, None)?;
        let fed = stream.fed + 1;
        let programs = self.programs(true, ENDLESS)?;
        let ready = |inst: &schedule::Inst| inst.mb().is_none_or(|mb| mb < fed);
        let program =
            programs.workers.get(rank).ok_or_else(|| Error::schedule(format!("no program for rank {rank}")))?;
        let mut done = stream.done;
        while let Some(inst) = program.get(done).filter(ready) {
            worker::run(&mut self.worker, [inst], &mission, &mut self.feed)?;
            done += 1;
        }
        self.streaming = Some(Streaming { fed, done, ..stream });
        self.collect(stream.first);
        Ok(())
    }

    /// Notes the losses of an asynchronous run that began with minibatch `first`.
    fn collect(&mut self, first: u64) {
        let measured = self.worker.take_measured();
        self.losses.extend(measured.iter().flat_map(|m| fold(first + m.mb as u64, std::slice::from_ref(m))));
    }

    /// Lays by the buffers that messages may need beyond those that they needed so far: how long others hold what was sent
    /// depends on the clock, the bound on the schedule.
    pub fn reserve(&mut self) {
        let (graph, dtype) = (&self.recipe.graph, self.recipe.settings.dtype);
        let samples = self.recipe.settings.micro_batch();
        let pool = self.worker.device().pool();
        let mine: Vec<usize> = self.worker.stages().map(|s| s.index()).collect();
        for edge in self.plan.edges().iter().filter(|e| e.from != e.to) {
            let sizes = self.plan.message_bytes(graph, edge, samples, dtype);
            if mine.contains(&edge.from) || mine.contains(&edge.to) {
                sizes.iter().for_each(|&bytes| pool.reserve(bytes, self.in_flight + 1));
            }
        }
    }

    /// Finishes all that is in flight. Where this stands is part of an asynchronous run's definition.
    pub fn drain(&mut self) -> Result<()> {
        let Some(stream) = self.streaming.take() else { return Ok(()) };
        let programs = self.programs(true, stream.fed)?;
        let rank = self.worker.rank();
        let rest: Vec<_> = programs.stream(rank).skip(stream.done).collect();
        let mission = self.mission(Mode::Train);
        worker::run(&mut self.worker, rest, &mission, &mut self.feed).context(|| "drain")?;
        self.worker.restart()?;
        self.collect(stream.first);
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
        let mut data = if self.reads_data() { Some(loader.prefetch(&sampler, 0..n)?) } else { None };
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
        self.worker.restart()?;
        let measured = self.worker.take_measured();
        let sum = |f: fn(&Measured) -> f64| measured.iter().map(f).sum::<f64>();
        let weight = sum(|m| m.total);
        let found = (!measured.is_empty()).then(|| Evaluation {
            loss: sum(|m| m.loss) / weight,
            accuracy: measured.iter().all(|m| m.correct.is_some()).then(|| sum(|m| m.correct.unwrap_or(0.0)) / weight),
        });
        self.share(found)?.ok_or_else(|| Error::graph("no worker has the loss"))
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
        let (programs, _) = proven(schedule::evaluate(plan.stages().len(), n)?, &plan.wiring(false))?;
        let (ports, wanted) = (ports(&plan), Some(wanted.into()));
        let mission = Mission { mode: Mode::Eval, plan, ports, samples: size, wanted, ask: vec![value] };
        let rank = self.worker.rank();
        worker::run(&mut self.worker, programs.stream(rank), &mission, &mut self.feed)?;
        self.worker.restart()?;
        let mut pieces = self.worker.take_asked();
        pieces.sort_by_key(|(mb, ..)| *mb);
        let pieces: Vec<Tensor> = pieces.into_iter().map(|(.., t)| t).collect();
        let mine = if pieces.is_empty() { Vec::new() } else { Tensor::concat(&pieces, 0)?.host_bytes()?.to_vec() };
        let all = self.worker.transport().all_gather(&mine)?;
        let bytes = all.into_iter().find(|b| !b.is_empty()).unwrap_or_default();
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
        for stage in self.worker.stages() {
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

/// Programs of compute instructions, placed on their workers, with communication, and proven; and what the proof found.
fn proven(plain: Programs, wiring: &Wiring) -> Result<(Programs, Facts)> {
    let lowered = schedule::lower(&plain.placed(wiring)?, wiring)?;
    let facts = schedule::verify(&lowered, wiring)?;
    Ok((lowered, facts))
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
