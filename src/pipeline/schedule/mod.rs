//! Schedules: which worker does what, in which order, as instruction programs.
//!
//! p workers (r = 0…p−1), m micro-batches. A schedule is made as compute instructions (`F B I W Reduce Step Free`) by
//! [`make`](fn@make), [`lower`](fn@lower) adds the communication, [`verify`](fn@verify) proves the result safe,
//! [`simulate`](fn@simulate) predicts its time. Nothing runs unverified.
//!
//! A new schedule is one file that makes its programs, and one variant of [`Kind`].
mod gpipe;
mod kind;
pub mod lower;
mod one_f_one_b;
mod pipedream;
mod prepare;
mod program;
mod replicas;
mod sequential;
pub mod simulate;
mod text;
mod token;
pub mod verify;

pub use kind::{Kind, evaluate, evaluate_for, make, make_for};
pub use lower::lower;
pub use prepare::{prepare, prove};
pub use program::Stream;
pub use replicas::{Shape, place_in, warm_up, whose_turn};
pub use simulate::simulate;
pub use token::Unexpected;
pub use verify::verify;

/// A micro-batch, numbered from 0 since the pipeline was last empty.
pub type MicroBatch = usize;
/// How many updates a stage's weights have seen since the pipeline was last empty.
pub type Version = usize;

/// The most instructions of a worker that are written out, or gone through before a state repeats. A program with more has a
/// mistake in its period, and to find out would take minutes and gigabytes.
const LONGEST: usize = 1 << 22;

/// More micro-batches than any run has: the end of a stream that is not known yet.
pub const ENDLESS: usize = 1 << 40;

/// What crosses an edge: the value itself, or the gradient on its way back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Direction {
    /// The value, from the stage that makes it to one that reads it.
    Forward,
    /// The gradient, from the reader to the maker.
    Backward,
}

/// One message: what crosses an edge for one micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Message {
    /// The edge, by its position in [`Wiring::edges`].
    pub edge: usize,
    /// The micro-batch it belongs to.
    pub mb: MicroBatch,
    /// Value or gradient.
    pub direction: Direction,
}

/// The weights that a forward pass reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Read {
    /// The newest version.
    Current,
    /// This version, which a `Step` kept.
    At(Version),
}

/// One instruction of a worker. Stages are numbered over the whole pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Inst {
    /// Forward pass of a stage.
    F {
        /// The stage.
        stage: usize,
        /// The micro-batch.
        mb: MicroBatch,
        /// The weights it reads.
        read: Read,
    },
    /// Backward pass: gradients of the inputs and of the weights.
    B {
        /// The stage.
        stage: usize,
        /// The micro-batch.
        mb: MicroBatch,
    },
    /// Input gradient only; `W` follows later.
    I {
        /// The stage.
        stage: usize,
        /// The micro-batch.
        mb: MicroBatch,
    },
    /// Weight gradient only, after `I`.
    W {
        /// The stage.
        stage: usize,
        /// The micro-batch.
        mb: MicroBatch,
    },
    /// Sums the gradients of a stage over its workers, when all of them have come here.
    Reduce {
        /// The stage, on several workers.
        stage: usize,
        /// The last micro-batch that the next update folds; of a round that the end of a run cuts short, the last that it would
        /// have folded.
        mb: MicroBatch,
    },
    /// The optimizer's update with the gradients folded since the last one.
    Step {
        /// The stage.
        stage: usize,
        /// Whether the old version stays readable (`Read::At`) until it is freed.
        keep: bool,
    },
    /// Drops a version that a `Step` kept.
    Free {
        /// The stage.
        stage: usize,
        /// The version.
        version: Version,
    },
    /// Makes a buffer ready for a message and starts receiving.
    Post(Message),
    /// Waits until a posted message is here.
    Recv(Message),
    /// Starts sending; the worker goes on.
    Send(Message),
    /// Waits until a send is done and its buffer free.
    Wait(Message),
}

/// What a worker does from an empty pipeline to an empty pipeline: `prologue`, then `period` as often as `repeats` says, each
/// time with micro-batches `shift` and versions `version_shift` higher, then `epilogue`, shifted by all of the repeats.
/// The numbers that stand in `period` are those of its first repeat; [`Program::iter`] gives them as they run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Program {
    /// Done once, first.
    pub prologue: Vec<Inst>,
    /// Done `repeats` times.
    pub period: Vec<Inst>,
    /// How often `period` is done.
    pub repeats: usize,
    /// Micro-batches from one repeat to the next.
    pub shift: usize,
    /// Versions from one repeat to the next.
    pub version_shift: usize,
    /// Done once, last.
    pub epilogue: Vec<Inst>,
}

/// Which weights a backward pass uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightPolicy {
    /// Those that the forward pass of the same micro-batch read.
    #[default]
    Stashed,
    /// The newest: wrong gradients, for comparison only.
    Current,
}

/// The programs of all workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Programs {
    /// One program a worker.
    pub workers: Vec<Program>,
    /// Which weights B reads.
    pub weights: WeightPolicy,
    /// Micro-batches in all.
    pub micro_batches: usize,
    /// Micro-batches whose gradients one update folds: m if synchronous, 1 for PipeDream, 0 for a forward-only program.
    pub step_every: usize,
    /// Whether that is what each replica of a stage adds, so that an update of a stage on R workers folds R times as many (a
    /// round): PipeDream's 1F1B-RR.
    pub each_replica: bool,
}

/// What a schedule needs to know of a plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wiring {
    /// The workers that hold each stage: micro-batch j is worked on by the one at j mod R of a stage on R workers.
    pub stages: Vec<Vec<usize>>,
    /// The tensors that cross from stage to stage.
    pub edges: Vec<Link>,
}

/// An edge as a schedule sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// The stage that makes the value.
    pub from: usize,
    /// A later stage that reads it.
    pub to: usize,
    /// Whether a gradient comes back.
    pub grad: bool,
}
