//! The folder of a run, and when its state is saved there.
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::{fmt, path::PathBuf, str::FromStr};

/// When checkpoints are written, besides when a run is told to stop. Nothing is in flight while one is written, so where they
/// stand is part of the definition of a run with an asynchronous schedule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Text", into = "String")]
pub enum Every {
    /// At the end of every epoch, and of the run.
    #[default]
    Epoch,
    /// After so many minibatches, and at the end of the run.
    Minibatches(u64),
    /// Never.
    Never,
}

/// What [`Every`] may be written as.
const EXPECTED: &str = "epoch, never or a number of minibatches";

/// How it may be written in a file.
#[derive(Deserialize)]
#[serde(untagged)]
enum Text {
    Number(i64),
    Word(String),
    Other(serde::de::IgnoredAny),
}

impl TryFrom<Text> for Every {
    type Error = Error;

    fn try_from(text: Text) -> Result<Every> {
        match text {
            Text::Number(n) => n.to_string().parse(),
            Text::Word(word) => word.parse(),
            Text::Other(_) => Err(Error::config(format!("checkpoints: {EXPECTED} expected, got something else"))),
        }
    }
}

impl From<Every> for String {
    fn from(every: Every) -> String {
        every.to_string()
    }
}

impl FromStr for Every {
    type Err = Error;

    fn from_str(text: &str) -> Result<Every> {
        match (text, text.parse()) {
            ("epoch", _) => Ok(Every::Epoch),
            ("never", _) => Ok(Every::Never),
            (_, Ok(n)) if n > 0 => Ok(Every::Minibatches(n)),
            _ => Err(Error::config(format!("checkpoints: {EXPECTED} expected, got {text:?}"))),
        }
    }
}

impl fmt::Display for Every {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Every::Epoch => f.write_str("epoch"),
            Every::Minibatches(n) => write!(f, "{n}"),
            Every::Never => f.write_str("never"),
        }
    }
}

/// The file in the folder of a run that says with what settings it was started.
pub const CONFIG: &str = "config.toml";

/// Where a run writes, and what it goes on from.
#[derive(Clone, Debug)]
pub struct Files {
    /// The folder of the run. Without it nothing is written.
    pub out: Option<PathBuf>,
    /// What it goes on from: the folder of a run, or one of its checkpoints.
    pub resume: Option<PathBuf>,
    /// When checkpoints are written.
    pub every: Every,
    /// Whether it may compute with other instructions than what it goes on from, if it must: for what trains nothing.
    pub any_instructions: bool,
    /// How many of them stay.
    pub keep: usize,
    /// The settings that it was started with, for the file [`CONFIG`] in the folder.
    pub config: Option<String>,
}

impl Default for Files {
    fn default() -> Files {
        Files { out: None, resume: None, any_instructions: false, every: Every::Epoch, keep: 2, config: None }
    }
}

impl Files {
    /// Where the checkpoints are.
    pub fn checkpoints(&self) -> Option<PathBuf> {
        Some(self.out.as_ref()?.join("checkpoints"))
    }

    /// Where the weights that were best so far are.
    pub fn best(&self) -> Option<PathBuf> {
        Some(self.out.as_ref()?.join("best"))
    }
}
