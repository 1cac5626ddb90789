//! Messages between workers: over threads of one process, or over MPI.
pub mod header;

use crate::{
    Result,
    tensor::{Device, Tensor},
};
pub use header::Header;

/// A started send or receive, to be waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// Where messages of one edge and direction flow: first in, first out. Derived from the edge, never from the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Channel(pub u32);

/// A worker's connection to the others. All calls return at once but `wait` and `all_gather`, which fail (rather than wait for
/// ever) as soon as another worker has failed.
pub trait Transport: Send {
    /// This worker.
    fn rank(&self) -> usize;
    /// The number of workers.
    fn size(&self) -> usize;
    /// Starts sending a contiguous tensor to `to`; it is held until `wait`.
    fn send(&mut self, to: usize, channel: Channel, header: Header, tensor: &Tensor) -> Result<Ticket>;
    /// Starts receiving the next message of `channel` from `from`, of at most `max_bytes` bytes of data, into a pooled buffer of
    /// `device`.
    fn post_recv(&mut self, from: usize, channel: Channel, max_bytes: usize, device: &Device) -> Result<Ticket>;
    /// Waits for a send (`None`) or a receive (the message).
    fn wait(&mut self, ticket: Ticket) -> Result<Option<(Header, Tensor)>>;
    /// Whether `wait` would return at once.
    fn test(&mut self, ticket: Ticket) -> Result<bool>;
    /// Gives every worker the bytes of all of them, in order of rank. All workers call it in the same order.
    fn all_gather(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>>;
    /// Tells all others that this worker failed, so that they fail too.
    fn abort(&mut self, error: &crate::Error);
}
