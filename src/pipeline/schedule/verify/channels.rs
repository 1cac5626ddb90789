//! The messages between workers, under one kind of sends.
use super::{Sends, stage::difference};
use crate::pipeline::schedule::{Direction, Message, MicroBatch, Wiring};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// A send and the post that it meets are not of the same message.
pub(super) struct Clash {
    pub(super) posted: Message,
    pub(super) sent: Message,
}

/// One direction of an edge, between two workers.
#[derive(Default)]
struct Channel {
    /// Sends that no post has met yet, or posts that no send has met yet.
    ahead: VecDeque<MicroBatch>,
    /// Which of them.
    ahead_are_sends: bool,
    /// Can be received.
    arrived: BTreeSet<MicroBatch>,
    /// Can be waited for by its sender.
    left: BTreeSet<MicroBatch>,
}

/// Sends that move together.
struct Batch {
    members: Vec<Message>,
    /// Members that have not been sent and posted yet.
    missing: usize,
}

/// All channels.
pub(super) struct Channels {
    pub(super) sends: Sends,
    /// By edge, and by the pair of workers of its messages: values, gradients.
    channels: Vec<Vec<[Channel; 2]>>,
    batches: BTreeMap<usize, Batch>,
    batch_of: BTreeMap<Message, usize>,
    next_batch: usize,
    moved: Vec<Message>,
}

impl Channels {
    pub(super) fn new(wiring: &Wiring, sends: Sends) -> Channels {
        let pairs = |edge| (0..wiring.pairs(edge)).map(|_| Default::default()).collect();
        Channels {
            sends,
            channels: (0..wiring.edges.len()).map(pairs).collect(),
            batches: BTreeMap::new(),
            batch_of: BTreeMap::new(),
            next_batch: 0,
            moved: Vec::new(),
        }
    }

    fn channel(&mut self, m: Message) -> &mut Channel {
        let pairs = &mut self.channels[m.edge];
        let pair = m.mb % pairs.len();
        &mut pairs[pair][usize::from(m.direction == Direction::Backward)]
    }

    /// Forms batches of sends to the same goal.
    pub(super) fn form_batches<G: Ord>(&mut self, sends: Vec<(G, Message)>) {
        if self.sends != Sends::Batched {
            return;
        }
        let mut goals: BTreeMap<G, Vec<Message>> = BTreeMap::new();
        for (goal, m) in sends {
            goals.entry(goal).or_default().push(m);
        }
        for members in goals.into_values() {
            self.batch_of.extend(members.iter().map(|&m| (m, self.next_batch)));
            let missing = members.len();
            self.batches.insert(self.next_batch, Batch { members, missing });
            self.next_batch += 1;
        }
    }

    pub(super) fn send(&mut self, m: Message) -> Result<(), Clash> {
        self.meet(m, true)
    }

    pub(super) fn post(&mut self, m: Message) -> Result<(), Clash> {
        self.meet(m, false)
    }

    /// The next send (or post) of a channel meets the next post (or send), if there is one.
    fn meet(&mut self, m: Message, is_send: bool) -> Result<(), Clash> {
        let channel = self.channel(m);
        if channel.ahead.is_empty() || channel.ahead_are_sends == is_send {
            channel.ahead.push_back(m.mb);
            channel.ahead_are_sends = is_send;
            return Ok(());
        }
        let other = channel.ahead.pop_front().map_or(m, |mb| Message { mb, ..m });
        if other != m {
            let (sent, posted) = if is_send { (m, other) } else { (other, m) };
            return Err(Clash { posted, sent });
        }
        let Some(at) = self.batch_of.remove(&m) else {
            self.moves(m);
            return Ok(());
        };
        let Some(batch) = self.batches.get_mut(&at) else { return Ok(()) };
        batch.missing -= 1;
        if batch.missing == 0 {
            for m in self.batches.remove(&at).map(|b| b.members).unwrap_or_default() {
                self.moves(m);
            }
        }
        Ok(())
    }

    fn moves(&mut self, m: Message) {
        let waits = self.sends != Sends::Buffered;
        let channel = self.channel(m);
        channel.arrived.insert(m.mb);
        if waits {
            channel.left.insert(m.mb);
        }
        self.moved.push(m);
    }

    /// The messages that moved since the last call.
    pub(super) fn take_moved(&mut self) -> Vec<Message> {
        std::mem::take(&mut self.moved)
    }

    /// Receives a message; false if it cannot be received yet.
    pub(super) fn receive(&mut self, m: Message) -> bool {
        self.channel(m).arrived.remove(&m.mb)
    }

    /// Ends the wait for a send; false if it has not left yet.
    pub(super) fn wait(&mut self, m: Message) -> bool {
        self.sends == Sends::Buffered || self.channel(m).left.remove(&m.mb)
    }

    /// A message that was sent, or posted, alone.
    pub(super) fn unmatched(&self) -> Option<Message> {
        let pairs =
            self.channels.iter().enumerate().flat_map(|(edge, pairs)| pairs.iter().map(move |pair| (edge, pair)));
        pairs.into_iter().find_map(|(edge, [values, gradients])| {
            let message = |channel: &Channel, direction| Some(Message { edge, mb: *channel.ahead.front()?, direction });
            message(values, Direction::Forward).or_else(|| message(gradients, Direction::Backward))
        })
    }

    pub(super) fn relative(&self, mbs: usize, out: &mut Vec<isize>) {
        for channel in self.channels.iter().flatten().flatten() {
            let sizes = [channel.ahead.len(), channel.arrived.len(), channel.left.len()];
            out.extend(sizes.map(|n| n as isize));
            out.push(isize::from(channel.ahead_are_sends && !channel.ahead.is_empty()));
            let all = channel.ahead.iter().chain(&channel.arrived).chain(&channel.left);
            out.extend(all.map(|&mb| difference(mb, mbs)));
        }
        for batch in self.batches.values() {
            out.extend([batch.members.len() as isize, batch.missing as isize]);
            for m in &batch.members {
                let backward = isize::from(m.direction == Direction::Backward);
                let waits = isize::from(self.batch_of.contains_key(m));
                out.extend([m.edge as isize, backward, difference(m.mb, mbs), waits]);
            }
        }
    }

    /// The same state, that many micro-batches later.
    pub(super) fn advance(&mut self, mbs: usize) {
        let later = |m: Message| Message { mb: m.mb + mbs, ..m };
        for channel in self.channels.iter_mut().flatten().flatten() {
            channel.ahead.iter_mut().for_each(|mb| *mb += mbs);
            channel.arrived = channel.arrived.iter().map(|mb| mb + mbs).collect();
            channel.left = channel.left.iter().map(|mb| mb + mbs).collect();
        }
        for batch in self.batches.values_mut() {
            batch.members.iter_mut().for_each(|m| *m = later(*m));
        }
        self.batch_of = self.batch_of.iter().map(|(&m, &at)| (later(m), at)).collect();
    }
}
