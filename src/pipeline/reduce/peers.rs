//! Messages between the workers of a stage.
use crate::{
    Error, Result,
    pipeline::transport::{Channel, Header, Ticket, Transport},
    tensor::{DType, Device, Tensor},
};
use std::collections::VecDeque;

/// The first channel of stage 0; below it come its others, then those of stage 1. Below the channel of
/// [`Lead`](crate::pipeline::lead::Lead), far from those of edges.
const FIRST: u32 = 16_381;
/// Channels of a stage.
const CHANNELS: u32 = 5;

/// One worker's connection to the others of its stage.
pub(super) struct Peers {
    stage: usize,
    workers: Vec<usize>,
    /// Which of them this is.
    pub me: usize,
    pub device: Device,
    sends: VecDeque<Ticket>,
}

/// Where messages of one kind flow, on each of which they come in one order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    /// Parts of gradients.
    Parts = 0,
    /// Sums of them.
    Sums = 1,
    /// Notes.
    Notes = 2,
    /// Parts of what a second sum adds up.
    MoreParts = 3,
    /// Its sums.
    MoreSums = 4,
}

impl Peers {
    pub fn new(stage: usize, workers: &[usize], me: usize, device: &Device) -> Peers {
        Peers { stage, workers: workers.to_vec(), me, device: device.clone(), sends: VecDeque::new() }
    }

    /// How many workers the stage has.
    pub fn count(&self) -> usize {
        self.workers.len()
    }

    /// The numbers of the others within the stage.
    pub fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let me = self.me;
        (0..self.workers.len()).filter(move |&q| q != me)
    }

    /// `number` and `samples` tell worker `to` of the stage what it is.
    pub fn send(
        &mut self,
        transport: &mut dyn Transport,
        to: usize,
        lane: Lane,
        (number, samples): (usize, usize),
        tensor: &Tensor,
    ) -> Result<()> {
        let header = Header {
            edge: lane as u32,
            backward: true,
            mb: number as u64,
            version: samples as u64,
            dtype: tensor.dtype(),
            shape: tensor.shape().to_vec(),
        };
        self.sends.push_back(transport.send(self.worker(to)?, self.channel(lane), header, tensor)?);
        Ok(())
    }

    /// Gets ready for the next message of worker `from` of the stage, of at most `elements` elements.
    pub fn expect(
        &self,
        transport: &mut dyn Transport,
        from: usize,
        lane: Lane,
        (elements, dtype): (usize, DType),
    ) -> Result<Ticket> {
        transport.post_recv(self.worker(from)?, self.channel(lane), elements * dtype.size(), &self.device)
    }

    /// The message of a ticket.
    pub fn received(&self, transport: &mut dyn Transport, ticket: Ticket) -> Result<(Header, Tensor)> {
        transport.wait(ticket)?.ok_or_else(|| Error::transport("a receive without a message"))
    }

    /// Waits until all that was sent is on its way.
    pub fn flush(&mut self, transport: &mut dyn Transport) -> Result<()> {
        while let Some(ticket) = self.sends.pop_front() {
            transport.wait(ticket)?;
        }
        Ok(())
    }

    /// Lets go of what was sent so far and is on its way, in order. Never waits.
    pub fn reap(&mut self, transport: &mut dyn Transport) -> Result<()> {
        while let Some(&ticket) = self.sends.front() {
            if !transport.test(ticket)? {
                break;
            }
            self.sends.pop_front();
            transport.wait(ticket)?;
        }
        Ok(())
    }

    /// Worker `from` of the stage gives all others its tensor in place of theirs.
    pub fn spread(
        &mut self,
        transport: &mut dyn Transport,
        from: usize,
        lane: Lane,
        number: usize,
        tensor: &mut Tensor,
    ) -> Result<()> {
        if from != self.me {
            let ticket = self.expect(transport, from, lane, (tensor.len(), tensor.dtype()))?;
            *tensor = self.received(transport, ticket)?.1;
            return Ok(());
        }
        let whole = tensor.contiguous()?;
        self.others().try_for_each(|q| self.send(transport, q, lane, (number, 0), &whole))
    }

    fn worker(&self, q: usize) -> Result<usize> {
        let worker = self.workers.get(q).copied();
        worker.ok_or_else(|| Error::schedule(format!("stage {} has no worker number {q}", self.stage)))
    }

    fn channel(&self, lane: Lane) -> Channel {
        Channel(FIRST - CHANNELS * self.stage as u32 - lane as u32)
    }
}
