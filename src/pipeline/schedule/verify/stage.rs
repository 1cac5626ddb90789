//! What is known of a stage while its worker's program is gone through.
use super::{
    facts::{Reading, Reads},
    fault::{Broken, Rule},
};
use crate::pipeline::schedule::{MicroBatch, Read, Version, WeightPolicy};
use std::collections::{BTreeMap, BTreeSet};

/// A set of micro-batches that fills up from 0: small, however many there are.
#[derive(Clone, Debug, Default)]
pub(super) struct Filled {
    /// All below are in it.
    next: MicroBatch,
    /// Those above `next` that are in it.
    above: BTreeSet<MicroBatch>,
}

impl Filled {
    /// Adds one; false if it was in it.
    fn insert(&mut self, mb: MicroBatch) -> bool {
        if mb < self.next || !self.above.insert(mb) {
            return false;
        }
        while self.above.remove(&self.next) {
            self.next += 1;
        }
        true
    }

    pub(super) fn contains(&self, mb: MicroBatch) -> bool {
        mb < self.next || self.above.contains(&mb)
    }

    /// The lowest that is missing, if any of the first `count` is.
    fn missing(&self, count: usize) -> Option<MicroBatch> {
        (self.next < count).then_some(self.next)
    }

    fn relative(&self, mbs: usize, out: &mut Vec<isize>) {
        out.extend([difference(self.next, mbs), self.above.len() as isize]);
        out.extend(self.above.iter().map(|&mb| difference(mb, mbs)));
    }

    fn advance(&mut self, mbs: usize) {
        self.next += mbs;
        self.above = self.above.iter().map(|mb| mb + mbs).collect();
    }
}

/// `n` as it is seen from `base`.
pub(super) fn difference(n: usize, base: usize) -> isize {
    n as isize - base as isize
}

/// A micro-batch whose activations are held.
#[derive(Clone, Copy, Debug)]
struct Flight {
    /// The version that F read.
    read: Version,
    /// The version that B or I read, once it is done.
    backward: Option<Version>,
}

/// The rules of the whole run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    pub(super) micro_batches: usize,
    pub(super) step_every: usize,
    pub(super) weights: WeightPolicy,
}

impl Terms {
    pub(super) fn forward_only(&self) -> bool {
        self.step_every == 0
    }
}

/// A stage between two instructions of its worker.
#[derive(Debug)]
pub(super) struct StageState {
    terms: Terms,
    pub(super) forward: Filled,
    /// B or I done.
    pub(super) backward: Filled,
    flights: BTreeMap<MicroBatch, Flight>,
    /// Micro-batches whose gradients wait for the next update.
    folded: usize,
    /// Updates so far, and so the newest version.
    steps: Version,
    /// Versions that steps kept.
    kept: BTreeSet<Version>,
    /// How many things hold each version: flights, the kept ones, the newest.
    held: BTreeMap<Version, usize>,
    /// The oldest version that a folded gradient was made with.
    oldest: Option<Version>,
    pub(super) most_versions: usize,
    pub(super) staleness: usize,
    pub(super) reads: Reads,
}

impl StageState {
    pub(super) fn new(terms: Terms) -> StageState {
        StageState {
            terms,
            forward: Filled::default(),
            backward: Filled::default(),
            flights: BTreeMap::new(),
            folded: 0,
            steps: 0,
            kept: BTreeSet::new(),
            held: BTreeMap::from([(0, 1)]),
            oldest: None,
            most_versions: 1,
            staleness: 0,
            reads: Reads::default(),
        }
    }

    /// F, once what it needs is known to be here.
    pub(super) fn do_forward(&mut self, mb: MicroBatch, read: Read) -> Result<(), Broken> {
        if mb >= self.terms.micro_batches {
            return Err(Broken::new(Rule::Once, format!("there are only {} micro-batches", self.terms.micro_batches)));
        }
        if !self.forward.insert(mb) {
            return Err(Broken::new(Rule::Once, "this F was done before"));
        }
        let version = match read {
            Read::Current => self.steps,
            Read::At(v) if v == self.steps || self.kept.contains(&v) => v,
            Read::At(v) => {
                let held: Vec<Version> = self.kept.iter().copied().chain([self.steps]).collect();
                return Err(Broken::new(Rule::Version, format!("version {v} is not held; those held are {held:?}")));
            }
        };
        if self.terms.forward_only() {
            self.reads.record(Reading { mb, forward: version, backward: None });
            return Ok(());
        }
        self.flights.insert(mb, Flight { read: version, backward: None });
        if self.terms.weights == WeightPolicy::Stashed {
            self.hold(version);
        }
        Ok(())
    }

    /// B or I. What it needs from other stages is checked next, and then [`fold`](StageState::fold) ends B.
    pub(super) fn do_backward(&mut self, mb: MicroBatch) -> Result<(), Broken> {
        self.needs_gradients()?;
        if self.backward.contains(mb) {
            return Err(Broken::new(Rule::Once, "a backward pass (B or I) of it was done before"));
        }
        let Some(flight) = self.flights.get_mut(&mb) else {
            return Err(Broken::new(Rule::Order, "its F was not done before"));
        };
        flight.backward = Some(match self.terms.weights {
            WeightPolicy::Stashed => flight.read,
            WeightPolicy::Current => self.steps,
        });
        self.backward.insert(mb);
        Ok(())
    }

    /// W.
    pub(super) fn do_weight(&mut self, mb: MicroBatch) -> Result<(), Broken> {
        self.needs_gradients()?;
        if self.backward.contains(mb) && !self.flights.contains_key(&mb) {
            return Err(Broken::new(Rule::Once, "its weight gradient (B or W) was made before"));
        }
        self.fold(mb)
    }

    fn needs_gradients(&self) -> Result<(), Broken> {
        match self.terms.forward_only() {
            true => Err(Broken::new(Rule::Once, "the program is one of forward passes only")),
            false => Ok(()),
        }
    }

    /// The gradients of a micro-batch whose B or I was done are complete.
    pub(super) fn fold(&mut self, mb: MicroBatch) -> Result<(), Broken> {
        let Some(&Flight { read, backward: backward @ Some(_) }) = self.flights.get(&mb) else {
            return Err(Broken::new(Rule::Order, "its I was not done before"));
        };
        let update = mb / self.terms.step_every;
        if update != self.steps {
            let (now, every) = (self.steps, self.terms.step_every);
            let what = format!("its gradient belongs to update {update}, but the next is {now} (one every {every})");
            return Err(Broken::new(Rule::Step, what));
        }
        self.flights.remove(&mb);
        if self.terms.weights == WeightPolicy::Stashed {
            self.release(read);
        }
        self.reads.record(Reading { mb, forward: read, backward });
        self.oldest = Some(self.oldest.map_or(read, |o| o.min(read)));
        self.folded += 1;
        Ok(())
    }

    /// `Step`.
    pub(super) fn do_step(&mut self, keep: bool) -> Result<(), Broken> {
        self.needs_gradients()?;
        let every = self.terms.step_every;
        let first = self.steps.saturating_mul(every);
        let expected = self.terms.micro_batches.saturating_sub(first).min(every);
        if self.folded != expected || expected == 0 {
            let what = match expected {
                0 => "all micro-batches were folded into earlier updates".into(),
                _ => format!(
                    "update {} folds {expected} gradients, from micro-batch {first} on; {} are done",
                    self.steps, self.folded
                ),
            };
            return Err(Broken::new(Rule::Step, what));
        }
        if let Some(oldest) = self.oldest.take() {
            self.staleness = self.staleness.max(self.steps - oldest);
        }
        if keep {
            self.kept.insert(self.steps);
        } else {
            self.release(self.steps);
        }
        self.folded = 0;
        self.steps += 1;
        self.hold(self.steps);
        Ok(())
    }

    /// `Free`.
    pub(super) fn do_free(&mut self, version: Version) -> Result<(), Broken> {
        if !self.kept.remove(&version) {
            return Err(Broken::new(Rule::Version, format!("no step kept version {version}, or it was freed before")));
        }
        self.release(version);
        Ok(())
    }

    fn hold(&mut self, version: Version) {
        *self.held.entry(version).or_default() += 1;
        self.most_versions = self.most_versions.max(self.held.len());
    }

    fn release(&mut self, version: Version) {
        if let Some(n) = self.held.get_mut(&version) {
            *n -= 1;
            if *n == 0 {
                self.held.remove(&version);
            }
        }
    }

    /// Whether all is done at the end of the program.
    pub(super) fn finish(&self) -> Result<(), Broken> {
        let count = self.terms.micro_batches;
        if let Some(mb) = self.forward.missing(count) {
            return Err(Broken::new(Rule::Once, format!("F of micro-batch {mb} is missing")));
        }
        if self.terms.forward_only() {
            return Ok(());
        }
        if let Some(mb) = self.backward.missing(count) {
            return Err(Broken::new(Rule::Once, format!("B (or I and W) of micro-batch {mb} is missing")));
        }
        if let Some(mb) = self.flights.keys().next() {
            return Err(Broken::new(Rule::Once, format!("W of micro-batch {mb} is missing")));
        }
        if self.folded > 0 {
            return Err(Broken::new(Rule::Step, format!("no update folds the last {} gradients", self.folded)));
        }
        if let Some(v) = self.kept.first() {
            return Err(Broken::new(Rule::Version, format!("version {v} was kept and never freed")));
        }
        Ok(())
    }

    /// Everything that later instructions depend on, as seen from a micro-batch and a version.
    pub(super) fn relative(&self, mbs: usize, versions: usize, out: &mut Vec<isize>) {
        self.forward.relative(mbs, out);
        if self.terms.forward_only() {
            return;
        }
        self.backward.relative(mbs, out);
        let version = |v: Version| difference(v, versions);
        out.push(self.flights.len() as isize);
        for (&mb, flight) in &self.flights {
            out.extend([difference(mb, mbs), version(flight.read)]);
            out.extend(flight.backward.map_or([0, 0], |v| [1, version(v)]));
        }
        out.extend([self.folded as isize, version(self.steps), self.kept.len() as isize]);
        out.extend(self.kept.iter().map(|&v| version(v)));
        out.extend(self.oldest.map_or([0, 0], |v| [1, version(v)]));
    }

    /// The same state, that many micro-batches and versions later.
    pub(super) fn advance(&mut self, mbs: usize, versions: usize) {
        self.forward.advance(mbs);
        if self.terms.forward_only() {
            return;
        }
        self.backward.advance(mbs);
        let later = |(&mb, f): (&MicroBatch, &Flight)| {
            (mb + mbs, Flight { read: f.read + versions, backward: f.backward.map(|v| v + versions) })
        };
        self.flights = self.flights.iter().map(later).collect();
        self.steps += versions;
        self.kept = self.kept.iter().map(|v| v + versions).collect();
        self.held = self.held.iter().map(|(v, &n)| (v + versions, n)).collect();
        self.oldest = self.oldest.map(|v| v + versions);
    }
}
