//! The trainer: profile, plan, prove, run, report.
use super::{
    engine::Engine,
    feed::Minibatch,
    planning::{self, Planning},
    report::{EpochReport, Report, WorkerReport},
    settings::{PlanChoice, Recipe, Settings},
};
use crate::{
    Context, Error, Result,
    data::{Data, Loader, Sampler},
    layers::{Graph, Value},
    optim::{Optimizer, Sgd},
    pipeline::{
        faults,
        schedule::Kind,
        transport::{Transport, launch},
        worker::Times,
    },
    tensor::{DType, Device},
};
use indicatif::{ProgressBar, ProgressStyle};
use std::{io::IsTerminal, path::PathBuf, sync::Arc, time::Instant};

/// Whether training goes on after an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Control {
    /// With the next epoch.
    Continue,
    /// No.
    Stop,
}

type Hook = Arc<dyn Fn(&EpochReport) -> Control + Send + Sync>;

/// Trains a graph on a data set: in this process, or as one of the ranks that `mpirun` started.
pub struct Trainer {
    graph: Graph,
    loss: Value,
    data: Data,
    optimizer: Arc<dyn Optimizer>,
    settings: Settings,
    limits: Limits,
    workers: usize,
    out: Option<PathBuf>,
    quiet: bool,
    hook: Option<Hook>,
}

/// When training ends.
#[derive(Clone, Debug)]
struct Limits {
    epochs: u64,
    steps: Option<u64>,
    until: Option<f64>,
}

impl Trainer {
    /// Trains `graph` to minimise `loss` on `data`; one epoch of SGD unless told otherwise.
    pub fn new(graph: Graph, loss: Value, data: Data) -> Trainer {
        Trainer {
            graph,
            loss,
            data,
            optimizer: Arc::new(Sgd::new(0.01)),
            settings: Settings::default(),
            limits: Limits { epochs: 1, steps: None, until: None },
            workers: 1,
            out: None,
            quiet: false,
            hook: None,
        }
    }

    /// How weights follow gradients.
    pub fn optimizer(mut self, optimizer: impl Optimizer + 'static) -> Trainer {
        self.optimizer = Arc::new(optimizer);
        self
    }

    /// The same, for an optimizer that was chosen at run time.
    pub fn shared_optimizer(self, optimizer: Arc<dyn Optimizer>) -> Trainer {
        Trainer { optimizer, ..self }
    }

    /// All settings at once.
    pub fn settings(self, settings: Settings) -> Trainer {
        Trainer { settings, ..self }
    }

    /// Samples of a minibatch.
    pub fn batch_size(mut self, batch: usize) -> Trainer {
        self.settings.batch = batch;
        self
    }

    /// Micro-batches that a synchronous schedule cuts a minibatch into.
    pub fn micro_batches(mut self, m: usize) -> Trainer {
        self.settings.micro_batches = m;
        self
    }

    /// The schedule.
    pub fn schedule(mut self, schedule: Kind) -> Trainer {
        self.settings.schedule = schedule;
        self
    }

    /// The seed of everything random.
    pub fn seed(mut self, seed: u64) -> Trainer {
        self.settings.seed = seed;
        self
    }

    /// The floating-point type.
    pub fn dtype(mut self, dtype: DType) -> Trainer {
        self.settings.dtype = dtype;
        self
    }

    /// How the model is cut into stages.
    pub fn plan(mut self, plan: PlanChoice) -> Trainer {
        self.settings.plan = plan;
        self
    }

    /// Passes over the training set.
    pub fn epochs(mut self, epochs: u64) -> Trainer {
        self.limits.epochs = epochs;
        self
    }

    /// Ends after this many minibatches, if the epochs do not end before.
    pub fn steps(mut self, steps: u64) -> Trainer {
        self.limits.steps = Some(steps);
        self
    }

    /// Ends after an epoch whose test accuracy is at least this.
    pub fn until(mut self, accuracy: f64) -> Trainer {
        self.limits.until = Some(accuracy);
        self
    }

    /// In-process workers; under `mpirun` its ranks are the workers.
    pub fn workers(self, workers: usize) -> Trainer {
        Trainer { workers, ..self }
    }

    /// The folder of the run: plan, profile, metrics and report are written there.
    pub fn out(self, folder: impl Into<PathBuf>) -> Trainer {
        Trainer { out: Some(folder.into()), ..self }
    }

    /// Without progress on standard error.
    pub fn quiet(self, yes: bool) -> Trainer {
        Trainer { quiet: yes, ..self }
    }

    /// Calls `hook` after each epoch on the first worker; all workers do as it says.
    pub fn on_epoch(self, hook: impl Fn(&EpochReport) -> Control + Send + Sync + 'static) -> Trainer {
        Trainer { hook: Some(Arc::new(hook)), ..self }
    }

    /// Trains.
    ///
    /// # Errors
    /// The first that any worker meets, with rank, stage, micro-batch and operation.
    pub fn run(self) -> Result<Report> {
        let recipe = Recipe {
            graph: Arc::new(self.graph.clone().with_loss(self.loss)?),
            optimizer: self.optimizer.clone(),
            settings: self.settings.clone(),
        };
        recipe.settings.check()?;
        faults::catch_signals()?;
        launch(self.workers, |transport| self.run_worker(&recipe, transport))
    }

    fn say(&self, rank: usize, text: impl FnOnce() -> String) {
        if rank == 0 && !self.quiet {
            eprintln!("{}", text());
        }
    }

    /// One worker's side.
    fn run_worker(&self, recipe: &Recipe, transport: &mut dyn Transport) -> Result<Report> {
        let (rank, workers) = (transport.rank(), transport.size());
        let task = format!("{:?} {}", self.limits, self.data.train.name());
        planning::agree(recipe, &task, transport)?;
        let device = Device::cpu(recipe.settings.threads)?;
        let planning = planning::make(recipe, &device, transport)?;
        self.say(rank, || {
            format!("{} on {workers} workers:\n{}", recipe.settings.schedule, planning::describe(recipe, &planning))
        });
        self.save_plan(rank, recipe, &planning)?;
        let mut engine = Engine::new(recipe.clone(), planning.plan.clone(), device.clone(), transport)?;
        let (train, test) = self.data.loaders(&device, recipe.settings.seed)?;
        let sampler = Sampler::new(self.data.train.len(), recipe.settings.batch, recipe.settings.seed, true)?;
        let mut run = Run {
            trainer: self,
            recipe,
            epochs: Vec::new(),
            warm_misses: None,
            late_misses: 0,
            seconds: 0.0,
            times: Times::default(),
        };
        let interrupted = run.all(&mut engine, &train, test.as_ref(), &sampler)?;
        let report = run.report(&mut engine, &planning, interrupted)?;
        if let (0, Some(out)) = (rank, &self.out) {
            let text = serde_json::to_string_pretty(&report).map_err(|e| Error::config(format!("report: {e}")))?;
            write(&out.join("report.json"), &text)?;
        }
        Ok(report)
    }

    fn save_plan(&self, rank: usize, recipe: &Recipe, planning: &Planning) -> Result<()> {
        let (0, Some(out)) = (rank, &self.out) else { return Ok(()) };
        std::fs::create_dir_all(out).map_err(|e| Error::io(out, e))?;
        write(&out.join("plan.toml"), &planning.plan.to_text_with(&recipe.graph, &planning.stage_seconds))?;
        planning.profile.save(&out.join("profile.json"))
    }
}

fn write(path: &std::path::Path, text: &str) -> Result<()> {
    std::fs::write(path, text).map_err(|e| Error::io(path, e))
}

/// The state of a run on one worker.
struct Run<'a> {
    trainer: &'a Trainer,
    recipe: &'a Recipe,
    epochs: Vec<EpochReport>,
    warm_misses: Option<u64>,
    late_misses: u64,
    seconds: f64,
    /// Of training, without evaluation.
    times: Times,
}

/// Minibatches after which a pool that has not yet seen every size it needs is at fault; at least twice the stages.
const WARM_UP: u64 = 10;

impl Run<'_> {
    /// All epochs; whether it was interrupted.
    fn all(&mut self, engine: &mut Engine, train: &Loader, test: Option<&Loader>, sampler: &Sampler) -> Result<bool> {
        let per_epoch = sampler.batches_per_epoch();
        let limits = &self.trainer.limits;
        let end = limits.steps.map_or(u64::MAX, |s| s).min(limits.epochs.saturating_mul(per_epoch));
        while engine.next_minibatch() < end {
            let first = engine.next_minibatch();
            let epoch = first / per_epoch;
            let last = end.min((epoch + 1) * per_epoch);
            let stopped = self.epoch(engine, train, test, sampler, epoch, first..last)?;
            if stopped {
                return Ok(faults::stop_requested());
            }
        }
        Ok(false)
    }

    /// One epoch, or what is left of it; whether training is to stop after it.
    fn epoch(
        &mut self,
        engine: &mut Engine,
        train: &Loader,
        test: Option<&Loader>,
        sampler: &Sampler,
        epoch: u64,
        numbers: std::ops::Range<u64>,
    ) -> Result<bool> {
        let rank = engine.worker().rank();
        let start = Instant::now();
        let mut data = if engine.reads_data() { Some(train.prefetch(sampler, numbers.clone())?) } else { None };
        let bar = self.bar(rank, epoch, numbers.end - numbers.start);
        let mut samples = 0;
        for number in numbers {
            let (_, ids) = sampler.minibatch(number)?;
            let batch = data.as_mut().and_then(Iterator::next).transpose()?;
            samples += ids.len() as u64;
            let full = ids.len() == self.recipe.settings.batch;
            engine.train(Minibatch { number, ids, batch })?;
            bar.inc(1);
            bar.set_message(format!("{:.0} samples/s", samples as f64 / start.elapsed().as_secs_f64()));
            self.count_misses(engine, number, full);
        }
        engine.drain()?;
        self.times.merge(&engine.worker_mut().take_times());
        let seconds = start.elapsed().as_secs_f64();
        self.seconds += seconds;
        bar.finish_and_clear();
        let losses = engine.take_losses();
        let weight: f64 = losses.iter().map(|l| l.weight).sum();
        let sum: f64 = losses.iter().map(|l| l.loss * l.weight).sum();
        let mine = (!losses.is_empty()).then(|| if weight > 0.0 { sum / weight } else { 0.0 });
        let train_loss = engine.gather(&mine)?.into_iter().flatten().next().unwrap_or(f64::NAN);
        self.write_steps(&losses)?;
        let tested = test.map(|t| engine.evaluate(t)).transpose()?;
        engine.worker_mut().take_times();
        let report = EpochReport {
            epoch,
            train_loss,
            test_loss: tested.map(|t| t.loss),
            test_accuracy: tested.and_then(|t| t.accuracy),
            seconds,
            samples,
        };
        self.trainer.say(rank, || {
            let accuracy =
                report.test_accuracy.map_or(String::new(), |a| format!(", test accuracy {:.2} %", 100.0 * a));
            let speed = samples as f64 / seconds;
            format!("epoch {epoch}: loss {train_loss:.4}{accuracy}, {seconds:.1} s, {speed:.0} samples/s")
        });
        let reached = self.trainer.limits.until.is_some_and(|goal| report.test_accuracy.is_some_and(|a| a >= goal));
        let hook = self.trainer.hook.as_ref().filter(|_| rank == 0);
        let stop = reached || faults::stop_requested() || hook.is_some_and(|h| h(&report) == Control::Stop);
        self.epochs.push(report);
        // All do what any one wants, so that none waits for another.
        Ok(engine.gather(&stop)?.into_iter().any(|s| s))
    }

    fn count_misses(&mut self, engine: &Engine, number: u64, full: bool) {
        let misses = engine.worker().device().memory().misses;
        let warm = WARM_UP.max(2 * engine.plan().stages().len() as u64);
        match self.warm_misses {
            None if number + 1 >= warm => self.warm_misses = Some(misses),
            // A ragged minibatch needs buffers of its own sizes, and so does what follows it.
            Some(at) if full && number < engine.next_minibatch() => {
                self.late_misses = self.late_misses.max(misses - at)
            }
            _ => {}
        }
        if !full {
            self.warm_misses = None;
        }
    }

    fn bar(&self, rank: usize, epoch: u64, len: u64) -> ProgressBar {
        if rank != 0 || self.trainer.quiet || !std::io::stderr().is_terminal() {
            return ProgressBar::hidden();
        }
        let style = ProgressStyle::with_template("{prefix} [{bar:40}] {pos}/{len} {msg} ({eta} left)");
        let bar = ProgressBar::new(len).with_prefix(format!("epoch {epoch}"));
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> "));
        bar
    }

    /// Appends the losses to the metrics of the run, on the worker that has them.
    fn write_steps(&self, losses: &[super::StepLoss]) -> Result<()> {
        let Some(out) = self.trainer.out.as_ref().filter(|_| !losses.is_empty()) else { return Ok(()) };
        use std::io::Write;
        let path = out.join("steps.jsonl");
        let mut text = String::new();
        for l in losses {
            text += &serde_json::to_string(l).map_err(|e| Error::config(format!("metrics: {e}")))?;
            text.push('\n');
        }
        let file = std::fs::OpenOptions::new().create(true).append(true).open(&path);
        file.and_then(|mut f| f.write_all(text.as_bytes())).map_err(|e| Error::io(&path, e))
    }

    fn report(self, engine: &mut Engine, planning: &Planning, interrupted: bool) -> Result<Report> {
        let mine = WorkerReport::new(&self.recipe.graph, engine.plan(), engine.worker(), &self.times, self.late_misses);
        let all = engine.gather(&mine)?;
        let total = self.seconds * all.len() as f64;
        let part = |f: fn(&WorkerReport) -> f64| if total > 0.0 { all.iter().map(f).sum::<f64>() / total } else { 0.0 };
        let mut stages: Vec<_> = all.iter().flat_map(|w| w.stages.clone()).collect();
        stages.sort_by_key(|(s, _)| *s);
        let samples: u64 = self.epochs.iter().map(|e| e.samples).sum();
        Ok(Report {
            schedule: self.recipe.settings.schedule.to_string(),
            workers: all.len(),
            test_accuracy: self.epochs.last().and_then(|e| e.test_accuracy),
            train_loss: self.epochs.iter().map(|e| e.train_loss).collect(),
            seconds_per_epoch: self.epochs.iter().map(|e| e.seconds).collect(),
            samples_per_s: if self.seconds > 0.0 { samples as f64 / self.seconds } else { 0.0 },
            predicted_samples_per_s: planning.samples_per_s,
            efficiency: part(|w| w.busy),
            bubble_fraction: part(|w| w.waiting),
            communication_fraction: part(|w| w.sending),
            stages: stages.into_iter().map(|(_, s)| s).collect(),
            pool_peak_bytes: all.iter().map(|w| w.pool_peak_bytes).collect(),
            rss_bytes: all.iter().map(|w| w.rss_bytes).collect(),
            pool_misses_after_warmup: all.iter().map(|w| w.pool_misses_after_warmup).sum(),
            steps: engine.next_minibatch(),
            interrupted,
            weights_sha256: engine.weights_sha256().context(|| "hash of the weights")?,
            worker: engine.worker().rank(),
            epochs: self.epochs,
        })
    }
}
