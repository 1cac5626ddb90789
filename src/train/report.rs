//! What a run has to say at its end.
use super::split::{Comparison, Split};
use crate::{
    aloud::answer,
    layers::Graph,
    memory,
    pipeline::{
        plan::Plan,
        worker::{Spent, Times, Worker},
    },
};
use serde::{Deserialize, Serialize};

/// One stage of a finished run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StageReport {
    /// The names of its nodes.
    pub nodes: Vec<String>,
    /// The first of its workers.
    pub worker: usize,
    /// All of them.
    pub workers: Vec<usize>,
    /// The most updates between a gradient's weights and those that it updated.
    pub staleness: usize,
    /// The most versions of a weight held at once.
    pub weight_versions: usize,
}

/// One epoch.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct EpochReport {
    /// From 0.
    pub epoch: u64,
    /// The mean of the losses of its samples, as they were when trained on.
    pub train_loss: f64,
    /// The loss on the test set, if there is one.
    pub test_loss: Option<f64>,
    /// Right answers / test samples.
    pub test_accuracy: Option<f64>,
    /// Seconds of training, without the evaluation.
    pub seconds: f64,
    /// Samples trained on.
    pub samples: u64,
}

impl EpochReport {
    /// The report in words.
    pub fn summary(&self) -> String {
        let accuracy = self.test_accuracy.map_or(String::new(), |a| format!(", test accuracy {:.2} %", 100.0 * a));
        let speed = self.samples as f64 / self.seconds;
        let EpochReport { epoch, train_loss, seconds, .. } = self;
        format!("epoch {epoch}: loss {train_loss:.4}{accuracy}, {seconds:.1} s, {speed:.0} samples/s")
    }
}

/// What a worker did and held.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkerReport {
    /// Its stages.
    pub stages: Vec<(usize, StageReport)>,
    /// Seconds of training.
    pub seconds: f64,
    /// Where these went.
    pub split: Split,
    /// Seconds of waiting for the other workers of a stage in sums of gradients, which are part of its communication.
    pub sum_waiting: f64,
    /// Instructions done.
    pub instructions: u64,
    /// The most bytes of its pool in use at once.
    pub pool_peak_bytes: usize,
    /// The most memory that its process held.
    pub rss_bytes: usize,
    /// Requests that the pool could not serve from returned buffers, once it was warm.
    pub pool_misses_after_warmup: u64,
}

impl WorkerReport {
    pub(super) fn new(
        graph: &Graph,
        plan: &Plan,
        worker: &Worker<'_>,
        t: &Times,
        misses: u64,
        seconds: f64,
    ) -> WorkerReport {
        let names = |s: usize| plan.stages()[s].nodes.iter().map(|&n| graph.nodes()[n].name.clone()).collect();
        let stage = |s: &crate::pipeline::stage::Stage| {
            let report = StageReport {
                nodes: names(s.index()),
                worker: plan.stages()[s.index()].workers.first().copied().unwrap_or(worker.rank()),
                workers: plan.stages()[s.index()].workers.clone(),
                staleness: s.staleness(),
                weight_versions: s.most_versions(),
            };
            (s.index(), report)
        };
        WorkerReport {
            stages: worker.stages().map(stage).collect(),
            seconds,
            split: Split::measured(t),
            sum_waiting: t.seconds(Spent::ReduceWait),
            instructions: t.instructions,
            pool_peak_bytes: worker.device().memory().peak_bytes,
            rss_bytes: memory::peak().unwrap_or(0) as usize,
            pool_misses_after_warmup: misses,
        }
    }
}

/// What a run has to say at its end.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The schedule.
    pub schedule: String,
    /// Workers.
    pub workers: usize,
    /// Right answers / test samples after the last epoch.
    pub test_accuracy: Option<f64>,
    /// For each epoch, the mean loss of the samples trained on.
    pub train_loss: Vec<f64>,
    /// For each epoch, the seconds of training.
    pub seconds_per_epoch: Vec<f64>,
    /// Each epoch.
    pub epochs: Vec<EpochReport>,
    /// Samples trained on per second.
    pub samples_per_s: f64,
    /// What the profile, the links and the plan promised for a run of this length, all known before it began: filling and draining
    /// the pipeline count, as they do in what was measured.
    pub predicted_samples_per_s: f64,
    /// Where each worker's time went, predicted and measured.
    pub comparison: Comparison,
    /// If predicted and measured throughput differ much, the likely cause; never where nothing was measured before the run.
    pub warning: Option<String>,
    /// Time of compute / time in all, over all workers: ideal / actual time.
    pub efficiency: f64,
    /// For each worker, its time of compute / time in all.
    pub busy: Vec<f64>,
    /// Time of waiting for others / time in all, over all workers.
    pub bubble_fraction: f64,
    /// Time of starting receives and sends, of waiting for the end of sends and of sums of gradients / time in all, over all
    /// workers.
    pub communication_fraction: f64,
    /// Microseconds of an instruction that are neither compute nor waiting for another worker (for a message, or in a sum of
    /// gradients), on average over all workers: what the runtime and the transport cost.
    pub overhead_us: f64,
    /// The stages.
    pub stages: Vec<StageReport>,
    /// For each worker, the most bytes of its pool in use at once.
    pub pool_peak_bytes: Vec<usize>,
    /// For each worker, the most memory of its process (threads share one).
    pub rss_bytes: Vec<usize>,
    /// Over all workers, requests that the pools could not serve from returned buffers, once they were warm.
    pub pool_misses_after_warmup: u64,
    /// For each worker, the instructions that it did while training.
    pub instructions: Vec<u64>,
    /// Minibatches since training began.
    pub steps: u64,
    /// Whether it was told to stop before its end.
    pub interrupted: bool,
    /// Of all weights and node states.
    pub weights_sha256: String,
    /// The worker whose copy of the report this is; the rest is the same on all.
    pub worker: usize,
}

impl Report {
    /// Prints the report in words, on the first worker only.
    pub fn print(&self) {
        if self.worker == 0 {
            answer(&self.summary());
        }
    }

    /// The report in words.
    pub fn summary(&self) -> String {
        let mb = |b: &usize| format!("{:.0}", *b as f64 / 1e6);
        let list = |v: &[usize]| v.iter().map(mb).collect::<Vec<_>>().join(" ");
        let off = 100.0 * (self.samples_per_s / self.predicted_samples_per_s - 1.0);
        let accuracy = self.test_accuracy.map_or("not tested".into(), |a| format!("{:.2} %", 100.0 * a));
        let stages: Vec<String> = self
            .stages
            .iter()
            .map(|s| {
                let on = if s.workers.len() > 1 { format!(" on {}", s.workers.len()) } else { String::new() };
                format!("{} nodes{on}, staleness {}, {} versions", s.nodes.len(), s.staleness, s.weight_versions)
            })
            .collect();
        let warning = self.warning.as_ref().map_or(String::new(), |w| format!("warning         {w}\n"));
        format!(
            "schedule        {} on {} workers: {}\n\
             accuracy        {accuracy}\n\
             throughput      {:.1} samples/s measured, {:.1} predicted ({off:+.1} %)\n\
             efficiency      {:.1} % (ideal / actual time)\n\
             bubble          {:.1} % waiting, {:.1} % communicating, {:.1} µs of overhead an instruction\n\
             {}\n\
             {warning}\
             memory per rank {} MB of tensors at most, {} MB in the process\n\
             weights         {}",
            self.schedule,
            self.workers,
            stages.join("; "),
            self.samples_per_s,
            self.predicted_samples_per_s,
            100.0 * self.efficiency,
            100.0 * self.bubble_fraction,
            100.0 * self.communication_fraction,
            self.overhead_us,
            self.comparison.table(),
            list(&self.pool_peak_bytes),
            list(&self.rss_bytes),
            &self.weights_sha256[..16.min(self.weights_sha256.len())],
        )
    }
}
