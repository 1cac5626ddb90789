//! Asynchronous data parallelism (ASP): every worker's gradient makes an update of its own, without waiting for the others'.
//!
//! Each parameter belongs to one worker of the stage, as to a server of parameters (Dean et al. 2012). A worker pushes the gradients of
//! a minibatch to the owners, who update what is theirs as gradients come, between the layers of their own backward passes, and answer
//! with the new weights. The next minibatch runs meanwhile: a worker waits only for the answers to its minibatch before, and where
//! it is [`SLACK`] minibatches ahead of another. What a run gives depends on the clock.
use super::{
    Notes, Share,
    notes::NUMBERS,
    peers::{Lane, Peers},
};
use crate::{
    Error, Result,
    optim::Optimizer,
    pipeline::{
        schedule::MicroBatch,
        stage::Measured,
        transport::{Ticket, Transport},
        weights::Weights,
    },
    tensor::{DType, Device, Tensor},
};
use std::{
    collections::{BTreeMap, VecDeque},
    thread,
    time::Duration,
};

/// The most minibatches by which a worker is ahead of another: what is under way takes memory.
pub const SLACK: u64 = 4;
/// Between two looks for messages where there is nothing else to do.
const PAUSE: Duration = Duration::from_micros(100);

/// What is under way between this worker and another.
#[derive(Default)]
struct Peer {
    /// What is told before gradients are pushed.
    note: Option<Ticket>,
    /// Gradients of parameters that belong to this worker.
    gradients: VecDeque<(usize, Ticket)>,
    /// New weights of parameters that belong to the other.
    answers: VecDeque<(usize, Ticket)>,
    /// Minibatches whose gradients it has pushed.
    pushed: u64,
    /// Whether it will push no more.
    is_done: bool,
}

/// What the others have told.
#[derive(Default)]
pub struct Heard {
    /// What their losses measured.
    pub measured: Vec<Measured>,
    /// The statistics of their micro-batches.
    pub stats: BTreeMap<MicroBatch, Vec<f64>>,
}

/// One worker's side of a stage whose updates do not wait.
pub struct Server {
    peers: Peers,
    /// Of each parameter of the stage, the worker that it belongs to; `None` where it is not learned.
    owners: Vec<Option<usize>>,
    /// Numbers of statistics of each micro-batch.
    stats: usize,
    /// Gradient slots of the stage.
    slots: usize,
    by: Vec<Peer>,
    /// Updates of each parameter that this worker knows of.
    updates: Vec<u64>,
    /// Minibatches pushed since the pipeline was last empty.
    pushed: u64,
    /// The most updates that came between the weights that a gradient was made with and its own update.
    staleness: u64,
    heard: Heard,
}

/// What a server works on.
pub struct Held<'a> {
    /// The stage's weights.
    pub weights: &'a mut Weights,
    /// How they follow gradients.
    pub optimizer: &'a dyn Optimizer,
}

impl Server {
    /// Of `stage` on `workers`, of which this is number `me`, with `stats` numbers of statistics of each micro-batch.
    pub fn new(
        (stage, workers, me): (usize, &[usize], usize),
        weights: &Weights,
        stats: usize,
        device: &Device,
    ) -> Server {
        let slots = weights.slots().iter().map(|s| s.slot + 1).max().unwrap_or(0);
        Server {
            peers: Peers::new(stage, workers, me, device),
            owners: owners(weights, workers.len()),
            stats,
            slots,
            by: workers.iter().map(|_| Peer::default()).collect(),
            updates: vec![0; weights.held().len()],
            pushed: 0,
            staleness: 0,
            heard: Heard::default(),
        }
    }

    /// The most updates that came between the weights that a gradient was made with and its own update.
    pub fn staleness(&self) -> u64 {
        self.staleness
    }

    /// Gradient slots of the stage.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Takes what the others have told.
    pub fn take_heard(&mut self) -> Heard {
        std::mem::take(&mut self.heard)
    }

    /// Does what has come to be done: updates, answers, answered weights. Whether there was anything. Never waits.
    ///
    /// # Errors
    /// If another worker failed or sends something else.
    pub fn serve(&mut self, transport: &mut dyn Transport, held: &mut Held) -> Result<bool> {
        let mut any = false;
        for q in self.peers.others() {
            if !self.by[q].is_done && self.by[q].note.is_none() && self.by[q].gradients.is_empty() {
                let numbers = self.slots + NUMBERS + self.stats;
                self.by[q].note = Some(self.peers.expect(transport, q, Lane::Notes, (numbers, DType::F64))?);
            }
            while self.is_ready(transport, q)? {
                any = true;
                self.serve_next(transport, q, held)?;
            }
        }
        self.peers.reap(transport)?;
        Ok(any)
    }

    /// Whether anything has come of worker `q`.
    fn is_ready(&self, transport: &mut dyn Transport, q: usize) -> Result<bool> {
        let Peer { note, gradients, answers, .. } = &self.by[q];
        for ticket in [note.as_ref(), gradients.front().map(|g| &g.1), answers.front().map(|a| &a.1)] {
            if let Some(&ticket) = ticket
                && transport.test(ticket)?
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The first thing that has come of worker `q`.
    fn serve_next(&mut self, transport: &mut dyn Transport, q: usize, held: &mut Held) -> Result<()> {
        if let Some(&(w, ticket)) = self.by[q].answers.front()
            && transport.test(ticket)?
        {
            self.by[q].answers.pop_front();
            let (header, tensor) = self.peers.received(transport, ticket)?;
            expect_number(header.mb, w)?;
            self.updates[w] = header.version;
            return held.weights.replace(w, tensor);
        }
        if let Some(&(w, ticket)) = self.by[q].gradients.front()
            && transport.test(ticket)?
        {
            self.by[q].gradients.pop_front();
            let (header, grad) = self.peers.received(transport, ticket)?;
            expect_number(header.mb, w)?;
            self.staleness = self.staleness.max(self.updates[w].saturating_sub(header.version));
            self.update(w, &grad, held)?;
            let now = self.updates[w] as usize;
            return self.peers.send(transport, q, Lane::Sums, (w, now), &held.weights.held()[w].tensor);
        }
        if let Some(ticket) = self.by[q].note
            && transport.test(ticket)?
        {
            self.by[q].note = None;
            return self.take_note(transport, q, ticket, held.weights);
        }
        Ok(())
    }

    /// What worker `q` is about to push, or that it will push no more.
    fn take_note(&mut self, transport: &mut dyn Transport, q: usize, ticket: Ticket, weights: &Weights) -> Result<()> {
        let (header, numbers) = self.peers.received(transport, ticket)?;
        if numbers.is_empty() {
            self.by[q].is_done = true;
            return Ok(());
        }
        let notes = Notes::decode(&numbers.to_host::<f64>()?, self.slots, &[header.mb as usize], self.stats)?;
        for w in self.with_gradient(weights, notes.present()) {
            if self.owners[w] == Some(self.peers.me) {
                let part = (weights.held()[w].tensor.len(), weights.held()[w].tensor.dtype());
                let ticket = self.peers.expect(transport, q, Lane::Parts, part)?;
                self.by[q].gradients.push_back((w, ticket));
            }
        }
        self.heard.measured.extend(notes.measured);
        self.heard.stats.extend(notes.stats);
        self.by[q].pushed += 1;
        Ok(())
    }

    /// The learned parameters that have a gradient, by the slots that have one.
    fn with_gradient(&self, weights: &Weights, present: &[bool]) -> Vec<usize> {
        let has = |w: &usize| {
            let mut slots = weights.held()[*w].slots().iter();
            self.owners[*w].is_some() && slots.any(|&s| present.get(s).copied().unwrap_or(false))
        };
        (0..self.owners.len()).filter(has).collect()
    }

    /// One update of a parameter that belongs to this worker.
    fn update(&mut self, w: usize, grad: &Tensor, held: &mut Held) -> Result<()> {
        let number = held.weights.minibatches() + self.updates[w];
        held.weights.update_one(w, held.optimizer, grad, number)?;
        self.updates[w] += 1;
        Ok(())
    }

    /// Serves until `is_over`, with pauses where there is nothing to do.
    fn serve_until(
        &mut self,
        transport: &mut dyn Transport,
        held: &mut Held,
        is_over: impl Fn(&Server) -> bool,
    ) -> Result<()> {
        let status = transport.status().clone();
        while !is_over(self) {
            if self.serve(transport, held)? {
                continue;
            }
            status.blocked(|| {
                while !self.anything(transport)? {
                    thread::sleep(PAUSE);
                }
                Ok::<(), Error>(())
            })?;
        }
        Ok(())
    }

    fn anything(&self, transport: &mut dyn Transport) -> Result<bool> {
        for q in self.peers.others() {
            if self.is_ready(transport, q)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Hands the gradients of a minibatch to the owners, and tells what goes with them; waits for the answers to the minibatch before,
    /// and for workers that are too far behind.
    ///
    /// # Errors
    /// If another worker fails.
    pub fn push(&mut self, transport: &mut dyn Transport, held: &mut Held, share: Share, notes: &Notes) -> Result<()> {
        // With this minibatch it has pushed one more.
        let ahead = |s: &Server, p: &Peer| !p.is_done && s.pushed + 1 > p.pushed + SLACK;
        let me = self.peers.me;
        self.serve_until(transport, held, |s| {
            s.by.iter().enumerate().all(|(q, p)| q == me || (p.answers.is_empty() && !ahead(s, p)))
        })?;
        let numbers = notes.encode(self.slots, &[share.mb]);
        let text = Tensor::from_host(&numbers, &[numbers.len()], &self.peers.device)?;
        for q in self.peers.others() {
            self.peers.send(transport, q, Lane::Notes, (share.mb, share.samples), &text)?;
        }
        let mut grads = held.weights.of_weights(share.grads)?;
        for w in self.with_gradient(held.weights, notes.present()) {
            let grad = grads[w].take().ok_or_else(|| Error::schedule("a gradient that was told of is missing"))?;
            let Some(owner) = self.owners[w] else { continue };
            if owner == me {
                self.update(w, &grad, held)?;
                continue;
            }
            let seen = self.updates[w] as usize;
            self.peers.send(transport, owner, Lane::Parts, (w, seen), &grad.contiguous()?)?;
            let answer = (grad.len(), grad.dtype());
            let ticket = self.peers.expect(transport, owner, Lane::Sums, answer)?;
            self.by[owner].answers.push_back((w, ticket));
        }
        self.pushed += 1;
        self.serve(transport, held).map(|_| ())
    }

    /// All gradients of all workers are in the weights, and all workers have the same: the pipeline is empty.
    ///
    /// # Errors
    /// If another worker fails.
    pub fn settle(&mut self, transport: &mut dyn Transport, held: &mut Held) -> Result<()> {
        let me = self.peers.me;
        self.serve_until(transport, held, |s| s.by.iter().all(|p| p.answers.is_empty()))?;
        let nothing = Tensor::zeros(&[0], DType::F64, &self.peers.device)?;
        for q in self.peers.others() {
            self.peers.send(transport, q, Lane::Notes, (0, 0), &nothing)?;
        }
        self.serve_until(transport, held, |s| {
            s.peers.others().all(|q| s.by[q].is_done && s.by[q].gradients.is_empty())
        })?;
        for (w, owner) in self.owners.iter().enumerate() {
            if let Some(owner) = owner {
                held.weights
                    .tensors_mut(w)
                    .try_for_each(|t| self.peers.spread(transport, *owner, Lane::MoreSums, w, t))?;
            }
        }
        self.peers.flush(transport)?;
        let all =
            self.pushed + self.by.iter().enumerate().filter(|(q, _)| *q != me).map(|(_, p)| p.pushed).sum::<u64>();
        held.weights.set_minibatches(held.weights.minibatches() + all);
        self.updates.fill(0);
        self.pushed = 0;
        self.by.iter_mut().for_each(|p| (p.pushed, p.is_done) = (0, false));
        Ok(())
    }

    /// Gives all workers the first one's tensors in place of theirs.
    ///
    /// # Errors
    /// If another worker fails.
    pub fn spread<'t>(
        &mut self,
        transport: &mut dyn Transport,
        tensors: impl Iterator<Item = &'t mut Tensor>,
    ) -> Result<()> {
        for (i, tensor) in tensors.enumerate() {
            self.peers.spread(transport, 0, Lane::MoreSums, i, tensor)?;
        }
        self.peers.flush(transport)
    }
}

fn expect_number(got: u64, expected: usize) -> Result<()> {
    if got == expected as u64 {
        return Ok(());
    }
    Err(Error::transport(format!("parameter {expected} of the stage expected, got {got}")))
}

/// Gives each learned parameter to a worker, the largest first, always to the one that has least.
fn owners(weights: &Weights, workers: usize) -> Vec<Option<usize>> {
    let held = weights.held();
    let mut learned: Vec<usize> = (0..held.len()).filter(|&w| held[w].is_learned()).collect();
    learned.sort_by_key(|&w| std::cmp::Reverse(held[w].tensor.len()));
    let mut has = vec![0; workers];
    let mut owners = vec![None; held.len()];
    for w in learned {
        let owner = (0..workers).min_by_key(|&q| has[q]);
        has[owner.unwrap_or(0)] += held[w].tensor.len();
        owners[w] = owner;
    }
    owners
}
