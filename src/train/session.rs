//! A run, a minibatch at a time: for training loops of one's own.
use super::{
    engine::{Engine, Evaluation},
    feed::Minibatch,
    files::{CONFIG, Every, Files},
    planning::{self, Planning},
    report::{EpochReport, Report, WorkerReport},
    saving,
    settings::{PlanChoice, Recipe, Settings},
    split::{Comparison, Split},
    tally::{History, Tally},
};
use crate::{
    Context, Error, Result,
    data::{Batch, Data, Loader, Prefetch, Sampler},
    layers::Value,
    pipeline::{
        checkpoint::Position,
        faults,
        plan::Plan,
        transport::{Transport, launcher},
    },
    tensor::{CpuOptions, Device, Tensor},
};
use std::path::{Path, PathBuf};

/// What a session is opened for.
pub(super) struct Task {
    pub recipe: Recipe,
    pub data: Data,
    pub files: Files,
    /// What else all workers must have been told alike.
    pub told: String,
    pub quiet: bool,
}

/// One worker's side of a run: see [`Trainer::run_with`](super::Trainer::run_with). Every worker runs the same loop, and calls
/// the same methods in the same order; all but those that only tell something wait for the other workers where they must.
pub struct Session<'t> {
    files: Files,
    identity: String,
    quiet: bool,
    planning: Planning,
    engine: Engine<'t>,
    train: Loader,
    test: Option<Loader>,
    sampler: Sampler,
    /// The first minibatch that is not trained on.
    end: u64,
    reading: Option<Reading>,
    interrupted: bool,
    tally: Tally,
    /// The last checkpoint, and the minibatch before which it stands.
    saved: Option<(u64, PathBuf)>,
    /// Whether a checkpoint is to be written at the end of the epoch, which waits for its report.
    due: bool,
    /// The last report, if nothing was trained on since.
    reported: Option<Report>,
}

/// The rest of an epoch, being read ahead.
struct Reading {
    next: u64,
    end: u64,
    data: Option<Prefetch>,
}

impl<'t> Session<'t> {
    /// Profiles, plans, and makes or loads this worker's stages.
    pub(super) fn open(task: &Task, transport: &'t mut dyn Transport) -> Result<Session<'t>> {
        let mut recipe = task.recipe.clone();
        let (rank, workers) = (transport.rank(), transport.size());
        let data = &task.data;
        planning::agree(&recipe, &format!("{} {:?} {}", task.told, task.files, data.train.name()), transport)?;
        // Minibatches are no larger than the data set, and so no buffer need be.
        recipe.settings.batch = recipe.settings.batch.min(data.train.len().max(1));
        let sampler = Sampler::new(data.train.len(), recipe.settings.batch, recipe.settings.seed, true)?;
        let found = task.files.resume.as_ref().map(|folder| saving::find(folder, transport)).transpose()?;
        let recorded = found.as_ref().and_then(saving::instructions);
        let isa = planning::instructions(recorded, task.files.any_instructions, transport)?;
        let identity = saving::identity(&recipe, data, isa);
        if let Some(found) = &found {
            saving::check(found, &identity, &sampler)?;
            if let (PlanChoice::Auto, Some(plan)) = (&recipe.settings.plan, saving::plan_of(found, &recipe, workers)?) {
                recipe.settings.plan = PlanChoice::Given(plan);
            }
        }
        let Settings { threads, winograd, .. } = recipe.settings;
        let device = Device::cpu_with(CpuOptions { threads, isa, winograd })?;
        let planning = planning::make(&recipe, &device, transport)?;
        let mut engine = Engine::new(recipe.clone(), planning.plan.clone(), device.clone(), transport)?;
        let mut history = History::default();
        if let Some(found) = &found {
            saving::load(&mut engine, found)?;
            let kept = serde_json::from_value(found.position().history.clone());
            history = kept.map_err(|e| Error::checkpoint(format!("{}: history: {e}", found.folder().display())))?;
        }
        let (train, test) = data.loaders(&device, recipe.settings.seed)?;
        let mut session = Session {
            tally: Tally::new(history, sampler.batches_per_epoch()),
            files: task.files.clone(),
            identity,
            quiet: task.quiet,
            planning,
            engine,
            train,
            test,
            sampler,
            end: u64::MAX,
            reading: None,
            interrupted: false,
            saved: found.as_ref().map(|f| (f.position().minibatch, f.folder().to_path_buf())),
            due: false,
            reported: None,
        };
        session.introduce(rank, found.is_some())?;
        Ok(session)
    }

    /// Says what runs, and makes the run's folder ready.
    fn introduce(&mut self, rank: usize, resumed: bool) -> Result<()> {
        let (kind, workers) = (self.recipe().settings.schedule, self.workers());
        let mut stages = planning::describe(self.recipe(), &self.planning);
        // Threads of one process have no links to speak of.
        if launcher::detect().is_some() && workers > 1 {
            stages += &format!("  {}\n", self.planning.ranks);
        }
        tracing::info!(rank, workers, pid = std::process::id(), "{kind} on {workers} workers:\n{stages}");
        self.say(|| format!("{kind} on {workers} workers:\n{stages}"));
        if resumed {
            let next = self.next_minibatch();
            tracing::info!("goes on with minibatch {next}");
            self.say(|| format!("goes on with minibatch {next} (epoch {})", self.epoch()));
        }
        let Some(out) = &self.files.out else { return Ok(()) };
        std::fs::create_dir_all(out).map_err(|e| Error::io(out, e))?;
        if self.engine.has_loss() {
            self.tally.write_to(&out.join("steps.jsonl"), self.engine.next_minibatch())?;
        }
        if rank > 0 {
            return Ok(());
        }
        if let Some(text) = &self.files.config {
            write(&out.join(CONFIG), text)?;
        }
        write(
            &out.join("plan.toml"),
            &self.planning.plan.to_text_with(&self.recipe().graph, &self.planning.stage_seconds),
        )?;
        // Of more ranks than anyone plans for there is none.
        if self.planning.ranks.is_measured()
            && let Ok(topology) = self.planning.ranks.topology()
        {
            write(&out.join("topology.toml"), &topology.to_text())?;
        }
        self.planning.profile.save(&out.join("profile.json"))
    }

    fn recipe(&self) -> &Recipe {
        self.engine.recipe()
    }

    /// This worker's number.
    pub fn rank(&self) -> usize {
        self.engine.worker().rank()
    }

    /// The number of workers.
    pub fn workers(&self) -> usize {
        self.engine.plan().workers()
    }

    /// The partition.
    pub fn plan(&self) -> &Plan {
        self.engine.plan()
    }

    /// The number of the next minibatch, counted over all epochs.
    pub fn next_minibatch(&self) -> u64 {
        self.engine.next_minibatch()
    }

    /// The epoch of the next minibatch.
    pub fn epoch(&self) -> u64 {
        self.sampler.locate(self.next_minibatch()).0
    }

    /// Minibatches of an epoch.
    pub fn batches_per_epoch(&self) -> u64 {
        self.sampler.batches_per_epoch()
    }

    /// The reports of all epochs so far, also of the run that this one goes on from, each as of its last report.
    pub fn epochs(&self) -> &[EpochReport] {
        &self.tally.history.epochs
    }

    /// Whether the epoch of the last minibatch is complete and was not reported on: [`end_epoch`](Session::end_epoch) comes next,
    /// also in a run that goes on from a checkpoint which was written there.
    pub fn is_epoch_over(&self) -> bool {
        let next = self.next_minibatch();
        let epoch = self.epoch();
        next > 0 && next.is_multiple_of(self.batches_per_epoch()) && self.epochs().iter().all(|e| e.epoch + 1 != epoch)
    }

    /// Whether the run was told to stop (by SIGTERM or SIGINT). Then there are no further minibatches.
    pub fn interrupted(&self) -> bool {
        self.interrupted
    }

    /// No minibatch from number `end` on is trained on.
    pub fn stop_at(&mut self, end: u64) {
        self.end = end;
    }

    /// Prints `text` on standard error, on the first worker of a run that is not quiet.
    pub fn say(&self, text: impl FnOnce() -> String) {
        if self.rank() == 0 && !self.quiet {
            crate::aloud::aloud(&text());
        }
    }

    /// The next minibatch of this epoch. `None` at its end (the next call begins the next one), where
    /// [`stop_at`](Session::stop_at) says, and, on all workers alike, once the run is told to stop.
    ///
    /// # Errors
    /// If the data cannot be read, or a minibatch was taken but not trained on.
    pub fn next_batch(&mut self) -> Result<Option<Minibatch>> {
        let number = self.next_minibatch();
        if self.interrupted || number >= self.end {
            self.reading = None;
            return Ok(None);
        }
        let mut reading = match self.reading.take() {
            Some(reading) if reading.next != number => {
                let taken = reading.next.saturating_sub(1);
                return Err(Error::data(format!(
                    "minibatch {taken} was taken, but the next one to train on is {number}: each is to be trained on once"
                )));
            }
            Some(reading) if number == reading.end => return Ok(None),
            Some(reading) => reading,
            None => self.begin_reading(number)?,
        };
        self.tally.go();
        if !self.engine.goes_on(faults::stop_requested())? {
            tracing::info!("told to stop before minibatch {number}");
            self.interrupted = true;
            return Ok(None);
        }
        let (_, ids) = self.sampler.minibatch(number)?;
        let is_read = self.engine.reads_from(number).is_some_and(|(first, _)| first == number);
        let data = reading.data.as_mut().filter(|_| is_read);
        let batch = data.and_then(Iterator::next).transpose()?;
        reading.next += 1;
        self.reading = Some(reading);
        Ok(Some(Minibatch { number, ids, batch }))
    }

    fn begin_reading(&mut self, number: u64) -> Result<Reading> {
        let end = self.end.min((self.epoch() + 1) * self.batches_per_epoch());
        Ok(Reading { next: number, end, data: self.data_of(number, end)? })
    }

    /// The data that this worker reads of the minibatches from `number` to `end`.
    fn data_of(&self, number: u64, end: u64) -> Result<Option<Prefetch>> {
        let Some((first, stride)) = self.engine.reads_from(number) else { return Ok(None) };
        self.train.prefetch_every(&self.sampler, first..end, stride).map(Some)
    }

    /// Trains on a minibatch: the next one, or one of your own making with the number
    /// [`next_minibatch`](Session::next_minibatch), whose data only the worker of the first stage needs. A synchronous schedule
    /// has updated the weights when this returns; an asynchronous one keeps minibatches in flight, until the end of the epoch,
    /// an evaluation or a checkpoint.
    ///
    /// # Errors
    /// With rank, stage, micro-batch and operation.
    pub fn step(&mut self, minibatch: &Minibatch) -> Result<()> {
        let number = minibatch.number;
        self.reported = None;
        self.save_if_due()?;
        self.tally.go();
        self.engine.train(minibatch)?;
        self.tally.fed(number, minibatch.ids.len());
        let losses = self.engine.take_losses();
        self.tally.absorb(&losses)?;
        let full = minibatch.ids.len() == self.recipe().settings.batch;
        let (misses, stages) = (self.engine.worker().device().memory().misses, self.plan().stages().len());
        if self.tally.count_misses(misses, full, stages) {
            self.engine.reserve();
        }
        self.due = matches!(self.files.every, Every::Minibatches(n) if (number + 1).is_multiple_of(n));
        // At the end of an epoch it waits for the report, which belongs to what it keeps.
        if self.is_epoch_over() { Ok(()) } else { self.save_if_due() }
    }

    fn save_if_due(&mut self) -> Result<()> {
        match self.files.checkpoints() {
            Some(root) if std::mem::take(&mut self.due) => self.save_in(&root, self.files.keep).map(|_| ()),
            _ => Ok(()),
        }
    }

    /// Forgets the times, samples and instructions counted so far: for measurements after a warm-up. The pipeline stays full.
    pub fn reset_clock(&mut self) {
        self.tally.restart_clock();
        self.engine.worker_mut().take_times();
    }

    /// Finishes what is in flight; training pauses.
    fn pause(&mut self) -> Result<()> {
        self.engine.drain()?;
        let losses = self.engine.take_losses();
        self.tally.absorb(&losses)?;
        self.tally.times.merge(&self.engine.worker_mut().take_times());
        self.tally.pause(self.next_minibatch().saturating_sub(1));
        // The turns of the workers that read begin anew.
        let next = self.next_minibatch();
        if self.engine.reads_from(next).is_some_and(|(_, stride)| stride > 1)
            && let Some(Reading { end, .. }) = self.reading
        {
            let data = self.data_of(next, end)?;
            self.reading = Some(Reading { next, end, data });
        }
        Ok(())
    }

    /// Finishes what is in flight, evaluates on the test set if there is one, and reports on the epoch so far: the same on every
    /// worker. At the end of an epoch it then writes the checkpoint that is due. If any worker was told to stop meanwhile, there
    /// are no further minibatches.
    ///
    /// # Errors
    /// If nothing was trained on yet; with rank, stage, micro-batch and operation.
    pub fn end_epoch(&mut self) -> Result<EpochReport> {
        let last = self.next_minibatch().checked_sub(1);
        let last = last.ok_or_else(|| Error::data("an epoch ends after a minibatch, there was none"))?;
        self.pause()?;
        let epoch = self.sampler.locate(last).0;
        let sums = self.tally.history.sums.get(&epoch).copied().unwrap_or_default();
        let known = self.engine.has_loss().then(|| sums.mean_loss());
        let train_loss = self.engine.share(known)?.unwrap_or(f64::NAN);
        let tested = if self.test.is_some() { Some(self.evaluate()?) } else { None };
        let report = EpochReport {
            epoch,
            train_loss,
            test_loss: tested.map(|t| t.loss),
            test_accuracy: tested.and_then(|t| t.accuracy),
            seconds: sums.seconds,
            samples: sums.samples,
        };
        tracing::info!("{}", report.summary());
        self.tally.report(report);
        let is_whole = self.next_minibatch().is_multiple_of(self.batches_per_epoch());
        self.due |= is_whole && self.files.every == Every::Epoch;
        self.save_if_due()?;
        self.interrupted |= self.engine.any(faults::stop_requested())?;
        Ok(report)
    }

    /// Loss and accuracy on the test set, the same on every worker. Finishes what is in flight first.
    ///
    /// # Errors
    /// If there is no test set; with rank, stage, micro-batch and operation.
    pub fn evaluate(&mut self) -> Result<Evaluation> {
        self.pause()?;
        let test = self.test.as_ref().ok_or_else(|| Error::data("there is no test set"))?;
        let found = self.engine.evaluate(test)?;
        self.engine.worker_mut().take_times();
        Ok(found)
    }

    /// `value` for each sample of `batch`, in evaluation mode, the same on every worker: [n, …]. Only the fields that it depends
    /// on are needed, and only on the worker of the first stage. Finishes what is in flight first.
    ///
    /// # Errors
    /// If the value is not one per sample, a field is missing or of another shape; with rank, stage, micro-batch and operation.
    pub fn predict(&mut self, batch: &Batch, value: Value) -> Result<Tensor> {
        self.pause()?;
        let found = self.engine.predict(batch, value)?;
        self.engine.worker_mut().take_times();
        Ok(found)
    }

    /// The samples `ids` of the test set.
    ///
    /// # Errors
    /// If there is no test set, or it has no such sample.
    pub fn test_samples(&self, ids: &[u64]) -> Result<Batch> {
        self.test.as_ref().ok_or_else(|| Error::data("there is no test set"))?.load(0, ids)
    }

    /// Writes a checkpoint into the run's folder, of which the newest stay, and returns its own folder. Finishes what is in
    /// flight first.
    ///
    /// # Errors
    /// If the run has no folder, or the disk refuses.
    pub fn save(&mut self) -> Result<PathBuf> {
        let root = self.files.checkpoints().ok_or_else(no_folder)?;
        self.save_in(&root, self.files.keep)
    }

    /// Keeps the weights of now as the best: writes a checkpoint into the folder `best` of the run, in place of the one there.
    ///
    /// # Errors
    /// As for [`save`](Session::save).
    pub fn keep_best(&mut self) -> Result<PathBuf> {
        let root = self.files.best().ok_or_else(no_folder)?;
        self.save_in(&root, 1)
    }

    /// Writes what [`save`](Session::save) writes where nothing else is wanted at the end of a run.
    pub(super) fn save_at_end(&mut self) -> Result<()> {
        let next = self.next_minibatch();
        let is_saved = |saved: &Option<(u64, PathBuf)>| saved.as_ref().is_some_and(|(at, _)| *at == next);
        if (self.interrupted || self.files.every != Every::Never)
            && !is_saved(&self.saved)
            && let Some(root) = self.files.checkpoints()
        {
            self.save_in(&root, self.files.keep)?;
        }
        if self.interrupted {
            self.say(|| match &self.saved {
                Some((at, folder)) if *at == next => format!("stopped; to go on, resume from {}", folder.display()),
                _ => "stopped; without a folder nothing was saved".into(),
            });
        }
        Ok(())
    }

    fn save_in(&mut self, root: &Path, keep: usize) -> Result<PathBuf> {
        self.pause()?;
        let next = self.next_minibatch();
        let sums = self.engine.has_loss().then(|| self.tally.history.sums.clone());
        let sums = self.engine.share(sums)?.unwrap_or_default();
        let history = serde_json::to_value(self.tally.kept(next, &sums));
        let (epoch, samples) = saving::stand(&self.sampler, next);
        let position = Position {
            minibatch: next,
            epoch,
            samples,
            seed: self.recipe().settings.seed,
            config: self.identity.clone(),
            plan: self.plan().to_text(&self.recipe().graph),
            history: history.map_err(|e| Error::checkpoint(format!("history: {e}")))?,
        };
        let folder = saving::save(&mut self.engine, root, &position, keep)?;
        tracing::info!("checkpoint {}", folder.display());
        if self.files.checkpoints().is_some_and(|r| r == root) {
            self.saved = Some((next, folder.clone()));
        }
        Ok(folder)
    }

    /// Gives every worker the values of all of them, in order of rank.
    ///
    /// # Errors
    /// If another worker fails.
    pub fn gather<T: serde::Serialize + serde::de::DeserializeOwned>(&mut self, mine: &T) -> Result<Vec<T>> {
        self.engine.gather(mine)
    }

    /// What there is to say of the run so far, the same on every worker. Finishes what is in flight first.
    ///
    /// # Errors
    /// If another worker fails.
    pub fn report(&mut self) -> Result<Report> {
        if let Some(report) = &self.reported {
            return Ok(report.clone());
        }
        self.pause()?;
        let (engine, tally) = (&mut self.engine, &self.tally);
        let (plan, worker) = (engine.plan(), engine.worker());
        let mine =
            WorkerReport::new(&engine.recipe().graph, plan, worker, &tally.times, tally.late_misses, tally.seconds);
        tracing::info!(?mine, "done");
        let all = engine.gather(&mine)?;
        let total: f64 = all.iter().map(|w| w.seconds).sum();
        let part = |f: fn(&WorkerReport) -> f64| if total > 0.0 { all.iter().map(f).sum::<f64>() / total } else { 0.0 };
        let instructions: u64 = all.iter().map(|w| w.instructions).sum();
        let overhead = total - all.iter().map(|w| w.split.compute + w.split.waiting + w.sum_waiting).sum::<f64>();
        let mut stages: Vec<_> = all.iter().flat_map(|w| w.stages.clone()).collect();
        stages.sort_by_key(|(s, _)| *s);
        // The most of those who hold a stage.
        stages.dedup_by(|(s, other), (kept, most)| {
            if s == kept {
                most.staleness = most.staleness.max(other.staleness);
                most.weight_versions = most.weight_versions.max(other.weight_versions);
            }
            s == kept
        });
        let epochs = &tally.history.epochs;
        let settings = &engine.recipe().settings;
        let samples_per_s = if tally.seconds > 0.0 { tally.samples as f64 / tally.seconds } else { 0.0 };
        let (predicted_s, predicted) = self.planning.predict(settings.schedule, &tally.stretches)?;
        let minibatches = tally.stretches.iter().sum::<u64>();
        let promised = settings.batch as f64 * minibatches as f64 / predicted_s;
        let predicted_samples_per_s = if predicted_s > 0.0 { promised } else { self.planning.samples_per_s };
        let each = |split: &Split| Split::default().plus(1.0 / minibatches.max(1) as f64, *split);
        let comparison = Comparison {
            predicted: predicted.iter().map(each).collect(),
            measured: all.iter().map(|w| each(&w.split)).collect(),
        };
        let warning = comparison.warning(samples_per_s, predicted_samples_per_s).filter(|_| self.planning.is_measured);
        let report = Report {
            schedule: engine.recipe().settings.schedule.to_string(),
            workers: all.len(),
            test_accuracy: epochs.last().and_then(|e| e.test_accuracy),
            train_loss: epochs.iter().map(|e| e.train_loss).collect(),
            seconds_per_epoch: epochs.iter().map(|e| e.seconds).collect(),
            samples_per_s,
            predicted_samples_per_s,
            comparison,
            warning,
            efficiency: part(|w| w.split.compute),
            busy: all.iter().map(|w| if w.seconds > 0.0 { w.split.compute / w.seconds } else { 0.0 }).collect(),
            bubble_fraction: part(|w| w.split.waiting),
            communication_fraction: part(|w| w.split.communication),
            overhead_us: if instructions > 0 { 1e6 * overhead.max(0.0) / instructions as f64 } else { 0.0 },
            stages: stages.into_iter().map(|(_, s)| s).collect(),
            pool_peak_bytes: all.iter().map(|w| w.pool_peak_bytes).collect(),
            rss_bytes: all.iter().map(|w| w.rss_bytes).collect(),
            pool_misses_after_warmup: all.iter().map(|w| w.pool_misses_after_warmup).sum(),
            instructions: all.iter().map(|w| w.instructions).collect(),
            steps: engine.next_minibatch(),
            interrupted: self.interrupted,
            weights_sha256: engine.weights_sha256().context(|| "hash of the weights")?,
            worker: engine.worker().rank(),
            epochs: epochs.clone(),
        };
        self.reported = Some(report.clone());
        Ok(report)
    }

    /// The clean end: writes the report.
    pub(super) fn finish(&mut self) -> Result<()> {
        self.engine.finish()?;
        let Some(out) = self.files.out.clone() else { return Ok(()) };
        let report = self.report()?;
        if self.rank() == 0 {
            let text = serde_json::to_string_pretty(&report).map_err(|e| Error::config(format!("report: {e}")))?;
            write(&out.join("report.json"), &text)?;
        }
        Ok(())
    }
}

fn no_folder() -> Error {
    Error::config("a checkpoint needs a folder to be written to: give the run one with `out`")
}

fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).map_err(|e| Error::io(path, e))
}
