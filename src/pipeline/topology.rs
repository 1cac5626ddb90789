//! The workers there are, and the links between them.
use crate::{Error, Result};

/// A link between two workers.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Link {
    /// Seconds before the first byte arrives.
    pub latency: f64,
    /// Bytes per second, per direction.
    pub bandwidth: f64,
}

impl Link {
    /// Seconds that a message of `bytes` takes.
    pub fn seconds(&self, bytes: usize) -> f64 {
        self.latency + bytes as f64 / self.bandwidth
    }

    /// # Errors
    /// If messages would take no time that can be.
    pub(super) fn check(&self) -> Result<()> {
        let &Link { latency, bandwidth } = self;
        if !(bandwidth > 0.0 && latency.is_finite() && latency >= 0.0) {
            return Err(Error::plan(format!(
                "a link of {bandwidth} bytes/s and a latency of {latency} s cannot be; more than 0 bytes/s and 0 s or more expected"
            )));
        }
        Ok(())
    }
}

/// One level of a [`Topology`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Level {
    /// How many groups of the level below, or workers at the innermost level, it joins.
    pub count: usize,
    /// What joins each of them to the others.
    pub link: Link,
}

/// Equal workers in groups of equal size, such as servers, in groups of these, and so on.
///
/// Worker w is the w-th of all in the order of the groups: with levels of 4 and 2, workers 0 to 3 share a server.
#[derive(Clone, Debug, PartialEq)]
pub struct Topology {
    levels: Vec<Level>,
}

/// More workers than anyone plans for.
const MOST_WORKERS: usize = 128;

impl Topology {
    /// Workers in groups, the innermost level first.
    ///
    /// # Errors
    /// If there is no level, one joins nothing, there are more workers than are planned for, or a link cannot be.
    pub fn new(levels: Vec<Level>) -> Result<Topology> {
        if levels.is_empty() {
            return Err(Error::plan("no workers; numbers of them expected, innermost level first, as 4,4"));
        }
        let mut workers = 1usize;
        for (at, level) in levels.iter().enumerate() {
            workers = workers.saturating_mul(level.count);
            if !(1..=MOST_WORKERS).contains(&workers) {
                let counts: Vec<String> = levels.iter().map(|l| l.count.to_string()).collect();
                return Err(Error::plan(format!(
                    "{} workers: 1 to {MOST_WORKERS} in all expected, and 1 or more at each level",
                    counts.join(",")
                )));
            }
            level.link.check().map_err(|e| e.context(format!("level {at}")))?;
        }
        Ok(Topology { levels })
    }

    /// The levels, innermost first.
    pub fn levels(&self) -> &[Level] {
        &self.levels
    }

    /// The number of workers.
    pub fn workers(&self) -> usize {
        self.group(self.levels.len())
    }

    /// Workers of a group of the levels below `level`: 1 at level 0.
    pub fn group(&self, level: usize) -> usize {
        self.levels[..level].iter().map(|l| l.count).product()
    }

    /// The level whose links part two workers: none of a worker and itself.
    pub fn between(&self, a: usize, b: usize) -> Option<usize> {
        (0..self.levels.len()).rev().find(|&l| a / self.group(l) != b / self.group(l))
    }

    /// The slowest link that messages between workers parted by `level` pass: the least bandwidth and the most latency of the
    /// levels up to it.
    pub fn slowest(&self, level: usize) -> Link {
        let worse = |a: Link, b: &Level| Link {
            latency: a.latency.max(b.link.latency),
            bandwidth: a.bandwidth.min(b.link.bandwidth),
        };
        self.levels[..=level].iter().fold(Link { latency: 0.0, bandwidth: f64::INFINITY }, worse)
    }
}
