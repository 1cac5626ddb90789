//! What a stage does with the other workers that hold it: gradients, statistics and losses are brought together before each update.
use super::{Measured, Replica, Stage};
use crate::{
    Error, Result,
    autograd::Stat,
    pipeline::{
        reduce::{Held, Notes, Server, Share},
        schedule::MicroBatch,
        transport::Transport,
    },
    tensor::Tensor,
};
use std::collections::BTreeMap;

impl Stage {
    /// Whether B of micro-batch `mb` completes what this worker adds to an update of a stage that others hold too. `exists` tells
    /// which micro-batches there are.
    pub fn completes(&self, mb: MicroBatch, exists: &dyn Fn(MicroBatch) -> bool) -> bool {
        if self.server.is_some() {
            return true;
        }
        let is_last = || self.pace.round > 1 || !exists(mb + self.replica.of);
        self.is_shared() && self.is_next(mb) && self.early.is_empty() && is_last()
    }

    /// Whether other workers hold it too.
    pub fn is_shared(&self) -> bool {
        self.replica.of > 1
    }

    /// Lays by the buffers that sums over other workers may need, for `micro_batches` of each to an update.
    pub fn reserve(&self, micro_batches: usize) {
        if let Some(reducer) = &self.reducer {
            let each = micro_batches.div_ceil(self.replica.of);
            let shares = if self.replica.apart { each } else { 1 };
            reducer.reserve(shares, each, self.state.values().flatten().map(Tensor::len).sum());
        }
    }

    /// Reduce: the gradients of the micro-batches up to `last` of all workers of the stage, summed, or in a round their mean, each
    /// weighted by its samples. `samples` tells how many a micro-batch has, if there is such a one. Returns what the loss measured
    /// on the other workers.
    pub fn reduce(
        &mut self,
        last: MicroBatch,
        transport: &mut dyn Transport,
        samples: &dyn Fn(MicroBatch) -> Option<usize>,
        measured: Vec<Measured>,
    ) -> Result<Vec<Measured>> {
        let first = std::mem::replace(&mut self.update_from, last + 1);
        let Replica { of, apart, .. } = self.replica;
        let counts: Vec<(MicroBatch, usize)> = (first..=last).filter_map(|mb| Some((mb, samples(mb)?))).collect();
        let mut by: Vec<Vec<MicroBatch>> = vec![Vec::new(); of];
        counts.iter().for_each(|&(mb, _)| by[mb % of].push(mb));
        let mine = &by[self.replica.index];
        let stats = self.stats_apart(mine)?;
        if self.server.is_some() {
            return self.push(transport, mine.first().and_then(|&mb| Some((mb, samples(mb)?))), measured, stats);
        }
        let samples = |mb: MicroBatch| counts.iter().find(|c| c.0 == mb).map_or(0, |c| c.1);
        let share = |(mb, grads)| Share { mb, samples: samples(mb), grads };
        let shares: Vec<Share> = if apart {
            std::mem::take(&mut self.early).into_iter().map(share).collect()
        } else {
            mine.first().map(|&mb| share((mb, std::mem::take(&mut self.grads)))).into_iter().collect()
        };
        let reducer = self.reducer.as_mut().ok_or_else(|| Error::schedule("a reduce on one worker"))?;
        let known = measured.len();
        let notes = Notes::new(&shares, measured, stats, reducer.slots());
        let lengths = self.state.values().flatten().map(Tensor::len).sum();
        let posted = reducer.tell(transport, &notes, &by, lengths)?;
        let shared: Vec<usize> = by.iter().map(|m| if apart { m.len() } else { 1 }).collect();
        let rounds = self.pace.round > 1;
        reducer.begin(transport, shares, &shared)?;
        let notes = reducer.hear(transport, notes, posted, &by, lengths)?;
        self.grads = reducer.finish(transport, notes.present())?;
        self.pace.minibatches = if rounds { counts.len() as u64 } else { 1 };
        self.take_stats(&notes.stats)?;
        Ok(notes.measured.into_iter().skip(known).collect())
    }

    /// Reduce without waiting: the gradient of this worker's minibatch, if it has one, goes to the owners of the parameters.
    fn push(
        &mut self,
        transport: &mut dyn Transport,
        mine: Option<(MicroBatch, usize)>,
        measured: Vec<Measured>,
        stats: BTreeMap<MicroBatch, Vec<f64>>,
    ) -> Result<Vec<Measured>> {
        let server = self.server.as_mut().ok_or_else(|| Error::schedule("a push on one worker"))?;
        let mut held = Held { weights: &mut self.weights, optimizer: &*self.optimizer };
        if let Some((mb, samples)) = mine {
            let shares = [Share { mb, samples, grads: std::mem::take(&mut self.grads) }];
            let notes = Notes::new(&shares, measured, stats, server.slots());
            let [share] = shares;
            server.push(transport, &mut held, share, &notes)?;
            self.take_stats(&notes.stats)?;
        }
        self.heard()
    }

    /// What other workers have told of their minibatches.
    fn heard(&mut self) -> Result<Vec<Measured>> {
        let heard = self.server.as_mut().map(Server::take_heard).unwrap_or_default();
        self.take_stats(&heard.stats)?;
        Ok(heard.measured)
    }

    /// Whether its updates do not wait for each other, so that there is something to [settle](Stage::settle).
    pub fn settles(&self) -> bool {
        self.server.is_some()
    }

    /// Where updates do not wait for each other: waits for all of them, until every worker of the stage has the same weights. Returns
    /// what the loss measured on the other workers.
    ///
    /// # Errors
    /// If another worker fails.
    pub fn settle(&mut self, transport: &mut dyn Transport) -> Result<Vec<Measured>> {
        let Some(server) = &mut self.server else { return Ok(Vec::new()) };
        let mut held = Held { weights: &mut self.weights, optimizer: &*self.optimizer };
        server.settle(transport, &mut held)?;
        let measured = self.heard()?;
        self.take_running_stats()?;
        if let Some(server) = &mut self.server {
            server.spread(transport, self.state.values_mut().flatten())?;
        }
        Ok(measured)
    }

    /// The statistics of these micro-batches as numbers, in the order of nodes and states.
    fn stats_apart(&mut self, mbs: &[MicroBatch]) -> Result<BTreeMap<MicroBatch, Vec<f64>>> {
        let mut all = BTreeMap::new();
        for &mb in mbs {
            let of_mb = self.stats.remove(&mb).unwrap_or_default();
            let mut numbers = Vec::new();
            for (&node, states) in &self.state {
                for state in 0..states.len() {
                    let stat = of_mb.iter().find(|s| (s.node, s.state) == (node, state));
                    let stat = stat.ok_or_else(|| Error::graph("a node with state gave no statistic of it"))?;
                    numbers.extend(stat.value.to_f64()?);
                }
            }
            all.insert(mb, numbers);
        }
        Ok(all)
    }

    /// The other way round: the statistics of all workers' micro-batches.
    fn take_stats(&mut self, stats: &BTreeMap<MicroBatch, Vec<f64>>) -> Result<()> {
        for (&mb, numbers) in stats {
            let (mut rest, mut of_mb) = (numbers.iter().copied(), Vec::new());
            for (&node, states) in &self.state {
                for (state, like) in states.iter().enumerate() {
                    let value = self.device.from_f64(rest.by_ref().take(like.len()), like.shape(), like.dtype())?;
                    of_mb.push(Stat { node, state, value });
                }
            }
            self.stats.insert(mb, of_mb);
        }
        Ok(())
    }
}
