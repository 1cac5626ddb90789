//! `all_gather` with messages of the control communicator: lengths first, then the bytes. Nothing in it blocks.
use super::{
    comm::{Key, Options, pieces},
    ffi::{Held, Lane, Memory, Outstanding, Peer},
};
use crate::{Error, Result};

/// An `all_gather` under way. All workers make them in the same order, one at a time.
pub(super) struct Gather {
    id: u64,
    rank: usize,
    own_size: Held,
    /// By rank: the lengths of the others (not of this worker) on their way,
    sizes: Vec<Option<Held>>,
    /// and the bytes of all.
    parts: Vec<Option<Held>>,
    left: usize,
}

const TAG: usize = 0;
const SIZE_BYTES: usize = 8;

impl Gather {
    /// Starts one; true: there is nobody else, so it is done.
    pub(super) fn start(
        id: u64,
        bytes: Vec<u8>,
        outstanding: &mut Outstanding<Key>,
        options: Options,
    ) -> Result<(Gather, bool)> {
        let (rank, size) = (outstanding.mpi().rank(), outstanding.mpi().size());
        let len = bytes.len();
        let own_size = outstanding.hold(Memory::Bytes((len as u64).to_le_bytes().to_vec()))?;
        let own = outstanding.hold(Memory::Bytes(bytes))?;
        let (mut sizes, mut parts, mut left) = (vec![None; size], vec![None; size], 0);
        parts[rank] = Some(own);
        for peer in (0..size).filter(|&r| r != rank) {
            let held = outstanding.hold(Memory::Bytes(vec![0; SIZE_BYTES]))?;
            sizes[peer] = Some(held);
            outstanding.receive(held, 0..SIZE_BYTES, at(peer), Key::GatherSize(peer))?;
            outstanding.send(own_size, 0..SIZE_BYTES, at(peer), options.synchronous, Key::GatherSent)?;
            left += 2;
            for piece in pieces(len, options.piece) {
                outstanding.send(own, piece, at(peer), options.synchronous, Key::GatherSent)?;
                left += 1;
            }
        }
        Ok((Gather { id, rank, own_size, sizes, parts, left }, left == 0))
    }

    /// Its ticket.
    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// One of its operations has ended; true: the last.
    pub(super) fn ended(
        &mut self,
        key: Key,
        bytes: usize,
        outstanding: &mut Outstanding<Key>,
        options: Options,
    ) -> Result<bool> {
        self.left -= 1;
        if let Key::GatherSize(peer) = key {
            let size = self.sizes[peer].take().and_then(|held| outstanding.release(held));
            let Some(Memory::Bytes(size)) = size else { return Err(Error::transport("a length without memory")) };
            let size = <[u8; SIZE_BYTES]>::try_from(&size[..bytes.min(size.len())]).map(u64::from_le_bytes);
            let size = size.ok().and_then(|n| usize::try_from(n).ok());
            let size = size.ok_or_else(|| Error::transport(format!("all_gather: no length from worker {peer}")))?;
            let held = outstanding.hold(Memory::Bytes(vec![0; size]))?;
            self.parts[peer] = Some(held);
            for piece in pieces(size, options.piece) {
                outstanding.receive(held, piece, at(peer), Key::GatherPart)?;
                self.left += 1;
            }
        }
        Ok(self.left == 0)
    }

    /// The bytes of all workers.
    pub(super) fn end(self, outstanding: &mut Outstanding<Key>) -> Result<Vec<Vec<u8>>> {
        outstanding.release(self.own_size);
        let rank = self.rank;
        let take = |(from, held): (usize, Option<Held>)| match held.and_then(|h| outstanding.release(h)) {
            Some(Memory::Bytes(bytes)) => Ok(bytes),
            _ => Err(Error::transport(format!("worker {rank}: all_gather without the bytes of worker {from}"))),
        };
        self.parts.into_iter().enumerate().map(take).collect()
    }
}

fn at(rank: usize) -> Peer {
    Peer { lane: Lane::Control, rank, tag: TAG }
}
