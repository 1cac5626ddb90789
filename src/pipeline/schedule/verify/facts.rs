//! What a proof found out.
use crate::pipeline::schedule::{MicroBatch, Version};

/// What is true of programs that were proven.
#[derive(Clone, Debug)]
pub struct Facts {
    /// By worker.
    pub workers: Vec<WorkerFacts>,
    /// By stage and worker.
    pub stages: Vec<StageFacts>,
}

/// What a worker holds at most at any one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerFacts {
    /// Micro-batches (counted once for each stage) between F and B, or W where the backward pass is split.
    pub peak_activations: usize,
    /// Micro-batches between I and W.
    pub peak_pending_weights: usize,
    /// Messages between `Post` and the pass that uses them.
    pub peak_receives: usize,
    /// Messages between `Send` and `Wait`.
    pub peak_sends: usize,
}

/// The weights of a stage on one of its workers.
#[derive(Clone, Debug)]
pub struct StageFacts {
    /// The stage.
    pub stage: usize,
    /// The worker that holds it.
    pub worker: usize,
    /// The most versions held at once: those that micro-batches in flight will need, kept ones and the newest.
    pub weight_versions: usize,
    /// The most updates between the version that a gradient was made with and the one that it updated.
    pub staleness: usize,
    /// The version that each pass reads.
    pub reads: Reads,
}

/// The versions that the passes of one micro-batch read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reading {
    /// The micro-batch.
    pub mb: MicroBatch,
    /// Read by F.
    pub forward: Version,
    /// Read by B or I; `None` in a forward-only program.
    pub backward: Option<Version>,
}

/// The versions that the passes of a stage read. Repeats that the proof skipped are worked out when they are asked for.
#[derive(Clone, Debug, Default)]
pub struct Reads {
    seen: Vec<Reading>,
    skip: Option<Skip>,
}

/// Repeats of a cycle that were not gone through.
#[derive(Clone, Copy, Debug)]
struct Skip {
    /// Where in `seen` the last cycle before them begins and ends.
    first: usize,
    end: usize,
    times: usize,
    mbs: usize,
    versions: usize,
}

impl Reads {
    /// What the passes of micro-batch `mb` read; `None` if there is no such micro-batch here.
    pub fn get(&self, mb: MicroBatch) -> Option<Reading> {
        if let Some(reading) = self.seen.iter().find(|r| r.mb == mb) {
            return Some(*reading);
        }
        let skip = self.skip?;
        self.seen.get(skip.first..skip.end)?.iter().find_map(|r| {
            let past = mb.checked_sub(r.mb)?;
            let times = past.checked_div(skip.mbs).filter(|&n| n * skip.mbs == past && n <= skip.times)?;
            let later = |v: Version| v + times * skip.versions;
            Some(Reading { mb, forward: later(r.forward), backward: r.backward.map(later) })
        })
    }

    /// Those that were gone through one by one, in the order in which their gradients were complete: all, unless the programs
    /// are so long that repeats were skipped.
    pub fn seen(&self) -> &[Reading] {
        &self.seen
    }

    pub(super) fn record(&mut self, reading: Reading) {
        self.seen.push(reading);
    }

    /// What follows `first` repeats `times` times more, each time with higher numbers.
    pub(super) fn skip(&mut self, first: usize, times: usize, mbs: usize, versions: usize) {
        self.skip = Some(Skip { first, end: self.seen.len(), times, mbs, versions });
    }
}
