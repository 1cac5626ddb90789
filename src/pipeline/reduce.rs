//! Summing the gradients of a stage over the workers that hold it.
//!
//! Gradients are cut into buckets, each of them into one part a worker. Every worker sends each part to the one that it belongs to
//! (reduce-scatter), which adds them up in the order of their micro-batches and sends the sum to all (all-gather). Both moves
//! together are the 2(R−1)/R · |w| bytes a worker of a ring (Patarasuk and Yuan 2009), in 2 steps instead of its 2(R−1); the order
//! of the additions is that of the micro-batches, whoever made them, so that the sums are the same bits on all workers, and those of
//! one worker that folds micro-batch after micro-batch.
use super::{
    schedule::MicroBatch,
    stage::Measured,
    transport::{Channel, Header, Ticket, Transport},
    weights::Slot,
};
use crate::{
    Context, Error, Result,
    autograd::Grads,
    tensor::{DType, Device, Tensor},
};
use std::collections::{BTreeMap, VecDeque};

/// Bytes of a bucket: enough for a link's bandwidth, little enough to be on its way early. A larger parameter is one by itself.
const BUCKET: usize = 4 << 20;
/// The channel of stage 0's parts; below it come its sums and its notes, then those of stage 1. Below the channel of
/// [`Lead`](super::lead::Lead), far from those of edges.
const CHANNEL: u32 = 16_381;

/// What one worker adds to an update, for one of its micro-batches or for all of them together.
pub struct Share {
    /// The micro-batch, or the first of them: shares are added in this order.
    pub mb: MicroBatch,
    /// Its samples.
    pub samples: usize,
    /// The gradients.
    pub grads: Grads,
}

/// Parameters that travel together.
struct Bucket {
    slots: Vec<Slot>,
    elements: usize,
}

/// A part of a share.
struct Part {
    mb: MicroBatch,
    samples: usize,
    data: Tensor,
}

/// A bucket under way.
struct Moving {
    /// Of other workers.
    parts: Vec<Ticket>,
    /// Of this worker.
    own: Vec<Part>,
    /// The sum of the part that belongs here, once it is made.
    sum: Option<Tensor>,
    /// By worker of the stage; `None` for this one.
    sums: Vec<Option<Ticket>>,
}

/// One worker's side of the sums of a stage.
pub struct Reducer {
    stage: usize,
    /// The workers of the stage.
    workers: Vec<usize>,
    me: usize,
    /// Whether shares are averaged, each weighted by its samples, instead of added up.
    mean: bool,
    buckets: Vec<Bucket>,
    /// Gradient slots of the stage.
    slots: usize,
    dtype: DType,
    device: Device,
    /// Gradients that a backward pass under way has made, by slot, of buckets that are not complete.
    offered: BTreeMap<usize, Tensor>,
    /// The first buckets of the next update.
    moving: Vec<Moving>,
    /// How many of them are summed.
    summed: usize,
    sends: VecDeque<Ticket>,
}

/// What the workers of a stage tell each other beside gradients.
#[derive(Clone, Debug, Default)]
pub struct Notes {
    /// What the loss measured.
    pub measured: Vec<Measured>,
    /// The statistics of each micro-batch, as many numbers for each.
    pub stats: BTreeMap<MicroBatch, Vec<f64>>,
    /// Which slots have a gradient.
    present: Vec<bool>,
}

impl Reducer {
    /// Of `stage` on `workers`, of which this is number `me`; `slots` are its learned parameters' uses, in the order of the graph.
    pub fn new(
        stage: usize,
        workers: &[usize],
        me: usize,
        mean: bool,
        slots: &[Slot],
        dtype: DType,
        device: &Device,
    ) -> Reducer {
        let mut buckets: Vec<Bucket> = Vec::new();
        // In the order in which a backward pass makes them.
        for slot in slots.iter().rev() {
            let elements: usize = slot.shape.iter().product();
            match buckets.last_mut().filter(|b| (b.elements + elements) * dtype.size() <= BUCKET) {
                Some(bucket) => {
                    bucket.slots.push(slot.clone());
                    bucket.elements += elements;
                }
                None => buckets.push(Bucket { slots: vec![slot.clone()], elements }),
            }
        }
        Reducer {
            stage,
            workers: workers.to_vec(),
            me,
            mean,
            buckets,
            slots: slots.iter().map(|s| s.slot + 1).max().unwrap_or(0),
            dtype,
            device: device.clone(),
            offered: BTreeMap::new(),
            moving: Vec::new(),
            summed: 0,
            sends: VecDeque::new(),
        }
    }

    /// The other workers of the stage, each with its number among them all.
    fn others(&self) -> Vec<(usize, usize)> {
        self.workers.iter().copied().enumerate().filter(|(q, _)| *q != self.me).collect()
    }

    /// Gradient slots of the stage.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Lays by the buffers that a sum may need beyond those that sums needed so far: how long others hold what was sent depends on
    /// the clock. With `shares` of each worker, which are of `micro_batches`, and `stats` numbers of each micro-batch.
    pub fn reserve(&self, shares: usize, micro_batches: usize, stats: usize) {
        let (pool, others) = (self.device.pool(), self.workers.len() - 1);
        let bytes = |elements: usize| elements * self.dtype.size();
        for bucket in 0..self.buckets.len() {
            // What came, the sum, and the one before that others may still be reading.
            for q in 0..self.workers.len() {
                pool.reserve(bytes(self.part(bucket, q).1), others * shares + 3);
            }
            // What was sent, and the sums of all together.
            pool.reserve(bytes(self.buckets[bucket].elements), shares + 2);
            for slot in &self.buckets[bucket].slots {
                pool.reserve(bytes(slot.shape.iter().product()), 2);
            }
        }
        let note = (self.slots + micro_batches * (NUMBERS + stats)) * size_of::<f64>();
        pool.reserve(note, 2 * others + 2);
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
        (mb, samples): (MicroBatch, usize),
        slot: usize,
        grad: &Tensor,
    ) -> Result<()> {
        self.offered.insert(slot, grad.clone());
        let one_each = vec![1; self.workers.len()];
        while let Some(bucket) = self.buckets.get(self.moving.len()) {
            if !bucket.slots.iter().all(|s| self.offered.contains_key(&s.slot)) {
                break;
            }
            let grads = bucket.slots.iter().map(|s| self.offered.remove(&s.slot)).collect();
            let data = self.flat(self.moving.len(), grads)?;
            self.start(transport, vec![Part { mb, samples, data }], &one_each)?;
        }
        self.go_on(transport)
    }

    /// Adds up what has arrived.
    fn go_on(&mut self, transport: &mut dyn Transport) -> Result<()> {
        while let Some(moving) = self.moving.get(self.summed) {
            for &ticket in &moving.parts {
                if !transport.test(ticket)? {
                    return Ok(());
                }
            }
            self.add_up(transport)?;
        }
        Ok(())
    }

    /// Sends what was not [offered](Reducer::offer) of this worker's `shares`, and adds up the parts that belong here; `counts` tells
    /// how many shares each worker has.
    ///
    /// # Errors
    /// If another worker fails, or sends something else.
    pub fn sum(&mut self, transport: &mut dyn Transport, mut shares: Vec<Share>, counts: &[usize]) -> Result<()> {
        self.offered.clear();
        while self.moving.len() < self.buckets.len() {
            let bucket = self.moving.len();
            let part = |share: &mut Share| {
                let grads = self.buckets[bucket].slots.iter().map(|s| share.grads.take(s.slot)).collect();
                Ok(Part { mb: share.mb, samples: share.samples, data: self.flat(bucket, grads)? })
            };
            let own = shares.iter_mut().map(part).collect::<Result<Vec<_>>>()?;
            self.start(transport, own, counts)?;
            self.go_on(transport)?;
        }
        while self.summed < self.moving.len() {
            self.add_up(transport)?;
        }
        Ok(())
    }

    /// The sum (or mean) over all workers, the same on all of them. Of slots that are not `present` there is none.
    ///
    /// # Errors
    /// If another worker fails, or sends something else.
    pub fn finish(&mut self, transport: &mut dyn Transport, present: &[bool]) -> Result<Grads> {
        let mut sum = Grads::default();
        for (bucket, moving) in std::mem::take(&mut self.moving).into_iter().enumerate() {
            let mut whole = Vec::new();
            for ticket in moving.sums {
                whole.push(match ticket {
                    Some(ticket) => self.received(transport, ticket, Some(bucket))?.1,
                    None => moving.sum.clone().ok_or_else(|| Error::schedule("a sum that was not made"))?,
                });
            }
            let whole = Tensor::concat(&whole, 0)?;
            let mut start = 0;
            for slot in &self.buckets[bucket].slots {
                let elements: usize = slot.shape.iter().product();
                if present.get(slot.slot).copied().unwrap_or(false) {
                    sum.add(slot.slot, whole.slice(0, start, elements)?.reshape(&slot.shape)?)?;
                }
                start += elements;
            }
        }
        self.summed = 0;
        while let Some(ticket) = self.sends.pop_front() {
            transport.wait(ticket)?;
        }
        Ok(sum)
    }

    /// Sends the parts of the next bucket to those whom they belong to, and gets ready for what comes: `counts` parts of each
    /// worker, at least one, which is empty if it has no share.
    fn start(&mut self, transport: &mut dyn Transport, own: Vec<Part>, counts: &[usize]) -> Result<()> {
        let bucket = self.moving.len();
        let (mut mine, mut parts, mut sums) = (Vec::new(), Vec::new(), vec![None; self.workers.len()]);
        let size = self.dtype.size();
        let (my_start, my_len) = self.part(bucket, self.me);
        for part in &own {
            mine.push(Part { data: part.data.slice(0, my_start, my_len)?, ..*part });
        }
        for (q, worker) in self.others() {
            for _ in 0..counts[q].max(1) {
                parts.push(transport.post_recv(worker, self.channel(0), my_len * size, &self.device)?);
            }
            let (start, len) = self.part(bucket, q);
            sums[q] = Some(transport.post_recv(worker, self.channel(1), len * size, &self.device)?);
            for part in &own {
                let data = part.data.slice(0, start, len)?;
                self.send(transport, worker, 0, (part.mb, part.samples), &data)?;
            }
            if own.is_empty() {
                let nothing = Tensor::zeros(&[0], self.dtype, &self.device)?;
                self.send(transport, worker, 0, (0, 0), &nothing)?;
            }
        }
        self.moving.push(Moving { parts, own: mine, sum: None, sums });
        Ok(())
    }

    /// Adds up the part that belongs here of the first bucket that is not summed, and sends the sum to all.
    fn add_up(&mut self, transport: &mut dyn Transport) -> Result<()> {
        let bucket = self.summed;
        let Some(moving) = self.moving.get_mut(bucket) else { return Ok(()) };
        let (tickets, mut parts) = (std::mem::take(&mut moving.parts), std::mem::take(&mut moving.own));
        for ticket in tickets {
            let (header, data) = self.received(transport, ticket, None)?;
            parts.push(Part { mb: header.mb as usize, samples: header.version as usize, data });
        }
        parts.retain(|part| part.samples > 0);
        parts.sort_by_key(|part| part.mb);
        let total: usize = parts.iter().map(|part| part.samples).sum();
        let mut sum: Option<Tensor> = None;
        for Part { samples, data, .. } in parts {
            let part = if self.mean { data.affine(samples as f64 / total as f64, 0.0)? } else { data };
            match &mut sum {
                None => sum = Some(part),
                Some(sum) => sum.accumulate(&part)?,
            }
        }
        let sum = sum.ok_or_else(|| Error::schedule("an update without micro-batches"))?.contiguous()?;
        for (_, worker) in self.others() {
            self.send(transport, worker, 1, (bucket, 0), &sum)?;
        }
        self.moving[bucket].sum = Some(sum);
        self.summed += 1;
        Ok(())
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
        let numbers = mine.encode(self.slots, &by[self.me]);
        let text = Tensor::from_host(&numbers, &[numbers.len()], &self.device)?;
        let mut posted = Vec::new();
        for (q, worker) in self.others() {
            let bytes = (self.slots + by[q].len() * (NUMBERS + stats)) * size_of::<f64>();
            posted.push((q, transport.post_recv(worker, self.channel(2), bytes, &self.device)?));
            self.send(transport, worker, 2, (q, 0), &text)?;
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
            let numbers = self.received(transport, ticket, None)?.1.to_host::<f64>()?;
            mine.merge(Notes::decode(&numbers, self.slots, &by[q], stats)?);
        }
        Ok(mine)
    }

    /// The gradients of a bucket's slots, one after the other; zero where there is none.
    fn flat(&self, bucket: usize, grads: Vec<Option<Tensor>>) -> Result<Tensor> {
        let part = |(slot, grad): (&Slot, Option<Tensor>)| {
            let elements = slot.shape.iter().product();
            match grad {
                Some(g) => g.contiguous()?.reshape(&[elements]),
                None => Tensor::zeros(&[elements], self.dtype, &self.device),
            }
        };
        let parts = self.buckets[bucket].slots.iter().zip(grads).map(part).collect::<Result<Vec<_>>>()?;
        match <[Tensor; 1]>::try_from(parts) {
            Ok([one]) => Ok(one),
            Err(parts) => Tensor::concat(&parts, 0),
        }
    }

    /// Where the part of worker number `q` begins, and how long it is.
    fn part(&self, bucket: usize, q: usize) -> (usize, usize) {
        let (n, of) = (self.buckets[bucket].elements, self.workers.len());
        let start = n * q / of;
        (start, n * (q + 1) / of - start)
    }

    /// Parts, sums and notes have channels of their own, on each of which messages come in one order.
    fn channel(&self, which: u32) -> Channel {
        Channel(CHANNEL - 3 * self.stage as u32 - which)
    }

    /// `number` and `samples` tell the receiver what it is.
    fn send(
        &mut self,
        transport: &mut dyn Transport,
        to: usize,
        which: u32,
        (number, samples): (usize, usize),
        tensor: &Tensor,
    ) -> Result<()> {
        let header = Header {
            edge: which,
            backward: true,
            mb: number as u64,
            version: samples as u64,
            dtype: tensor.dtype(),
            shape: tensor.shape().to_vec(),
        };
        self.sends.push_back(transport.send(to, self.channel(which), header, tensor)?);
        Ok(())
    }

    fn received(
        &self,
        transport: &mut dyn Transport,
        ticket: Ticket,
        number: Option<usize>,
    ) -> Result<(Header, Tensor)> {
        let (header, tensor) =
            transport.wait(ticket)?.ok_or_else(|| Error::transport("a receive without a message"))?;
        match number {
            Some(number) if header.mb != number as u64 => {
                Err(Error::transport(format!("the sum of bucket {number} expected, got that of {}", header.mb)))
                    .context(|| format!("stage {}", self.stage))
            }
            _ => Ok((header, tensor)),
        }
    }
}

/// Numbers of a note on each micro-batch, before its statistics.
const NUMBERS: usize = 4;

impl Notes {
    /// What there is to tell of a worker's shares.
    pub fn new(
        shares: &[Share],
        measured: Vec<Measured>,
        stats: BTreeMap<MicroBatch, Vec<f64>>,
        slots: usize,
    ) -> Notes {
        let present = (0..slots).map(|slot| shares.iter().any(|s| s.grads.get(slot).is_some())).collect();
        Notes { measured, stats, present }
    }

    /// Which slots have a gradient on any worker.
    pub fn present(&self) -> &[bool] {
        &self.present
    }

    fn merge(&mut self, other: Notes) {
        self.measured.extend(other.measured);
        self.stats.extend(other.stats);
        self.present.resize(self.present.len().max(other.present.len()), false);
        self.present.iter_mut().zip(other.present).for_each(|(a, b)| *a |= b);
    }

    fn encode(&self, slots: usize, mbs: &[MicroBatch]) -> Vec<f64> {
        let mut out: Vec<f64> =
            (0..slots).map(|s| if self.present.get(s).copied().unwrap_or(false) { 1.0 } else { 0.0 }).collect();
        for mb in mbs {
            let numbers = self.measured.iter().find(|m| m.mb == *mb).map_or([0.0; NUMBERS], |m| {
                // 1: measured; 2: and right answers counted.
                [if m.correct.is_some() { 2.0 } else { 1.0 }, m.loss, m.total, m.correct.unwrap_or(0.0)]
            });
            out.extend(numbers);
            out.extend(self.stats.get(mb).into_iter().flatten());
        }
        out
    }

    fn decode(numbers: &[f64], slots: usize, mbs: &[MicroBatch], stats: usize) -> Result<Notes> {
        let want = slots + mbs.len() * (NUMBERS + stats);
        if numbers.len() != want {
            return Err(Error::transport(format!("a note of {want} numbers expected, got {}", numbers.len())));
        }
        let (present, rest) = numbers.split_at(slots);
        let mut notes = Notes { present: present.iter().map(|&p| p > 0.0).collect(), ..Notes::default() };
        for (&mb, of_mb) in mbs.iter().zip(rest.chunks_exact(NUMBERS + stats)) {
            let (measured, stats) = of_mb.split_at(NUMBERS);
            if let [kind, loss, total, correct] = *measured
                && kind > 0.0
            {
                notes.measured.push(Measured { mb, loss, total, correct: (kind > 1.0).then_some(correct) });
            }
            notes.stats.insert(mb, stats.to_vec());
        }
        Ok(notes)
    }
}
