//! What is known of a stage while its worker's program is gone through.
use super::{
    facts::{Reading, Reads},
    fault::{Broken, Rule},
};
use crate::pipeline::schedule::{MicroBatch, Programs, Read, Version, WeightPolicy};
use std::collections::{BTreeMap, BTreeSet};

/// A set of the micro-batches of a replica that fills up from its first one: small, however many there are.
#[derive(Clone, Debug)]
pub(super) struct Filled {
    /// All below that are the replica's are in it.
    next: MicroBatch,
    /// From one of the replica's to the next.
    stride: usize,
    /// Those above `next` that are in it.
    above: BTreeSet<MicroBatch>,
}

impl Filled {
    fn new(terms: Terms) -> Filled {
        Filled { next: terms.replica, stride: terms.replicas, above: BTreeSet::new() }
    }

    /// Adds one; false if it was in it.
    fn insert(&mut self, mb: MicroBatch) -> bool {
        if mb < self.next || !self.above.insert(mb) {
            return false;
        }
        while self.above.remove(&self.next) {
            self.next += self.stride;
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

/// The rules of the whole run, for a replica of a stage.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    micro_batches: usize,
    step_every: usize,
    weights: WeightPolicy,
    replica: usize,
    replicas: usize,
}

impl Terms {
    pub(super) fn new(programs: &Programs, replica: usize, replicas: usize) -> Terms {
        Terms {
            micro_batches: programs.micro_batches,
            step_every: programs.folded_by(replicas),
            weights: programs.weights,
            replica,
            replicas,
        }
    }

    /// How many of the replica's micro-batches are below `mb`.
    fn own_below(&self, mb: MicroBatch) -> usize {
        mb.saturating_sub(self.replica).div_ceil(self.replicas)
    }

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
    /// Whether they have been summed with those of the other replicas.
    reduced: bool,
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
            forward: Filled::new(terms),
            backward: Filled::new(terms),
            flights: BTreeMap::new(),
            folded: 0,
            reduced: false,
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
        self.is_own(mb)?;
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

    /// Whether a micro-batch is this replica's.
    fn is_own(&self, mb: MicroBatch) -> Result<(), Broken> {
        let Terms { replica, replicas, .. } = self.terms;
        if mb % replicas == replica {
            return Ok(());
        }
        let what = format!("micro-batch {mb} belongs to replica {} of {replicas}, this is {replica}", mb % replicas);
        Err(Broken::new(Rule::Place, what))
    }

    /// B or I. What it needs from other stages is checked next, and then [`fold`](StageState::fold) ends B.
    pub(super) fn do_backward(&mut self, mb: MicroBatch) -> Result<(), Broken> {
        self.needs_gradients()?;
        self.is_own(mb)?;
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
        self.is_own(mb)?;
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
        if self.reduced {
            return Err(Broken::new(Rule::Reduce, "the gradients of the next update were summed before"));
        }
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

    /// The micro-batches of the next update: from the first on, before the end.
    fn next_update(&self) -> (MicroBatch, MicroBatch) {
        let every = self.terms.step_every;
        let first = self.steps.saturating_mul(every);
        (first, first.saturating_add(every).min(self.terms.micro_batches))
    }

    /// Whether the gradients of the next update are complete here.
    fn is_complete(&self) -> Result<(), Broken> {
        self.needs_gradients()?;
        let (first, end) = self.next_update();
        if first >= end {
            return Err(Broken::new(Rule::Step, "all micro-batches were folded into earlier updates"));
        }
        let expected = self.terms.own_below(end) - self.terms.own_below(first);
        if self.folded != expected {
            let (update, folded) = (self.steps, self.folded);
            let what =
                format!("update {update} folds {expected} gradients, from micro-batch {first} on; {folded} are done");
            return Err(Broken::new(Rule::Step, what));
        }
        Ok(())
    }

    /// `Reduce`.
    pub(super) fn do_reduce(&mut self, mb: MicroBatch) -> Result<(), Broken> {
        self.needs_gradients()?;
        if self.terms.replicas == 1 {
            return Err(Broken::new(Rule::Reduce, "the stage is on one worker"));
        }
        if self.reduced {
            return Err(Broken::new(Rule::Reduce, "the gradients of this update were summed before"));
        }
        self.is_complete()?;
        let last = self.next_update().0.saturating_add(self.terms.step_every) - 1;
        if mb != last {
            let what = format!("update {} is that of micro-batches up to {last}", self.steps);
            return Err(Broken::new(Rule::Reduce, what));
        }
        self.reduced = true;
        Ok(())
    }

    /// `Step`.
    pub(super) fn do_step(&mut self, keep: bool) -> Result<(), Broken> {
        self.is_complete()?;
        if self.terms.replicas > 1 && !std::mem::take(&mut self.reduced) {
            return Err(Broken::new(
                Rule::Reduce,
                "the gradients were not summed over the workers of the stage before",
            ));
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
        if self.folded > 0 || self.reduced {
            return Err(Broken::new(Rule::Step, format!("no update folds the last {} gradients", self.folded)));
        }
        let (first, end) = self.next_update();
        if first < end {
            let what = format!("update {} of micro-batches from {first} on is missing", self.steps);
            return Err(Broken::new(Rule::Step, what));
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
        out.extend([self.folded as isize, isize::from(self.reduced), version(self.steps), self.kept.len() as isize]);
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
