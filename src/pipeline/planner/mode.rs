//! How a plan is run.
use crate::pipeline::schedule::Kind;
use std::fmt;

/// A schedule, and into how many micro-batches it cuts a minibatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mode {
    /// The schedule.
    pub schedule: Kind,
    /// Micro-batches that share an update: 1 of an asynchronous schedule.
    pub micro_batches: usize,
}

impl Mode {
    /// Asynchronous 1F1B.
    pub const PIPEDREAM: Mode = Mode { schedule: Kind::PipeDream, micro_batches: 1 };

    /// Whether it takes one worker a stage only.
    pub(super) fn is_straight(&self) -> bool {
        self.schedule == Kind::PipeDreamVertical
    }

    /// The most micro-batches between F and B on each of `replicas` workers of a stage that begins with `warm_up` forward passes.
    pub(super) fn in_flight(&self, warm_up: usize, replicas: usize) -> usize {
        let all = self.micro_batches.div_ceil(replicas);
        match self.schedule {
            Kind::Sequential => 1,
            Kind::GPipe => all,
            Kind::OneFOneB => (warm_up + 1).min(all),
            Kind::PipeDream | Kind::PipeDreamVertical | Kind::PipeDreamNoStash => warm_up + 1,
        }
    }

    /// The most weight versions that each of its workers holds.
    pub(super) fn versions(&self, warm_up: usize) -> usize {
        match self.schedule {
            Kind::PipeDream | Kind::PipeDreamVertical => warm_up + 1,
            Kind::Sequential | Kind::GPipe | Kind::OneFOneB | Kind::PipeDreamNoStash => 1,
        }
    }

    /// The most updates between the weights that a gradient is made with and those that it changes.
    pub(super) fn staleness(&self, warm_up: usize) -> usize {
        if self.schedule.is_synchronous() { 0 } else { warm_up }
    }

    /// Seconds of a micro-batch, on average over a minibatch, of a stage whose passes take these on the slowest of its `replicas`, and
    /// the sum of whose gradients takes `sync`.
    pub(super) fn seconds(&self, [forward, backward]: [f64; 2], sync: f64, replicas: usize) -> f64 {
        if !self.schedule.is_synchronous() {
            return (forward + backward.max(sync)) / replicas as f64;
        }
        // The last backward pass of a minibatch hides a sum; the replica that has most micro-batches sets the pace.
        let most = self.micro_batches.div_ceil(replicas) as f64;
        (most * (forward + backward) + (sync - backward).max(0.0)) / self.micro_batches as f64
    }
}

impl fmt::Display for Mode {
    /// Such as `1f1b of 8 micro-batches`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.schedule.is_synchronous() {
            true => write!(f, "{} of {} micro-batches", self.schedule, self.micro_batches),
            false => write!(f, "{}", self.schedule),
        }
    }
}
