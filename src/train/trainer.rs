//! The trainer: profile, plan, prove, run, report.
use super::{
    files::{Every, Files},
    log,
    report::{EpochReport, Report},
    saving,
    session::{Session, Task},
    settings::{PlanChoice, Recipe, Settings},
};
use crate::{
    Error, Result,
    data::Data,
    layers::{Graph, Value},
    optim::{Optimizer, Sgd},
    pipeline::{
        faults,
        schedule::Kind,
        transport::{launch, launcher},
    },
    tensor::DType,
};
use indicatif::{ProgressBar, ProgressStyle};
use std::{io::IsTerminal, path::PathBuf, sync::Arc, time::Instant};

/// Whether training goes on after an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Control {
    /// With the next epoch.
    Continue,
    /// With the next epoch, once the weights of now are kept as the best: see [`Session::keep_best`].
    Keep,
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
    files: Files,
    quiet: bool,
    signals: bool,
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
            files: Files::default(),
            quiet: false,
            signals: true,
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

    /// The folder of the run: plan, profile, metrics, logs, checkpoints and report are written there.
    pub fn out(mut self, folder: impl Into<PathBuf>) -> Trainer {
        self.files.out = Some(folder.into());
        self
    }

    /// All that concerns the run's folder and checkpoints at once.
    pub fn files(self, files: Files) -> Trainer {
        Trainer { files, ..self }
    }

    /// When checkpoints are written into the run's folder, and how many of them stay; the two of the last epochs unless told
    /// otherwise.
    pub fn checkpoints(mut self, every: Every, keep: usize) -> Trainer {
        self.files.every = every;
        self.files.keep = keep;
        self
    }

    /// Goes on from the checkpoint in `folder`, or from the newest of the run in `folder`, on any number of workers.
    pub fn resume(mut self, folder: impl Into<PathBuf>) -> Trainer {
        self.files.resume = Some(folder.into());
        self
    }

    /// Without progress on standard error.
    pub fn quiet(self, yes: bool) -> Trainer {
        Trainer { quiet: yes, ..self }
    }

    /// Whether SIGTERM, SIGINT and SIGUSR1 end the run after the minibatch at hand, with a checkpoint, as they do unless told
    /// otherwise. If not, they do what they did before.
    pub fn handle_signals(self, yes: bool) -> Trainer {
        Trainer { signals: yes, ..self }
    }

    /// Calls `hook` after each epoch on the first worker; all workers do as it says. For early stop and keep-best. A run that
    /// goes on from a checkpoint first calls it for each epoch before, so that it remembers what it saw; what it says
    /// of the last one counts.
    pub fn on_epoch(self, hook: impl Fn(&EpochReport) -> Control + Send + Sync + 'static) -> Trainer {
        Trainer { hook: Some(Arc::new(hook)), ..self }
    }

    /// Trains.
    ///
    /// # Errors
    /// The first that any worker meets, with rank, stage, micro-batch and operation.
    pub fn run(self) -> Result<Report> {
        let (limits, hook, quiet) = (self.limits.clone(), self.hook.clone(), self.quiet);
        self.run_with(|session| epochs(session, &limits, hook.as_ref(), quiet))
    }

    /// Runs a training loop of your own, on every worker alike; how many epochs it has is the loop's business. The result is
    /// that of the first worker, or, under `mpirun`, of this one.
    ///
    /// # Errors
    /// The first that any worker meets, with rank, stage, micro-batch and operation.
    pub fn run_with<T: Send>(self, work: impl Fn(&mut Session) -> Result<T> + Sync) -> Result<T> {
        let recipe = Recipe {
            graph: Arc::new(self.graph.with_loss(self.loss)?),
            optimizer: self.optimizer,
            settings: self.settings,
        };
        recipe.settings.check()?;
        if self.files.keep == 0 {
            return Err(Error::config("checkpoints: 1 or more to keep expected, got 0"));
        }
        let layers = recipe.graph.layers().count();
        if self.workers > layers && launcher::detect().is_none() {
            // Threads are not to be started in vain.
            let n = self.workers;
            return Err(Error::plan(format!("{n} workers need {n} stages, the model has {layers} layers")));
        }
        // Before anything is written there.
        saving::refuse_to_mix(&self.files)?;
        let (files, told) = (self.files, format!("{:?}", self.limits));
        let task = Task { recipe, data: self.data, files, told, quiet: self.quiet };
        if self.signals {
            faults::catch_signals()?;
        }
        launch(self.workers, |transport| {
            let _lock = saving::lock(&task.files, transport)?;
            let _log = log::attach(task.files.out.as_deref(), transport.rank(), task.files.resume.is_some())?;
            let mut run = || {
                let mut session = Session::open(&task, transport)?;
                let done = work(&mut session)?;
                session.finish()?;
                Ok(done)
            };
            // For the log alone: who called says it aloud.
            run().inspect_err(|e| tracing::info!("ended by an error: {e}"))
        })
    }
}

/// The loop of [`Trainer::run`].
fn epochs(session: &mut Session, limits: &Limits, hook: Option<&Hook>, quiet: bool) -> Result<Report> {
    let end = limits.steps.unwrap_or(u64::MAX).min(limits.epochs.saturating_mul(session.batches_per_epoch()));
    session.stop_at(end);
    let mut goes_on = catch_up(session, limits, hook)?;
    while goes_on && (session.next_minibatch() < end || session.is_epoch_over()) {
        if !session.is_epoch_over() {
            rest_of_epoch(session, end, quiet)?;
            if session.interrupted() {
                break;
            }
        }
        let report = session.end_epoch()?;
        session.say(|| report.summary());
        goes_on = heed(session, &report, limits, hook, true)? && !session.interrupted();
    }
    session.save_at_end()?;
    session.report()
}

/// Trains on the minibatches of this epoch that are left, at most up to number `end`.
fn rest_of_epoch(session: &mut Session, end: u64, quiet: bool) -> Result<()> {
    let left = end.min((session.epoch() + 1) * session.batches_per_epoch()) - session.next_minibatch();
    let bar = bar(session.rank() > 0 || quiet, session.epoch(), left);
    let (start, mut samples) = (Instant::now(), 0);
    while let Some(batch) = session.next_batch()? {
        session.step(&batch)?;
        samples += batch.ids.len();
        bar.inc(1);
        bar.set_message(format!("{:.0} samples/s", samples as f64 / start.elapsed().as_secs_f64()));
    }
    bar.finish_and_clear();
    Ok(())
}

/// Does what the end of an epoch asks for; `keep`: also the keeping of its weights, which are those of now. Whether training goes
/// on.
fn heed(session: &mut Session, report: &EpochReport, limits: &Limits, hook: Option<&Hook>, keep: bool) -> Result<bool> {
    let reached = limits.until.is_some_and(|goal| report.test_accuracy.is_some_and(|a| a >= goal));
    let wish = hook.filter(|_| session.rank() == 0).map_or(Control::Continue, |h| h(report));
    let wishes = session.gather(&wish)?;
    if keep && wishes.contains(&Control::Keep) {
        session.keep_best()?;
    }
    Ok(!reached && !wishes.contains(&Control::Stop))
}

/// Tells the hook of the epochs before, and heeds the last of them as the run would have that ended after it. Whether training
/// goes on.
fn catch_up(session: &mut Session, limits: &Limits, hook: Option<&Hook>) -> Result<bool> {
    let reports = session.epochs().to_vec();
    let Some((last, before)) = reports.split_last() else { return Ok(true) };
    if let Some(hook) = hook.filter(|_| session.rank() == 0) {
        before.iter().for_each(|report| {
            hook(report);
        });
    }
    let is_now = session.next_minibatch() == (last.epoch + 1) * session.batches_per_epoch();
    heed(session, last, limits, hook, is_now)
}

/// A progress bar over `len` minibatches, if somebody watches.
fn bar(hidden: bool, epoch: u64, len: u64) -> ProgressBar {
    if hidden || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{prefix} [{bar:40}] {pos}/{len} {msg} ({eta} left)");
    let bar = ProgressBar::new(len).with_prefix(format!("epoch {epoch}"));
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> "));
    bar
}
