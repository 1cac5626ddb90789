//! The workers there are, and the links between them; as a file:
//!
//! ```toml
//! # innermost level first: two servers of two workers
//! [[level]]
//! count = 2
//! bandwidth = 10e9   # bytes per second, per direction
//! [[level]]
//! count = 2
//! bandwidth = 1.25e9
//! latency = 50e-6    # seconds; 0 if left out
//!
//! # every worker, unless all are alike
//! [[worker]]
//! speed = 2.0        # times as fast as the one that was profiled; 1 if left out
//! memory = 16e9      # bytes; no limit if left out
//! [[worker]]
//! [[worker]]
//! [[worker]]
//! ```
use crate::{Context, Error, Result};
use serde::Deserialize;
use std::path::Path;

/// A link between two workers.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Link {
    /// Seconds before the first byte arrives.
    pub latency: f64,
    /// Bytes per second, per direction.
    pub bandwidth: f64,
}

impl Link {
    /// No delay at all.
    pub const FREE: Link = Link { latency: 0.0, bandwidth: f64::INFINITY };

    /// What messages over both meet: the longer latency and the lower bandwidth.
    pub fn and(self, other: Link) -> Link {
        Link { latency: self.latency.max(other.latency), bandwidth: self.bandwidth.min(other.bandwidth) }
    }

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

/// What sets workers apart.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Worker {
    /// How many times as fast it is as the worker that was profiled.
    pub speed: f64,
    /// Bytes that it holds.
    pub memory: f64,
}

impl Default for Worker {
    fn default() -> Worker {
        Worker { speed: 1.0, memory: f64::INFINITY }
    }
}

/// Workers in groups of equal size, such as servers, in groups of these, and so on.
///
/// Worker w is the w-th of all in the order of the groups: with levels of 4 and 2, workers 0 to 3 share a server.
#[derive(Clone, Debug, PartialEq)]
pub struct Topology {
    levels: Vec<Level>,
    workers: Vec<Worker>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    level: Vec<FileLevel>,
    #[serde(default)]
    worker: Vec<Worker>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileLevel {
    count: usize,
    bandwidth: f64,
    #[serde(default)]
    latency: f64,
}

/// More workers than anyone plans for.
const MOST_WORKERS: usize = 128;
/// Less than any worker's part of the speed of another.
const SLOWEST: f64 = 1e-6;

impl Topology {
    /// Equal workers in groups, the innermost level first.
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
        Ok(Topology { levels, workers: vec![Worker::default(); workers] })
    }

    /// The same groups of other workers.
    ///
    /// # Errors
    /// If they are not as many, or one has no speed or memory.
    pub fn with_workers(self, workers: Vec<Worker>) -> Result<Topology> {
        if workers.len() != self.workers() {
            let (got, want) = (workers.len(), self.workers());
            return Err(Error::plan(format!("{got} workers described, where the levels have {want}")));
        }
        for (w, worker) in workers.iter().enumerate() {
            let Worker { speed, memory } = worker;
            if !(SLOWEST..=1.0 / SLOWEST).contains(speed) || memory.is_nan() || *memory <= 0.0 {
                return Err(Error::plan(format!(
                    "worker {w} has a speed of {speed} and {memory} bytes; {SLOWEST:e} to {:e} and more than 0 expected",
                    1.0 / SLOWEST
                )));
            }
        }
        Ok(Topology { workers, ..self })
    }

    /// Reads a file of the form above.
    ///
    /// # Errors
    /// If it is not of that form (with line and column), or the topology cannot be.
    pub fn from_text(text: &str) -> Result<Topology> {
        let file: File = toml::from_str(text).map_err(|e| Error::plan(format!("not a topology: {e}")))?;
        let level = |l: FileLevel| {
            let FileLevel { count, bandwidth, latency } = l;
            Level { count, link: Link { latency, bandwidth } }
        };
        let alike = Topology::new(file.level.into_iter().map(level).collect())?;
        if file.worker.is_empty() { Ok(alike) } else { alike.with_workers(file.worker) }
    }

    /// The topology as [`from_text`](Topology::from_text) reads it.
    pub fn to_text(&self) -> String {
        let mut text =
            String::from("# Levels of links, the innermost first: bytes per second per direction, and seconds.\n");
        for Level { count, link: Link { latency, bandwidth } } in &self.levels {
            text += &format!("\n[[level]]\ncount = {count}\nbandwidth = {bandwidth:e}\nlatency = {latency:e}\n");
        }
        for Worker { speed, memory } in self.workers.iter().filter(|_| !self.is_even()) {
            let memory = if memory.is_finite() { format!("memory = {memory:e}\n") } else { String::new() };
            text += &format!("\n[[worker]]\nspeed = {speed:e}\n{memory}");
        }
        text
    }

    /// Reads a topology from a file.
    ///
    /// # Errors
    /// If it cannot be read, or as [`from_text`](Topology::from_text) says, with the file's name.
    pub fn load(path: &Path) -> Result<Topology> {
        Topology::from_text(&Error::read_text(path)?).context(|| path.display().to_string())
    }

    /// What sets a worker apart.
    pub fn worker(&self, w: usize) -> Worker {
        self.workers[w]
    }

    /// Whether no worker is faster or holds more than another.
    pub fn is_even(&self) -> bool {
        self.workers.iter().all(|w| *w == self.workers[0])
    }

    /// The levels, innermost first.
    pub fn levels(&self) -> &[Level] {
        &self.levels
    }

    /// The number of workers.
    pub fn workers(&self) -> usize {
        self.workers.len()
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
        self.levels[..=level].iter().fold(Link::FREE, |link, level| link.and(level.link))
    }
}
