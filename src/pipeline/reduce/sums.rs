//! Sums of gradients over the workers of a stage, bucket by bucket, by messages.
use super::{
    Exchange, Share,
    options::split,
    peers::{Lane, Peers},
};
use crate::{
    Context, Error, Result,
    autograd::Grads,
    pipeline::{
        schedule::MicroBatch,
        transport::{Ticket, Transport},
        weights::Slot,
    },
    tensor::{DType, Tensor},
};
use std::collections::BTreeMap;

/// Bytes of a bucket: enough for a link's bandwidth, little enough to be on its way early. A larger parameter is one by itself.
const BUCKET: usize = 4 << 20;

/// Parameters that travel together.
struct Bucket {
    slots: Vec<Slot>,
    elements: usize,
}

/// A part of a share, or of the sum of several.
struct Part {
    /// The micro-batch, or the first of them.
    mb: MicroBatch,
    samples: usize,
    data: Tensor,
}

/// A bucket under way.
struct Moving {
    /// What is done: the reduce-scatter, a step a level, then the all-gather, back through the levels.
    steps: usize,
    /// By level: parts of other workers.
    parts: Vec<Vec<Ticket>>,
    /// By level and place in its group: sums of other workers; `None` for this one.
    sums: Vec<Vec<Option<Ticket>>>,
    /// This worker's parts of what the next step adds up.
    own: Vec<Part>,
    /// The sum of what this worker's range is now, once it is made.
    sum: Option<Tensor>,
}

/// One worker's side of the sums of a stage.
pub(super) struct Sums {
    peers: Peers,
    lanes: [Lane; 2],
    /// This worker's group at each level.
    levels: Vec<Vec<usize>>,
    /// Whether shares are averaged, each weighted by its samples, instead of added up.
    mean: bool,
    buckets: Vec<Bucket>,
    dtype: DType,
    /// What numbers travel as.
    wire: DType,
    /// Gradients that a backward pass under way has made, by slot, of buckets that are not complete.
    offered: BTreeMap<usize, Tensor>,
    /// The first buckets of the next update.
    moving: Vec<Moving>,
}

impl Sums {
    /// Over `peers`, of the gradients of `slots`, in the order of the graph. `levels` are this worker's
    /// [groups](super::options::AllReduce::levels).
    pub fn new(
        peers: Peers,
        lanes: [Lane; 2],
        levels: Vec<Vec<usize>>,
        mean: bool,
        slots: &[Slot],
        [dtype, wire]: [DType; 2],
    ) -> Sums {
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
        Sums { peers, lanes, levels, mean, buckets, dtype, wire, offered: BTreeMap::new(), moving: Vec::new() }
    }

    /// What this worker works on at each level, and at the end: first element and length within the bucket.
    fn ranges(&self, bucket: usize) -> Vec<(usize, usize)> {
        let mut ranges = vec![(0, self.buckets[bucket].elements)];
        for group in &self.levels {
            let (start, len) = ranges[ranges.len() - 1];
            let place = group.iter().position(|&q| q == self.peers.me).unwrap_or(0);
            let (from, part) = split(len, place, group.len());
            ranges.push((start + from, part));
        }
        ranges
    }

    /// Gets ready for all that comes of the next bucket, and sends this worker's parts of it to those whom they belong to: `counts`
    /// parts of each worker, at least one, which is empty if it has no share.
    fn start(&mut self, transport: &mut dyn Transport, own: Vec<Part>, counts: &[usize]) -> Result<()> {
        let bucket = self.moving.len();
        let ranges = self.ranges(bucket);
        let (mut parts, mut sums) = (Vec::new(), Vec::new());
        for (level, group) in self.levels.iter().enumerate() {
            let (mut parts_here, mut sums_here) = (Vec::new(), vec![None; group.len()]);
            for (place, &q) in group.iter().enumerate().filter(|(_, q)| **q != self.peers.me) {
                let expected = if level == 0 { counts[q].max(1) } else { 1 };
                for _ in 0..expected {
                    let part = (ranges[level + 1].1, self.wire);
                    parts_here.push(self.peers.expect(transport, q, self.lanes[0], part)?);
                }
                let (_, len) = split(ranges[level].1, place, group.len());
                sums_here[place] = Some(self.peers.expect(transport, q, self.lanes[1], (len, self.wire))?);
            }
            parts.push(parts_here);
            sums.push(sums_here);
        }
        self.moving.push(Moving { steps: 0, parts, sums, own: Vec::new(), sum: None });
        self.send_parts(transport, bucket, 0, &own)
    }

    /// Sends what belongs to the others of the group of `level` of these parts of this worker's range there, which are as they
    /// travel, and keeps its own.
    fn send_parts(&mut self, transport: &mut dyn Transport, bucket: usize, level: usize, parts: &[Part]) -> Result<()> {
        let len = self.ranges(bucket)[level].1;
        let group = &self.levels[level];
        for (place, &q) in group.iter().enumerate() {
            let (start, len) = split(len, place, group.len());
            let part = |p: &Part| Ok(Part { data: p.data.slice(0, start, len)?, ..*p });
            let mut for_q = parts.iter().map(part).collect::<Result<Vec<_>>>()?;
            if q == self.peers.me {
                // What is added up is what is sent, whoever adds it up.
                for p in &mut for_q {
                    p.data = p.data.cast(self.dtype)?;
                }
                self.moving[bucket].own = for_q;
                continue;
            }
            if for_q.is_empty() {
                for_q.push(Part { mb: 0, samples: 0, data: Tensor::zeros(&[0], self.wire, &self.peers.device)? });
            }
            for Part { mb, samples, data } in for_q {
                self.peers.send(transport, q, self.lanes[0], (mb, samples), &data)?;
            }
        }
        Ok(())
    }

    /// All steps of a bucket: there and back through the levels.
    fn steps(&self) -> usize {
        2 * self.levels.len()
    }

    /// Does all that what has arrived allows, a step of a bucket always after that of the buckets before it, so that messages keep
    /// their order.
    fn go_on(&mut self, transport: &mut dyn Transport) -> Result<()> {
        let mut most = self.steps();
        for bucket in 0..self.moving.len() {
            while self.moving[bucket].steps < most && self.is_ready(transport, bucket)? {
                self.advance(transport, bucket)?;
            }
            most = self.moving[bucket].steps;
            if most == 0 {
                break;
            }
        }
        Ok(())
    }

    /// Whether the next step of a bucket has all that it needs.
    fn is_ready(&self, transport: &mut dyn Transport, bucket: usize) -> Result<bool> {
        let Moving { steps, parts, sums, .. } = &self.moving[bucket];
        let level = (*steps).min(self.steps() - 1 - *steps);
        let tickets: Vec<Ticket> = if *steps < self.levels.len() {
            parts[level].clone()
        } else {
            sums[level].iter().flatten().copied().collect()
        };
        for ticket in tickets {
            if !transport.test(ticket)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The next step of a bucket, for which it waits.
    fn advance(&mut self, transport: &mut dyn Transport, bucket: usize) -> Result<()> {
        let step = self.moving[bucket].steps;
        let level = step.min(self.steps() - 1 - step);
        // What the others of a group are to get at the end of the step.
        let next = if step < self.levels.len() {
            let sum = self.add_up(transport, bucket, level)?;
            if level + 1 < self.levels.len() {
                self.send_parts(transport, bucket, level + 1, sum.as_slice())?;
                None
            } else {
                let sum = sum.ok_or_else(|| Error::schedule("an update without micro-batches"))?;
                self.moving[bucket].sum = Some(sum.data.cast(self.dtype)?);
                Some((level, sum.data))
            }
        } else {
            let whole = self.gather(transport, bucket, level)?;
            self.moving[bucket].sum = Some(whole.clone());
            level.checked_sub(1).map(|below| Ok::<_, Error>((below, whole.cast(self.wire)?))).transpose()?
        };
        if let Some((level, sum)) = next {
            let me = self.peers.me;
            for &q in self.levels[level].iter().filter(|q| **q != me) {
                self.peers.send(transport, q, self.lanes[1], (bucket, 0), &sum)?;
            }
        }
        self.moving[bucket].steps += 1;
        Ok(())
    }

    /// The sum of the parts that have come to this worker at a level, as it travels; none if nobody had a share.
    fn add_up(&mut self, transport: &mut dyn Transport, bucket: usize, level: usize) -> Result<Option<Part>> {
        let moving = &mut self.moving[bucket];
        let (tickets, mut parts) = (std::mem::take(&mut moving.parts[level]), std::mem::take(&mut moving.own));
        for ticket in tickets {
            let (header, data) = self.peers.received(transport, ticket)?;
            parts.push(Part { mb: header.mb as usize, samples: header.version as usize, data: data.cast(self.dtype)? });
        }
        parts.retain(|part| part.samples > 0);
        parts.sort_by_key(|part| part.mb);
        let total: usize = parts.iter().map(|part| part.samples).sum();
        let first = parts.first().map(|part| part.mb);
        let mut sum: Option<Tensor> = None;
        for Part { samples, data, .. } in parts {
            let part = if self.mean { data.affine(samples as f64 / total as f64, 0.0)? } else { data };
            match &mut sum {
                None => sum = Some(part),
                Some(sum) => sum.accumulate(&part)?,
            }
        }
        let Some((mb, sum)) = first.zip(sum) else { return Ok(None) };
        Ok(Some(Part { mb, samples: total, data: sum.contiguous()?.cast(self.wire)? }))
    }

    /// The sums of all workers of a group, one after the other.
    fn gather(&mut self, transport: &mut dyn Transport, bucket: usize, level: usize) -> Result<Tensor> {
        let moving = &mut self.moving[bucket];
        let mut mine = moving.sum.take();
        let mut sums = Vec::new();
        for ticket in std::mem::take(&mut moving.sums[level]) {
            let Some(ticket) = ticket else {
                sums.push(mine.take().ok_or_else(|| Error::schedule("a sum that was not made"))?);
                continue;
            };
            let (header, sum) = self.peers.received(transport, ticket)?;
            if header.mb != bucket as u64 {
                return Err(Error::transport(format!(
                    "the sum of bucket {bucket} expected, got that of {}",
                    header.mb
                )));
            }
            sums.push(sum.cast(self.dtype)?);
        }
        Tensor::concat(&sums, 0)
    }

    /// The gradients of a bucket's slots as they travel, one after the other; zero where there is none.
    fn flat(&self, bucket: usize, grads: Vec<Option<Tensor>>) -> Result<Tensor> {
        let part = |(slot, grad): (&Slot, Option<Tensor>)| {
            let elements = slot.shape.iter().product();
            match grad {
                Some(g) => g.contiguous()?.reshape(&[elements]),
                None => Tensor::zeros(&[elements], self.dtype, &self.peers.device),
            }
        };
        let parts = self.buckets[bucket].slots.iter().zip(grads).map(part).collect::<Result<Vec<_>>>()?;
        let flat = match <[Tensor; 1]>::try_from(parts) {
            Ok([one]) => one,
            Err(parts) => Tensor::concat(&parts, 0)?,
        };
        flat.cast(self.wire)
    }
}

impl Exchange for Sums {
    fn reserve(&self, shares: usize) {
        let pool = self.peers.device.pool();
        let both = |elements: usize, count: usize| {
            pool.reserve(elements * self.dtype.size(), count);
            if self.wire != self.dtype {
                pool.reserve(elements * self.wire.size(), count);
            }
        };
        for (number, bucket) in self.buckets.iter().enumerate() {
            // What was sent, and the sums of all together.
            both(bucket.elements, shares + 2);
            for (group, (_, len)) in self.levels.iter().zip(self.ranges(number)) {
                // What came, the sum, and the one before that others may still be reading.
                (0..group.len())
                    .for_each(|place| both(split(len, place, group.len()).1, (group.len() - 1) * shares + 3));
                both(len, 2);
            }
            bucket.slots.iter().for_each(|slot| both(slot.shape.iter().product(), 2));
        }
    }

    fn offer(
        &mut self,
        transport: &mut dyn Transport,
        (mb, samples): (MicroBatch, usize),
        slot: usize,
        grad: &Tensor,
    ) -> Result<()> {
        self.offered.insert(slot, grad.clone());
        let one_each = vec![1; self.peers.count()];
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

    fn begin(&mut self, transport: &mut dyn Transport, mut shares: Vec<Share>, counts: &[usize]) -> Result<()> {
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
        Ok(())
    }

    fn finish(&mut self, transport: &mut dyn Transport, present: &[bool]) -> Result<Grads> {
        loop {
            self.go_on(transport)?;
            // The first step of all that are left: every worker does it, whatever else it has done.
            let left = (0..self.moving.len()).filter(|&b| self.moving[b].steps < self.steps());
            let Some(next) = left.min_by_key(|&b| (self.moving[b].steps, b)) else { break };
            self.advance(transport, next).context(|| format!("bucket {next}"))?;
        }
        let mut sum = Grads::default();
        for (bucket, moving) in self.buckets.iter().zip(std::mem::take(&mut self.moving)) {
            let whole = moving.sum.ok_or_else(|| Error::schedule("a sum that was not made"))?;
            let mut start = 0;
            for slot in &bucket.slots {
                let elements: usize = slot.shape.iter().product();
                if present.get(slot.slot).copied().unwrap_or(false) {
                    sum.add(slot.slot, whole.slice(0, start, elements)?.reshape(&slot.shape)?)?;
                }
                start += elements;
            }
        }
        self.peers.flush(transport)?;
        Ok(sum)
    }
}
