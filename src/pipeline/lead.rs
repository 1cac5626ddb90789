//! How all workers end a run at the same minibatch without waiting for each other.
use super::transport::{Channel, Header, Ticket, Transport};
use crate::{
    Error, Result,
    tensor::{DType, Device, Tensor},
};
use std::collections::VecDeque;

/// Far from the channels of edges, which are numbered from 0, and below the largest tag that every MPI has.
const CHANNEL: Channel = Channel(16_382);

/// Minibatches for which the first worker's word may still be on its way to one of the others. The first worker is never
/// further ahead than there are stages, but if it is, it waits.
const AHEAD: usize = 64;

/// Before each minibatch the first worker says to every other whether it is run. The others wait for that word, which costs
/// nothing: they would wait for the minibatch itself, which comes from there too.
pub struct Lead {
    device: Device,
    /// Word for minibatches whose sends may not have ended, oldest first.
    sent: VecDeque<Ticket>,
    words: [Tensor; 2],
}

impl Lead {
    /// The word of no minibatch has been given.
    pub fn new(device: &Device) -> Result<Lead> {
        let word = |go: u8| Tensor::from_host(&[go], &[1], device);
        Ok(Lead { device: device.clone(), sent: VecDeque::new(), words: [word(0)?, word(1)?] })
    }

    /// Whether minibatch `number` is run; `stop` is whether this worker was asked to stop, which counts on the first one.
    ///
    /// # Errors
    /// If another worker fails, or is at another minibatch.
    pub fn goes_on(&mut self, transport: &mut dyn Transport, number: u64, stop: bool) -> Result<bool> {
        if transport.rank() > 0 {
            let ticket = transport.post_recv(0, CHANNEL, 1, &self.device)?;
            let Some((header, word)) = transport.wait(ticket)? else {
                return Err(Error::transport("a receive without a message"));
            };
            if header.mb != number {
                let got = header.mb;
                return Err(Error::transport(format!("minibatch {number} expected, worker 0 begins minibatch {got}")));
            }
            return Ok(word.to_host::<u8>()? == [1]);
        }
        let word = self.words[usize::from(!stop)].clone();
        for to in 1..transport.size() {
            let header = Header { edge: 0, backward: false, mb: number, version: 0, dtype: DType::U8, shape: vec![1] };
            self.sent.push_back(transport.send(to, CHANNEL, header, &word)?);
        }
        let limit = if stop { 0 } else { AHEAD * transport.size() };
        self.settle(transport, limit)?;
        Ok(!stop)
    }

    /// Waits until at most `limit` words may be on their way.
    fn settle(&mut self, transport: &mut dyn Transport, limit: usize) -> Result<()> {
        while self.sent.len() > limit {
            if let Some(ticket) = self.sent.pop_front() {
                transport.wait(ticket)?;
            }
        }
        Ok(())
    }

    /// Waits until every word has arrived; to be called where all workers have come to the same place.
    ///
    /// # Errors
    /// If another worker fails.
    pub fn finish(&mut self, transport: &mut dyn Transport) -> Result<()> {
        self.settle(transport, 0)
    }
}
