//! Bringing together the gradients of a stage over the workers that hold it.
//!
//! Gradients are cut into buckets, each of them into one part a worker. Every worker sends each part to the one that it belongs to
//! (reduce-scatter), which adds them up in the order of their micro-batches and sends the sum to all (all-gather). Both moves
//! together are the 2(R−1)/R · |w| bytes a worker of a ring (Patarasuk and Yuan 2009), in 2 steps instead of its 2(R−1); the order
//! of the additions is that of the micro-batches, whoever made them, so that the sums are the same bits on all workers, and those of
//! one worker that folds micro-batch after micro-batch. [`AllReduce`] tells of other ways, [`Compression`] of fewer bytes.
mod notes;
mod options;
mod peers;
mod power;
mod server;
mod sums;

pub use notes::Notes;
pub use options::{AllReduce, Compression};
pub use server::{Held, SLACK, Server};

use super::{
    schedule::MicroBatch,
    transport::{Ticket, Transport},
    weights::Slot,
};
use crate::{
    Result,
    autograd::Grads,
    tensor::{DType, Device, Tensor},
};
use notes::NUMBERS;
use peers::{Lane, Peers};
use power::PowerSgd;
use sums::Sums;

/// What one worker adds to an update, for one of its micro-batches or for all of them together.
pub struct Share {
    /// The micro-batch, or the first of them: shares are added in this order.
    pub mb: MicroBatch,
    /// Its samples.
    pub samples: usize,
    /// The gradients.
    pub grads: Grads,
}

/// A way to bring gradients together.
trait Exchange: Send {
    /// Lays by the buffers that a sum may need beyond those that sums needed so far, with so many shares of each worker.
    fn reserve(&self, shares: usize);
    /// The backward pass of this worker's only share, of so many samples of a micro-batch, has made the gradient of `slot`. Never
    /// waits.
    fn offer(
        &mut self,
        transport: &mut dyn Transport,
        share: (MicroBatch, usize),
        slot: usize,
        grad: &Tensor,
    ) -> Result<()>;
    /// Sends what was not offered of this worker's `shares`; `counts` tells how many shares each worker has.
    fn begin(&mut self, transport: &mut dyn Transport, shares: Vec<Share>, counts: &[usize]) -> Result<()>;
    /// The sum (or mean) over all workers, the same on all of them. Of slots that are not `present` there is none.
    fn finish(&mut self, transport: &mut dyn Transport, present: &[bool]) -> Result<Grads>;
}

/// How a stage's gradients are brought together.
#[derive(Clone, Copy, Debug, Default)]
pub struct Means {
    /// Who adds up what.
    pub all_reduce: AllReduce,
    /// What is sent.
    pub compression: Compression,
    /// Whether shares are averaged, each weighted by its samples, instead of added up.
    pub mean: bool,
    /// Whether they are added up in the order of micro-batches, each for itself.
    pub in_order: bool,
    /// What random numbers are drawn from.
    pub seed: u64,
}

/// One worker's side of the sums of a stage.
pub struct Reducer {
    peers: Peers,
    /// Gradient slots of the stage.
    slots: usize,
    exchange: Box<dyn Exchange>,
}

impl Reducer {
    /// Of `stage` on `workers`, of which this is number `me`, on these `hosts`; `slots` are its learned parameters' uses, in the order of
    /// the graph.
    ///
    /// # Errors
    /// If its gradients cannot be added up so on these workers, or there is no memory.
    pub fn new(
        (stage, workers, me): (usize, &[usize], usize),
        hosts: &[usize],
        means: Means,
        slots: &[Slot],
        dtype: DType,
        device: &Device,
    ) -> Result<Reducer> {
        let levels = means.all_reduce.levels(hosts, me, means.in_order)?;
        let types = [dtype, means.compression.wire(dtype)];
        let peers = || Peers::new(stage, workers, me, device);
        let sums = |lanes, slots: &[Slot]| Sums::new(peers(), lanes, levels.clone(), means.mean, slots, types);
        let first = [Lane::Parts, Lane::Sums];
        let exchange: Box<dyn Exchange> = match means.compression {
            Compression::None | Compression::Bf16 => Box::new(sums(first, slots)),
            Compression::PowerSgd { rank } => {
                let [p, q] = power::slots_of_factors(slots, rank);
                let both = [sums(first, &p), sums([Lane::MoreParts, Lane::MoreSums], &q)];
                Box::new(PowerSgd::new(both, slots, rank, (means.seed, stage), (dtype, device))?)
            }
        };
        Ok(Reducer { peers: peers(), slots: slots.iter().map(|s| s.slot + 1).max().unwrap_or(0), exchange })
    }

    /// Gradient slots of the stage.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Lays by the buffers that a sum may need beyond those that sums needed so far: how long others hold what was sent depends on
    /// the clock. With `shares` of each worker, which are of `micro_batches`, and `stats` numbers of each micro-batch.
    pub fn reserve(&self, shares: usize, micro_batches: usize, stats: usize) {
        self.exchange.reserve(shares);
        let note = (self.slots + micro_batches * (NUMBERS + stats)) * size_of::<f64>();
        self.peers.device.pool().reserve(note, 2 * (self.peers.count() - 1) + 2);
    }

    /// The backward pass of this worker's only share, of so many samples of micro-batch `mb`, has made the gradient of `slot`: it is
    /// on its way as soon as its bucket is complete, and what others have sent meanwhile is added up (wait-free backpropagation,
    /// Zhang et al. 2017). Never waits.
    ///
    /// # Errors
    /// If another worker failed.
    pub fn offer(
        &mut self,
        transport: &mut dyn Transport,
        share: (MicroBatch, usize),
        slot: usize,
        grad: &Tensor,
    ) -> Result<()> {
        self.exchange.offer(transport, share, slot, grad)
    }

    /// Sends what was not [offered](Reducer::offer) of this worker's `shares`; `counts` tells how many shares each worker has.
    ///
    /// # Errors
    /// If another worker failed.
    pub fn begin(&mut self, transport: &mut dyn Transport, shares: Vec<Share>, counts: &[usize]) -> Result<()> {
        self.exchange.begin(transport, shares, counts)
    }

    /// The sum (or mean) over all workers, the same on all of them. Of slots that are not `present` there is none.
    ///
    /// # Errors
    /// If another worker fails, or sends something else.
    pub fn finish(&mut self, transport: &mut dyn Transport, present: &[bool]) -> Result<Grads> {
        let sum = self.exchange.finish(transport, present)?;
        self.peers.flush(transport)?;
        Ok(sum)
    }

    /// Tells the other workers of the stage what this one knows; [`hear`](Reducer::hear) gives what they know. `stats` numbers belong
    /// to each of the micro-batches of worker q, `by[q]`.
    ///
    /// # Errors
    /// If another worker failed.
    pub fn tell(
        &mut self,
        transport: &mut dyn Transport,
        mine: &Notes,
        by: &[Vec<MicroBatch>],
        stats: usize,
    ) -> Result<Vec<(usize, Ticket)>> {
        let numbers = mine.encode(self.slots, &by[self.peers.me]);
        let text = Tensor::from_host(&numbers, &[numbers.len()], &self.peers.device)?;
        let mut posted = Vec::new();
        for q in self.peers.others() {
            let numbers = self.slots + by[q].len() * (NUMBERS + stats);
            posted.push((q, self.peers.expect(transport, q, Lane::Notes, (numbers, DType::F64))?));
            self.peers.send(transport, q, Lane::Notes, (q, 0), &text)?;
        }
        Ok(posted)
    }

    /// What the other workers told, added to what this one knows.
    ///
    /// # Errors
    /// If another worker fails, or tells something else.
    pub fn hear(
        &mut self,
        transport: &mut dyn Transport,
        mut mine: Notes,
        posted: Vec<(usize, Ticket)>,
        by: &[Vec<MicroBatch>],
        stats: usize,
    ) -> Result<Notes> {
        for (q, ticket) in posted {
            let numbers = self.peers.received(transport, ticket)?.1.to_host::<f64>()?;
            mine.merge(Notes::decode(&numbers, self.slots, &by[q], stats)?);
        }
        Ok(mine)
    }
}
