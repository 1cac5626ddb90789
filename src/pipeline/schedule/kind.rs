//! The schedules by name.
use super::{
    LONGEST, Program, Programs, Shape, WeightPolicy, gpipe, one_f_one_b, pipedream, replicas::Place, sequential,
};
use crate::{Error, Result};
use std::{fmt, str::FromStr};

/// A schedule by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Model parallelism without pipelining: one micro-batch in flight.
    Sequential,
    /// All forward passes, then all backward passes.
    GPipe,
    /// One forward, one backward, with a flush before each update.
    OneFOneB,
    /// One forward, one backward, without flush, with stashed weights.
    PipeDream,
    /// PipeDream with one weight version a minibatch over all stages.
    PipeDreamVertical,
    /// PipeDream without stashing, which computes wrong gradients; for comparison only.
    PipeDreamNoStash,
}

impl Kind {
    /// Every schedule.
    pub const ALL: [Kind; 6] = [
        Kind::Sequential,
        Kind::GPipe,
        Kind::OneFOneB,
        Kind::PipeDream,
        Kind::PipeDreamVertical,
        Kind::PipeDreamNoStash,
    ];

    /// Its name on the command line and in files.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Sequential => "sequential",
            Kind::GPipe => "gpipe",
            Kind::OneFOneB => "1f1b",
            Kind::PipeDream => "pipedream",
            Kind::PipeDreamVertical => "pipedream-vertical",
            Kind::PipeDreamNoStash => "pipedream-nostash",
        }
    }

    /// What it is, in a line of help.
    pub fn about(self) -> &'static str {
        match self {
            Kind::Sequential => "one micro-batch in flight: model parallelism without pipelining",
            Kind::GPipe => "all forward passes, then all backward passes, then the update",
            Kind::OneFOneB => "one forward, one backward, flushed before the update: less memory than gpipe",
            Kind::PipeDream => "one forward, one backward, an update after each, without flush; weights stashed",
            Kind::PipeDreamVertical => "pipedream where all stages read one weight version for a minibatch",
            Kind::PipeDreamNoStash => "pipedream whose backward passes read the newest weights; for comparison only",
        }
    }

    /// Whether training equals that of one worker: the pipeline is empty at each update.
    pub fn is_synchronous(self) -> bool {
        match self {
            Kind::Sequential | Kind::GPipe | Kind::OneFOneB => true,
            Kind::PipeDream | Kind::PipeDreamVertical | Kind::PipeDreamNoStash => false,
        }
    }

    /// Whether its warm-up is that of the plan: others have none, or one that follows from the number of stages.
    pub fn has_warm_up(self) -> bool {
        match self {
            Kind::OneFOneB | Kind::PipeDream | Kind::PipeDreamNoStash => true,
            Kind::Sequential | Kind::GPipe | Kind::PipeDreamVertical => false,
        }
    }

    /// Whether its gradients are those of the weights that the forward pass read.
    pub fn weights(self) -> WeightPolicy {
        match self {
            Kind::PipeDreamNoStash => WeightPolicy::Current,
            _ => WeightPolicy::Stashed,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Kind {
    type Err = Error;

    fn from_str(name: &str) -> Result<Kind> {
        Kind::ALL.into_iter().find(|k| k.name() == name).ok_or_else(|| {
            let names = Kind::ALL.map(Kind::name).join(", ");
            Error::schedule(format!("no schedule is called {name:?}; there are {names}"))
        })
    }
}

/// The compute instructions of a schedule for the straight placement: stage r on worker r.
///
/// Synchronous kinds: one minibatch of `micro_batches`, then the update, as one period (raise `repeats` and `micro_batches` for
/// several). Asynchronous kinds: that many minibatches, each a micro-batch, from an empty pipeline to an empty pipeline.
pub fn make(kind: Kind, workers: usize, micro_batches: usize) -> Result<Programs> {
    check(workers, micro_batches, if kind.is_synchronous() { micro_batches } else { micro_batches.min(workers) })?;
    make_for(kind, &Shape::new(&vec![1; workers])?, micro_batches)
}

/// The same for replicated stages: the workers of stage 0, then those of stage 1, ….
///
/// # Errors
/// If there is no micro-batch, more instructions than can be written out, or the kind takes one worker a stage.
pub fn make_for(kind: Kind, shape: &Shape, micro_batches: usize) -> Result<Programs> {
    let warm_up = shape.warm_up().iter().copied().max().unwrap_or(0);
    // An asynchronous program repeats itself; its warm-up is written out.
    let passes = if kind.is_synchronous() { micro_batches } else { micro_batches.min(warm_up) };
    check(shape.workers(), micro_batches, passes)?;
    let stages = shape.replicas().len();
    if kind == Kind::PipeDreamVertical && shape.is_replicated() {
        return Err(Error::schedule(format!(
            "{kind} takes one worker a stage, got {:?}: stages that update at different times have no version in common",
            shape.replicas()
        )));
    }
    let minibatch =
        |period| Program { period, repeats: 1, shift: micro_batches, version_shift: 1, ..Program::default() };
    let worker = |place: Place| match kind {
        Kind::Sequential => minibatch(sequential::worker(place)),
        Kind::GPipe => minibatch(gpipe::worker(place)),
        Kind::OneFOneB => minibatch(one_f_one_b::worker(place)),
        Kind::PipeDream | Kind::PipeDreamNoStash => pipedream::worker(place),
        Kind::PipeDreamVertical => pipedream::vertical(place.stage, stages, micro_batches),
    };
    Ok(Programs {
        workers: shape.places(micro_batches).map(worker).collect(),
        weights: kind.weights(),
        micro_batches,
        step_every: if kind.is_synchronous() { micro_batches } else { 1 },
        each_replica: !kind.is_synchronous() && shape.is_replicated(),
    })
}

/// Forward passes only, for evaluation and prediction.
pub fn evaluate(workers: usize, micro_batches: usize) -> Result<Programs> {
    check(workers, micro_batches, 1)?;
    evaluate_for(&Shape::new(&vec![1; workers])?, micro_batches)
}

/// The same for replicated stages: the workers of stage 0, then those of stage 1, ….
///
/// # Errors
/// If there is no micro-batch.
pub fn evaluate_for(shape: &Shape, micro_batches: usize) -> Result<Programs> {
    check(shape.workers(), micro_batches, 1)?;
    let worker = |place: Place| Program {
        period: vec![place.forward(0)],
        repeats: place.count(),
        shift: place.replicas,
        ..Program::default()
    };
    Ok(Programs {
        workers: shape.places(micro_batches).map(worker).collect(),
        weights: WeightPolicy::Stashed,
        micro_batches,
        step_every: 0,
        each_replica: false,
    })
}

/// Makes sure that a schedule makes sense in which each worker's program has `passes` forward and as many backward passes
/// written out.
fn check(workers: usize, micro_batches: usize, passes: usize) -> Result<()> {
    match (workers, micro_batches) {
        (0, _) => Err(Error::schedule("a schedule needs at least one worker")),
        (_, 0) => Err(Error::schedule("a schedule needs at least one micro-batch")),
        _ if workers.saturating_mul(passes) > LONGEST / 2 => Err(Error::schedule(format!(
            "{micro_batches} micro-batches on {workers} workers: a schedule has at most {LONGEST} instructions"
        ))),
        _ => Ok(()),
    }
}
