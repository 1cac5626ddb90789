//! How all workers end a run at the same minibatch without waiting for each other.
use super::transport::{Channel, Header, Ticket, Transport};
use crate::{
    Error, Result,
    tensor::{DType, Device, Tensor},
};
use std::collections::VecDeque;

/// Far from the channels of edges, which are numbered from 0, and below the largest tag that every MPI has.
const CHANNEL: Channel = Channel(16_382);

/// Words that may still be on their way to each of the others before the leader waits for the oldest. It is never that far
/// ahead: it has no more minibatches in flight than there are stages.
const UNDER_WAY: usize = 64;

/// One worker leads, of the first stage: it is ahead of all others. Before each minibatch it says to every other whether the
/// minibatch `ahead` minibatches later is run. So the others have that word long before they need it, and nobody waits for it; the
/// run ends `ahead` minibatches after it was told to stop. `ahead` should be the number of minibatches that are in flight at once.
///
/// The other way every worker says to the leader, before each minibatch, whether it was told to stop itself. The leader listens
/// `ahead` minibatches later, when that word must have come.
pub struct Lead {
    device: Device,
    leader: usize,
    ahead: u64,
    /// Minibatches asked for.
    asked: u64,
    /// Words of the leader that were received, or sent.
    words: u64,
    /// On the leader: words of each of the others that were received, and the receives of the next ones if they were posted.
    heard: u64,
    posted: Vec<Ticket>,
    /// Whether one of them, always the last, was to stop; on the leader: before which of the minibatches asked for.
    stop: Option<u64>,
    /// Sends that may not have ended, oldest first.
    sent: VecDeque<Ticket>,
    /// The words: stop, and go on.
    tensors: [Tensor; 2],
}

impl Lead {
    /// Of a run in which nothing was asked for yet. All workers must give the same `leader` and `ahead`.
    ///
    /// # Errors
    /// If the device has no memory.
    pub fn new(device: &Device, leader: usize, ahead: u64) -> Result<Lead> {
        let word = |go: u8| Tensor::from_host(&[go], &[1], device);
        let tensors = [word(0)?, word(1)?];
        Ok(Lead {
            device: device.clone(),
            leader,
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
        if transport.rank() != self.leader {
            self.send(transport, self.leader, number, !stop)?;
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
            for to in self.others(transport) {
                self.send(transport, to, self.words, self.stop.is_none())?;
            }
            self.words += 1;
        }
        Ok(self.stop.is_none_or(|at| number < at))
    }

    /// On the leader: all other workers.
    fn others(&self, transport: &dyn Transport) -> impl Iterator<Item = usize> + use<> {
        let leader = self.leader;
        (0..transport.size()).filter(move |&w| w != leader)
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
            for from in self.others(transport) {
                self.posted.push(transport.post_recv(from, CHANNEL, 1, &self.device)?);
            }
        }
        Ok(())
    }

    /// The next word of each of the others: whether one was told to stop.
    fn hear(&mut self, transport: &mut dyn Transport) -> Result<bool> {
        self.post(transport)?;
        let mut stop = false;
        for (from, ticket) in self.others(transport).zip(std::mem::take(&mut self.posted)) {
            stop |= !self.word(transport, ticket, from, self.heard)?;
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
        let ticket = transport.post_recv(self.leader, CHANNEL, 1, &self.device)?;
        let goes_on = self.word(transport, ticket, self.leader, self.words)?;
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
        if transport.rank() == self.leader {
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
