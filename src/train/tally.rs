//! What is counted while a run goes on.
use super::{engine::StepLoss, report::EpochReport};
use crate::{Error, Result, pipeline::worker::Times};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fs::File,
    io::Write,
    path::{Path, PathBuf},
    time::Instant,
};

/// Sums over the minibatches of an epoch so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Sums {
    /// Mean losses × weights, known on the worker that has the loss.
    pub loss: f64,
    /// Weights, likewise.
    pub weight: f64,
    /// Samples.
    pub samples: u64,
    /// Seconds of training.
    pub seconds: f64,
}

impl Sums {
    /// The mean loss of all samples, as they were when trained on.
    pub fn mean_loss(&self) -> f64 {
        if self.weight > 0.0 { self.loss / self.weight } else { 0.0 }
    }
}

/// What a checkpoint keeps, so that a run that goes on reports all of its epochs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct History {
    /// Epochs that were reported, each as of its last report.
    pub epochs: Vec<EpochReport>,
    /// Sums of epochs that are not complete, or not reported.
    pub sums: BTreeMap<u64, Sums>,
}

/// Minibatches after the start, or a pause, after which a pool that has not yet all the buffers it needs is at fault; at least
/// twice the stages. The pipeline fills up in between, and how many buffers are on their way at once depends on the clock.
const WARM_UP: u64 = 10;

/// A worker's counts.
pub(super) struct Tally {
    pub history: History,
    per_epoch: u64,
    /// Since when training has gone on without a pause.
    since: Option<Instant>,
    /// Seconds and samples of training of this process.
    pub seconds: f64,
    pub samples: u64,
    /// Without evaluation.
    pub times: Times,
    /// Minibatches between an empty pipeline and the next, and those since the last one.
    pub stretches: Vec<u64>,
    stretch: u64,
    /// Whole minibatches since the last pause or ragged one.
    whole: u64,
    warm_misses: Option<u64>,
    was_warm: bool,
    pub late_misses: u64,
    metrics: Option<Metrics>,
}

/// One line for every minibatch.
struct Metrics {
    path: PathBuf,
    file: File,
}

#[derive(Serialize)]
struct Line<'a> {
    epoch: u64,
    #[serde(flatten)]
    loss: &'a StepLoss,
    /// Since this process began to train.
    seconds: f64,
}

impl Tally {
    pub fn new(history: History, per_epoch: u64) -> Tally {
        Tally {
            history,
            per_epoch,
            since: None,
            seconds: 0.0,
            samples: 0,
            times: Times::default(),
            stretches: Vec::new(),
            stretch: 0,
            whole: 0,
            warm_misses: None,
            was_warm: false,
            late_misses: 0,
            metrics: None,
        }
    }

    /// From now on every loss is written to the file `path`, after the lines of minibatches before `first`.
    pub fn write_to(&mut self, path: &Path, first: u64) -> Result<()> {
        #[derive(Deserialize)]
        struct Number {
            minibatch: u64,
        }
        let io = |e| Error::io(path, e);
        let before = match std::fs::read_to_string(path) {
            Ok(text) if first > 0 => text,
            _ => String::new(),
        };
        // What a run that was cut off wrote after its last checkpoint is trained again.
        let is_before = |line: &&str| serde_json::from_str::<Number>(line).is_ok_and(|n| n.minibatch < first);
        let kept: String = before.lines().filter(is_before).map(|line| format!("{line}\n")).collect();
        std::fs::write(path, kept).map_err(io)?;
        let file = File::options().append(true).open(path).map_err(io)?;
        self.metrics = Some(Metrics { path: path.to_path_buf(), file });
        Ok(())
    }

    fn epoch(&self, minibatch: u64) -> u64 {
        minibatch / self.per_epoch
    }

    fn sums(&mut self, epoch: u64) -> &mut Sums {
        self.history.sums.entry(epoch).or_default()
    }

    /// Training goes on.
    pub fn go(&mut self) {
        self.since.get_or_insert_with(Instant::now);
    }

    /// Seconds of training of this process until now.
    pub fn seconds_until_now(&self) -> f64 {
        self.seconds + self.since.map_or(0.0, |s| s.elapsed().as_secs_f64())
    }

    /// Forgets times and samples of this process.
    pub fn restart_clock(&mut self) {
        self.since = self.since.map(|_| Instant::now());
        (self.seconds, self.samples, self.times) = (0.0, 0, Times::default());
        (self.stretches, self.stretch) = (Vec::new(), 0);
    }

    /// Training pauses; its last minibatch was `minibatch`.
    pub fn pause(&mut self, minibatch: u64) {
        // What comes in between, such as an evaluation, needs buffers of its own.
        (self.whole, self.warm_misses) = (0, None);
        self.stretches.extend(Some(std::mem::take(&mut self.stretch)).filter(|n| *n > 0));
        if let Some(since) = self.since.take() {
            let seconds = since.elapsed().as_secs_f64();
            self.seconds += seconds;
            self.sums(self.epoch(minibatch)).seconds += seconds;
        }
    }

    /// A minibatch of `samples` samples was given to the pipeline.
    pub fn fed(&mut self, minibatch: u64, samples: usize) {
        self.samples += samples as u64;
        self.stretch += 1;
        self.sums(self.epoch(minibatch)).samples += samples as u64;
    }

    /// What became known of minibatches.
    pub fn absorb(&mut self, losses: &[StepLoss]) -> Result<()> {
        let seconds = self.seconds_until_now();
        let mut text = String::new();
        for l in losses {
            let epoch = self.epoch(l.minibatch);
            let sums = self.sums(epoch);
            sums.loss += l.loss * l.weight;
            sums.weight += l.weight;
            if self.metrics.is_some() {
                let line = serde_json::to_string(&Line { epoch, loss: l, seconds });
                text += &line.map_err(|e| Error::config(format!("metrics: {e}")))?;
                text.push('\n');
            }
        }
        if let Some(Metrics { path, file }) = &mut self.metrics {
            file.write_all(text.as_bytes()).map_err(|e| Error::io(path, e))?;
        }
        Ok(())
    }

    /// Takes note of a pool's misses after a minibatch, `full` or ragged, of a pipeline of `stages`. Whether that was the last
    /// one of the first warm-up.
    pub fn count_misses(&mut self, misses: u64, full: bool, stages: usize) -> bool {
        self.whole += 1;
        match self.warm_misses {
            // A ragged minibatch needs buffers of its own sizes, and so does what follows it.
            _ if !full => (self.whole, self.warm_misses) = (0, None),
            None if self.whole >= WARM_UP.max(2 * stages as u64) => {
                self.warm_misses = Some(misses);
                return !std::mem::replace(&mut self.was_warm, true);
            }
            None => {}
            Some(at) => self.late_misses = self.late_misses.max(misses - at),
        }
        false
    }

    /// Notes the report of an epoch, in place of an earlier one of the same epoch.
    pub fn report(&mut self, report: EpochReport) {
        self.history.epochs.retain(|e| e.epoch != report.epoch);
        self.history.epochs.push(report);
    }

    /// What a checkpoint before minibatch `next` keeps; `sums` is what the worker with the loss has counted.
    pub fn kept(&self, next: u64, sums: &BTreeMap<u64, Sums>) -> History {
        let epoch = self.epoch(next);
        let epochs: Vec<EpochReport> = self.history.epochs.iter().filter(|e| e.epoch < epoch).cloned().collect();
        let is_open = |e: u64| e >= epoch || epochs.iter().all(|report| report.epoch != e);
        let sums = sums.iter().filter(|(e, _)| is_open(**e)).map(|(&e, &s)| (e, s)).collect();
        History { epochs, sums }
    }
}
