//! How all workers end a run at the same minibatch without waiting for each other.
use super::transport::{Channel, Header, Ticket, Transport};
use crate::{
    Error, Result,
    tensor::{DType, Device, Tensor},
};
use std::collections::VecDeque;

/// Far from the channels of edges, which are numbered from 0, and below the largest tag that every MPI has.
const CHANNEL: Channel = Channel(16_382);

/// Words that may still be on their way to each of the others before the first worker waits for the oldest. It is never that far
/// ahead: it has no more minibatches in flight than there are stages.
const UNDER_WAY: usize = 64;

/// Before each minibatch the first worker says to every other whether the minibatch `ahead` minibatches later is run. So the
/// others have that word long before they need it, and nobody waits for it; the run ends `ahead` minibatches after it was told
/// to stop. `ahead` should be the number of minibatches that are in flight at once.
///
/// The other way every worker says to the first one, before each minibatch, whether it was told to stop itself. The first worker
/// listens `ahead` minibatches later, when that word must have come.
pub struct Lead {
    device: Device,
    ahead: u64,
    /// Minibatches asked for.
    asked: u64,
    /// Words of the first worker that were received, or sent.
    words: u64,
    /// On the first worker: words of each of the others that were received, and the receives of the next ones if they were posted.
    heard: u64,
    posted: Vec<Ticket>,
    /// Whether one of them, always the last, was to stop; on the first worker: before which of the minibatches asked for.
    stop: Option<u64>,
    /// Sends that may not have ended, oldest first.
    sent: VecDeque<Ticket>,
    /// The words: stop, and go on.
    tensors: [Tensor; 2],
}

impl Lead {
    /// Of a run in which nothing was asked for yet. All workers must give the same `ahead`.
    ///
    /// # Errors
    /// If the device has no memory.
    pub fn new(device: &Device, ahead: u64) -> Result<Lead> {
        let word = |go: u8| Tensor::from_host(&[go], &[1], device);
        let tensors = [word(0)?, word(1)?];
        Ok(Lead {
            device: device.clone(),
            ahead,
            asked: 0,
            words: 0,
            heard: 0,
            posted: Vec::new(),
            stop: None,
            sent: VecDeque::new(),
            tensors,
        })
    }

    /// Whether the next minibatch is run: the same on all workers, who ask before each of them. `stop` is whether this worker was
    /// told to stop.
    ///
    /// # Errors
    /// If another worker fails, or has not asked as often as this one.
    pub fn goes_on(&mut self, transport: &mut dyn Transport, stop: bool) -> Result<bool> {
        let number = self.asked;
        self.asked += 1;
        if transport.rank() > 0 {
            self.send(transport, 0, number, !stop)?;
            // Of the first ones nobody says anything: they are run.
            if number >= self.ahead {
                self.receive(transport)?;
            }
            return Ok(self.stop.is_none());
        }
        let stop = stop | (number >= self.ahead && self.hear(transport)?);
        if self.asked >= self.ahead {
            // For the next time: by then they are here.
            self.post(transport)?;
        }
        if self.stop.is_none() {
            self.stop = stop.then_some(number + self.ahead);
            for to in 1..transport.size() {
                self.send(transport, to, self.words, self.stop.is_none())?;
            }
            self.words += 1;
        }
        Ok(self.stop.is_none_or(|at| number < at))
    }

    fn send(&mut self, transport: &mut dyn Transport, to: usize, mb: u64, go: bool) -> Result<()> {
        let word = self.tensors[usize::from(go)].clone();
        let header = Header { edge: 0, backward: false, mb, version: 0, dtype: DType::U8, shape: vec![1] };
        self.sent.push_back(transport.send(to, CHANNEL, header, &word)?);
        let most = UNDER_WAY * transport.size();
        self.settle(transport, most)
    }

    /// Posts the receives of the next word of each of the others, if they are not.
    fn post(&mut self, transport: &mut dyn Transport) -> Result<()> {
        if self.posted.is_empty() {
            for from in 1..transport.size() {
                self.posted.push(transport.post_recv(from, CHANNEL, 1, &self.device)?);
            }
        }
        Ok(())
    }

    /// The next word of each of the others: whether one was told to stop.
    fn hear(&mut self, transport: &mut dyn Transport) -> Result<bool> {
        self.post(transport)?;
        let mut stop = false;
        for (i, ticket) in std::mem::take(&mut self.posted).into_iter().enumerate() {
            stop |= !self.word(transport, ticket, 1 + i, self.heard)?;
        }
        self.heard += 1;
        Ok(stop)
    }

    /// Word number `want` of worker `from`: whether it is to go on.
    fn word(&self, transport: &mut dyn Transport, ticket: Ticket, from: usize, want: u64) -> Result<bool> {
        let (header, word) = transport.wait(ticket)?.ok_or_else(|| Error::transport("a receive without a message"))?;
        if header.mb != want {
            let got = header.mb;
            return Err(Error::transport(format!("word {want} of worker {from} expected, got word {got}")));
        }
        Ok(word.to_host::<u8>()? != [0])
    }

    fn receive(&mut self, transport: &mut dyn Transport) -> Result<()> {
        if self.stop.is_some() {
            return Ok(());
        }
        let ticket = transport.post_recv(0, CHANNEL, 1, &self.device)?;
        let goes_on = self.word(transport, ticket, 0, self.words)?;
        self.words += 1;
        self.stop = (!goes_on).then_some(self.words);
        Ok(())
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

    /// Sees every word off; to be called at the end, where all workers have asked equally often.
    ///
    /// # Errors
    /// If another worker fails.
    pub fn finish(&mut self, transport: &mut dyn Transport) -> Result<()> {
        if transport.rank() == 0 {
            while self.heard < self.asked {
                self.hear(transport)?;
            }
        } else {
            while self.words < self.asked && self.stop.is_none() {
                self.receive(transport)?;
            }
        }
        self.settle(transport, 0)
    }
}
