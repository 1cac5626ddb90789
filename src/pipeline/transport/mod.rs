//! Messages between workers: over threads of one process, or over MPI.
pub mod header;
mod launch;
pub mod launcher;
mod links;
#[cfg(feature = "mpi")]
pub mod mpi;
pub mod threads;

use crate::{
    Error, Result,
    pipeline::status::Status,
    tensor::{Device, Tensor},
};
pub use header::Header;
pub use launch::launch;
pub(super) use links::{CHANNEL, header as header_of};
pub use links::{Links, Together, measure_links};
use std::sync::Arc;

/// A started send or receive, to be waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// Where messages of one edge and direction flow: first in, first out. Derived from the edge, never from the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Channel(pub u32);

/// Ends the job from any thread: see [`Transport::aborter`].
pub type Aborter = Arc<dyn Fn(&Error) + Send + Sync>;

/// A worker's connection to the others. All calls return at once but `wait`, `all_gather` and `finish`, which fail (rather than
/// wait for ever) as soon as another worker has failed. One that is dropped without `finish` counts as failed.
pub trait Transport: Send {
    /// This worker.
    fn rank(&self) -> usize;
    /// The number of workers.
    fn size(&self) -> usize;
    /// The host of each worker, numbered from 0 in the order of their first workers. Workers of a host are those that can share memory:
    /// over MPI, whom `MPI_Comm_split_type` with `MPI_COMM_TYPE_SHARED` puts together; threads of a process are all on one.
    fn hosts(&self) -> &[usize];
    /// This worker's slot on the status page.
    fn status(&self) -> &Status;
    /// Starts sending a contiguous tensor to `to`; its memory is held until it is on its way.
    ///
    /// # Errors
    /// If the tensor is not contiguous or not what `header` says, or there is no worker `to`.
    fn send(&mut self, to: usize, channel: Channel, header: Header, tensor: &Tensor) -> Result<Ticket>;
    /// Starts receiving the next message of `channel` from `from`, of at most `max_bytes` bytes of data, into a pooled buffer of
    /// `device`. Of several posted receives of a channel the first gets the first message, whichever is waited for first.
    ///
    /// # Errors
    /// If there is no worker `from`.
    fn post_recv(&mut self, from: usize, channel: Channel, max_bytes: usize, device: &Device) -> Result<Ticket>;
    /// Waits for a send (`None`) or a receive (the message), once.
    ///
    /// # Errors
    /// If another worker has failed, the message is longer than announced, or the ticket is unknown or used up.
    fn wait(&mut self, ticket: Ticket) -> Result<Option<(Header, Tensor)>>;
    /// Whether `wait` would return at once.
    fn test(&mut self, ticket: Ticket) -> Result<bool>;
    /// Gives every worker the bytes of all of them, in order of rank. All workers call it in the same order.
    fn all_gather(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>>;
    /// Seconds that the thread which moves this worker's messages had on a core so far; `None` if it has none of its own.
    ///
    /// # Errors
    /// If that thread has ended.
    fn seconds_of_communication(&mut self) -> Result<Option<f64>> {
        Ok(None)
    }
    /// Tells all others that this worker failed, so that they fail too. Over MPI it prints the error and ends the job: it does
    /// not return.
    fn abort(&mut self, error: &Error);
    /// What `abort` does, for another thread (a watchdog).
    fn aborter(&self) -> Aborter;
    /// The clean end, after the last message was waited for; over MPI all workers come here together.
    fn finish(&mut self) -> Result<()>;
}

/// Refuses what no transport could deliver.
fn check_send(size: usize, to: usize, channel: Channel, header: &Header, tensor: &Tensor) -> Result<()> {
    check_peer(size, to, channel)?;
    if header.shape != tensor.shape() || header.dtype != tensor.dtype() {
        return Err(Error::transport(format!(
            "send to worker {to} on channel {}: the header says {}{:?}, the tensor is {}{:?}",
            channel.0,
            header.dtype,
            header.shape,
            tensor.dtype(),
            tensor.shape()
        )));
    }
    if !tensor.is_contiguous() {
        return Err(Error::transport(format!(
            "send to worker {to} on channel {}: the tensor {tensor:?} is not contiguous",
            channel.0
        )));
    }
    Ok(())
}

fn check_peer(size: usize, peer: usize, channel: Channel) -> Result<()> {
    if peer < size {
        return Ok(());
    }
    Err(Error::transport(format!("channel {}: there is no worker {peer}, only {size} workers", channel.0)))
}

fn unknown_ticket(rank: usize, ticket: Ticket) -> Error {
    Error::transport(format!("worker {rank}: nothing is outstanding under ticket {}", ticket.0))
}

/// The receiver's check of what has arrived against what was announced.
fn check_length(header: &Header, from: usize, channel: Channel, max_bytes: usize) -> Result<()> {
    if header.data_bytes() <= max_bytes {
        return Ok(());
    }
    Err(Error::transport(format!(
        "message from worker {from} on channel {} (micro-batch {}): {}{:?} has {} bytes, at most {max_bytes} were expected",
        channel.0,
        header.mb,
        header.dtype,
        header.shape,
        header.data_bytes()
    )))
}
