//! Replicated stages (1F1B-RR, Narayanan et al., SOSP 2019, section 3.2): micro-batch j is worked on by replica j mod R of a stage
//! on R workers, forward and backward alike, and the R workers sum their gradients before each update.
use super::{Inst, MicroBatch, Read, program::lcm};
use crate::{Error, Result};

/// What a schedule is made for: how many workers each stage has, and how many forward passes each of them does before its first
/// backward pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    replicas: Vec<usize>,
    warm_up: Vec<usize>,
}

/// The most micro-batches after which the replicas of all stages are met in the same combination again.
const LONGEST_PERIOD: usize = 1 << 16;

impl Shape {
    /// Stages on so many workers each, with the published [warm-up](warm_up).
    ///
    /// # Errors
    /// If there is no stage, one has no worker, or their numbers have no common multiple of a reasonable size.
    pub fn new(replicas: &[usize]) -> Result<Shape> {
        Shape::warmed_up(replicas, warm_up(replicas))
    }

    /// The same with a warm-up of one's own, by stage.
    ///
    /// # Errors
    /// As for [`new`](Shape::new), or if there is not one warm-up a stage.
    pub fn warmed_up(replicas: &[usize], warm_up: Vec<usize>) -> Result<Shape> {
        if replicas.is_empty() {
            return Err(Error::schedule("a schedule needs at least one worker"));
        }
        if let Some(stage) = replicas.iter().position(|&n| n == 0) {
            return Err(Error::schedule(format!("stage {stage} has no worker")));
        }
        if warm_up.len() != replicas.len() {
            let (a, b) = (warm_up.len(), replicas.len());
            return Err(Error::schedule(format!("warm-ups of {a} stages for {b} stages")));
        }
        let shape = Shape { replicas: replicas.to_vec(), warm_up };
        let period = shape.period();
        if period > LONGEST_PERIOD {
            return Err(Error::schedule(format!(
                "stages on {replicas:?} workers: they meet again after {period} micro-batches, at most {LONGEST_PERIOD} expected"
            )));
        }
        Ok(shape)
    }

    /// The workers of each stage.
    pub fn replicas(&self) -> &[usize] {
        &self.replicas
    }

    /// Forward passes of each worker of a stage before its first backward pass, by stage.
    pub fn warm_up(&self) -> &[usize] {
        &self.warm_up
    }

    /// All workers.
    pub fn workers(&self) -> usize {
        self.replicas.iter().fold(0, |n, &r| n.saturating_add(r))
    }

    /// Whether any stage has several workers.
    pub fn is_replicated(&self) -> bool {
        self.replicas.iter().any(|&n| n > 1)
    }

    /// Micro-batches after which the same replicas work together again.
    pub fn period(&self) -> usize {
        self.replicas.iter().fold(1, |n, &r| lcm(n, r))
    }

    /// The workers with the micro-batches that they work on, of `micro_batches` in all: those of stage 0, of stage 1, ….
    pub(super) fn places(&self, micro_batches: usize) -> impl Iterator<Item = Place> + '_ {
        let stages = self.replicas.iter().zip(&self.warm_up).enumerate();
        stages.flat_map(move |(stage, (&replicas, &warm_up))| {
            (0..replicas).map(move |replica| Place { stage, replica, replicas, warm_up, micro_batches })
        })
    }
}

/// Which of the workers of a stage works on micro-batch `mb`: they take turns. `None` if there is no worker.
pub fn whose_turn(workers: &[usize], mb: MicroBatch) -> Option<usize> {
    workers.get(mb.checked_rem(workers.len())?).copied()
}

/// Which of the workers of a stage `worker` is: replica k of R, as (k, R).
pub fn place_in(workers: &[usize], worker: usize) -> Option<(usize, usize)> {
    Some((workers.iter().position(|&w| w == worker)?, workers.len()))
}

/// PipeDream's warm-up, by stage: ⌊(Σ workers from this stage on − 1) / workers of this stage⌋. With one worker a stage that is
/// p − 1 − r.
pub fn warm_up(replicas: &[usize]) -> Vec<usize> {
    let mut from = 0usize;
    let backwards = replicas.iter().rev().map(|&n| {
        from = from.saturating_add(n);
        from.saturating_sub(1).checked_div(n).unwrap_or(0)
    });
    let mut warm_up: Vec<usize> = backwards.collect();
    warm_up.reverse();
    warm_up
}

/// Replica `replica` of the `replicas` of a stage. Its micro-batches are counted from 0: its i-th is `replica + i·replicas`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) stage: usize,
    replica: usize,
    pub(super) replicas: usize,
    warm_up: usize,
    micro_batches: usize,
}

impl Place {
    /// How many of the micro-batches are its own.
    pub(super) fn count(&self) -> usize {
        self.micro_batches.saturating_sub(self.replica).div_ceil(self.replicas)
    }

    /// How many rounds of micro-batches there are, the last of which it may have no part in.
    pub(super) fn rounds(&self) -> usize {
        self.micro_batches.div_ceil(self.replicas)
    }

    /// Its forward passes before the first backward pass.
    pub(super) fn warm_up(&self) -> usize {
        self.count().min(self.warm_up)
    }

    /// Its i-th micro-batch.
    pub(super) fn mb(&self, i: usize) -> MicroBatch {
        self.replica + i * self.replicas
    }

    /// F of its i-th micro-batch with the newest weights.
    pub(super) fn forward(&self, i: usize) -> Inst {
        Inst::F { stage: self.stage, mb: self.mb(i), read: Read::Current }
    }

    /// B of its i-th micro-batch.
    pub(super) fn backward(&self, i: usize) -> Inst {
        Inst::B { stage: self.stage, mb: self.mb(i) }
    }

    /// The update with gradients of micro-batches up to `last`.
    pub(super) fn update(&self, last: MicroBatch) -> impl Iterator<Item = Inst> + use<> {
        let stage = self.stage;
        let reduce = (self.replicas > 1).then_some(Inst::Reduce { stage, mb: last });
        reduce.into_iter().chain([Inst::Step { stage, keep: false }])
    }

    /// The update of round i.
    pub(super) fn update_of_round(&self, i: usize) -> impl Iterator<Item = Inst> + use<> {
        self.update(i * self.replicas + self.replicas - 1)
    }

    /// The update of a minibatch that ends with the last micro-batch.
    pub(super) fn update_at_end(&self) -> impl Iterator<Item = Inst> + use<> {
        self.update(self.micro_batches.saturating_sub(1))
    }
}
