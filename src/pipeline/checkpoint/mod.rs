//! Checkpoints: the tensors of every stage under global names, and where the run stood.
//!
//! ```text
//! checkpoints/
//!   step-000120/              complete: it has a COMMIT
//!     stage-0.safetensors     conv2d1.weight, conv2d1.weight/momentum, batch_norm1/running_mean, …
//!     stage-1.safetensors
//!     position.json           where the run stood
//!     COMMIT                  the other files, with lengths and SHA-256
//!   step-000180.tmp/          being written, or left by a crash
//! ```
//! Names do not depend on the partition, so any number of ranks can go on from what any other number wrote.
//!
//! Writing: [`begin`] on one rank, a barrier, [`write_stage`] for every stage, a barrier, [`commit`] on the first rank. Each file
//! is on the disk before the folder gets its name, and the folder before `COMMIT` does; whatever instant a crash comes at, the
//! newest complete checkpoint is whole. Reading: [`latest`] or [`open`].
mod disk;
mod read;
mod stage;
mod write;

pub use read::{Checkpoint, Latest, any, is_one, latest, open};
pub use stage::{load_stage, stage_tensors};
pub use write::{begin, commit, write_stage};

use crate::tensor::DType;
use safetensors::Dtype;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Where a run stood, and which run it was.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Position {
    /// Minibatches done since training began: the number of the next one.
    pub minibatch: u64,
    /// Epochs done.
    pub epoch: u64,
    /// Samples seen since training began.
    pub samples: u64,
    /// The seed of the run.
    pub seed: u64,
    /// What of the configuration a resumed run must have in common, in words or as a hash.
    pub config: String,
    /// The plan that ran, as a plan file.
    pub plan: String,
    /// What the training loop wants to find again, such as the results of earlier epochs.
    #[serde(default)]
    pub history: serde_json::Value,
}

/// A file of a checkpoint as `COMMIT` lists it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Written {
    /// Its name in the checkpoint's folder.
    pub name: String,
    /// Its length in bytes.
    pub bytes: u64,
    /// SHA-256 of its contents, in hexadecimal digits.
    pub sha256: String,
}

/// The contents of `COMMIT`.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Commit {
    format: u32,
    files: Vec<Written>,
}

/// The form of checkpoints that this version writes, and the only one that it reads.
const FORMAT: u32 = 1;
const COMMIT: &str = "COMMIT";
const POSITION: &str = "position.json";
/// The key of a stage file's metadata that says how many updates its weights have seen.
const UPDATES: &str = "updates";

/// The folder of the checkpoint after minibatch `step`.
fn folder(root: &Path, step: u64) -> PathBuf {
    root.join(format!("step-{step:06}"))
}

/// Where the checkpoint after minibatch `step` is written.
fn aside(root: &Path, step: u64) -> PathBuf {
    root.join(format!("step-{step:06}.tmp"))
}

/// What a checkpoint of the same step is called while another takes its place.
fn replaced(root: &Path, step: u64) -> PathBuf {
    root.join(format!("step-{step:06}.old"))
}

/// What a folder of checkpoints holds under one name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Role {
    /// Being written, or left by a crash.
    Aside,
    /// A checkpoint that another of the same step replaces.
    Replaced,
    /// A checkpoint, complete if it has a `COMMIT`.
    Final,
}

/// The step and role that the name of a folder stands for; nothing for what is no checkpoint.
fn parse_name(name: &str) -> Option<(u64, Role)> {
    let rest = name.strip_prefix("step-")?;
    let (digits, role) = match (rest.strip_suffix(".tmp"), rest.strip_suffix(".old")) {
        (Some(digits), _) => (digits, Role::Aside),
        (_, Some(digits)) => (digits, Role::Replaced),
        _ => (rest, Role::Final),
    };
    let step = digits.parse().ok()?;
    // As we write it: a folder of someone else is never read, and never removed.
    (format!("{step:06}") == digits).then_some((step, role))
}

/// The name of an element type in safetensors files.
fn file_type(dtype: DType) -> Dtype {
    match dtype {
        DType::F64 => Dtype::F64,
        DType::F32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::I64 => Dtype::I64,
        DType::I32 => Dtype::I32,
        DType::U8 => Dtype::U8,
    }
}

#[cfg(test)]
mod tests;
