//! Workers as MPI ranks, with one communication thread a rank.
//!
//! MPI works only while something calls it, and its safe wrappers end the process on errors; so one thread owns MPI, starts
//! what the worker asks for and looks for what has ended, while the worker computes. A message is two: a header, and the data,
//! which is received straight into a pooled buffer.
//!
//! Two environment variables are for tests, and must be the same on all ranks: `PIPEWRIGHT_MPI_SYNCHRONOUS=1` makes a send end
//! only once its receive has begun, and `PIPEWRIGHT_MPI_PIECE=bytes` sets the length above which a message is sent in pieces.
//! `PIPEWRIGHT_MPI_PANIC=rank:n` lets the communication thread of a rank panic at its n-th command.
mod comm;
mod ffi;
mod gather;

use super::{
    Aborter, Channel, Header, Ticket, Transport, check_peer, check_send,
    launcher::{self, Launched},
    unknown_ticket,
};
use crate::{
    Error, Result,
    aloud::aloud,
    pipeline::{
        faults,
        status::{Doing, Operation, Status},
    },
    tensor::{Device, Tensor},
};
use comm::{Comm, Command, Done, Reply};
use std::{
    collections::{HashMap, HashSet},
    env,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
        mpsc::{self, Receiver, RecvTimeoutError, Sender},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

/// The longest message that is sent in one piece. Longer ones of both directions at once take turns on a TCP connection, since the
/// leave to send one waits behind the other: at 1 Gbit/s 32 MB each way took 541 ms in one piece, 271 ms in pieces of 1 MiB.
const PIECE: usize = 1 << 20;
/// The longest that may be set: MPI counts in C `int`s.
const LONGEST_PIECE: usize = 1 << 30;
/// How long a thread that ends the job waits for the communication thread to do it.
const ABORT_PATIENCE: Duration = Duration::from_secs(2);

/// A rank's connection to the others.
pub struct MpiTransport {
    rank: usize,
    size: usize,
    tags: usize,
    hosts: Vec<usize>,
    status: Status,
    commands: Sender<Command>,
    replies: Receiver<Reply>,
    /// Whether the worker waits for a reply, so that the communication thread may have the core.
    waiting: Arc<AtomicBool>,
    next: u64,
    open: HashSet<u64>,
    /// Ended, not yet waited for.
    ended: HashMap<u64, Result<Done>>,
    thread: Option<JoinHandle<()>>,
}

/// What the communication thread found when it initialised MPI.
struct World {
    rank: usize,
    size: usize,
    tags: usize,
    /// The lowest of the ranks on the same host.
    host: usize,
}

impl MpiTransport {
    /// Joins the job of the launcher that started this process, with all its ranks; `None` if none did.
    ///
    /// # Errors
    /// If MPI cannot be initialised, was before (it can be once in a process), or other ranks do not come to it within the time of
    /// the [watchdog](faults::set_watchdog).
    pub fn from_launcher() -> Result<Option<MpiTransport>> {
        static STARTED: AtomicBool = AtomicBool::new(false);
        let Some(launched) = launcher::detect() else { return Ok(None) };
        let options = options(&launched)?;
        if STARTED.swap(true, Relaxed) {
            return Err(Error::transport("MPI can be started only once in a process"));
        }
        let (commands, inbox) = mpsc::channel();
        let (outbox, replies) = mpsc::channel();
        let (ready, started) = mpsc::channel();
        let waiting = Arc::new(AtomicBool::new(false));
        let is_waiting = waiting.clone();
        let body = move || {
            let mpi = match ffi::Mpi::init() {
                Ok(mpi) => mpi,
                Err(e) => return ready.send(Err(e)).unwrap_or_default(),
            };
            let world = World { rank: mpi.rank(), size: mpi.size(), tags: mpi.tags(), host: mpi.host() };
            ready.send(Ok(world)).unwrap_or_default();
            Comm::new(mpi, options, inbox, outbox, is_waiting).run();
        };
        let thread = thread::Builder::new().name("communication".into()).spawn(body);
        let thread = thread.map_err(|e| Error::transport(format!("no thread for communication: {e}")))?;
        let World { rank, size, tags, host } = begun(&started, faults::watchdog(), launched.rank)??;
        if launched.size.is_some_and(|n| n != size) {
            return Err(Error::transport(format!(
                "{} started {:?} ranks, but MPI knows of {size}: is the program linked to another MPI than mpirun's?",
                launched.by, launched.size
            )));
        }
        let (open, ended, thread) = (HashSet::new(), HashMap::new(), Some(thread));
        let ((status, identity), next) = (Status::of_job(&launched.job, rank, size), 0);
        let hosts = Vec::new();
        let mut transport =
            MpiTransport { rank, size, tags, hosts, status, commands, replies, waiting, next, open, ended, thread };
        let host = host.to_le_bytes();
        let all = transport.all_gather(&[&host[..], identity.text.as_bytes()].concat())?;
        let apart = |bytes: &Vec<u8>| {
            let (host, identity) = bytes.split_at(bytes.len().min(host.len()));
            (host.to_vec(), identity.to_vec())
        };
        let (hosts, identities): (Vec<_>, Vec<_>) = all.iter().map(apart).unzip();
        transport.hosts = numbered(&hosts);
        transport.status = transport.status.shared_by(&identity, &identities);
        Ok(Some(transport))
    }

    fn ask(&mut self, command: impl FnOnce(u64) -> Command) -> Result<u64> {
        let id = self.next;
        self.next += 1;
        self.commands.send(command(id)).map_err(|_| self.gone())?;
        self.open.insert(id);
        Ok(id)
    }

    fn gone(&self) -> Error {
        Error::transport(format!("worker {}: its communication thread has ended", self.rank))
    }

    /// Waits until a ticket has ended.
    fn end_of(&mut self, id: u64) -> Result<Done> {
        self.ended.extend(self.replies.try_iter());
        if !self.ended.contains_key(&id) {
            self.waiting.store(true, Relaxed);
            // It may be in a pause.
            let woken = self.commands.send(Command::Hurry);
            while woken.is_ok() && !self.ended.contains_key(&id) {
                let Ok((id, end)) = self.status.blocked(|| self.replies.recv()) else { break };
                self.ended.insert(id, end);
            }
            self.waiting.store(false, Relaxed);
        }
        self.open.remove(&id);
        self.ended.remove(&id).unwrap_or_else(|| Err(self.gone()))
    }

    fn check_channel(&self, peer: usize, channel: Channel) -> Result<()> {
        check_peer(self.size, peer, channel)?;
        if comm::largest_tag(channel) <= self.tags {
            return Ok(());
        }
        Err(Error::transport(format!("channel {}: this MPI has tags up to {}", channel.0, self.tags)))
    }
}

impl Transport for MpiTransport {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn hosts(&self) -> &[usize] {
        &self.hosts
    }

    fn status(&self) -> &Status {
        &self.status
    }

    fn send(&mut self, to: usize, channel: Channel, header: Header, tensor: &Tensor) -> Result<Ticket> {
        self.check_channel(to, channel)?;
        check_send(self.size, to, channel, &header, tensor)?;
        let (header, tensor) = (header.encode()?, tensor.clone());
        tensor.host_bytes()?;
        self.ask(|id| Command::Send { id, to, channel, header, tensor }).map(Ticket)
    }

    fn post_recv(&mut self, from: usize, channel: Channel, max_bytes: usize, device: &Device) -> Result<Ticket> {
        self.check_channel(from, channel)?;
        if !device.backend().has_data() {
            return Err(Error::device("messages of MPI are data, which this device does not keep"));
        }
        let (buffer, device) = (device.pool().get(max_bytes), device.clone());
        self.ask(|id| Command::Receive { id, from, channel, max_bytes, buffer, device }).map(Ticket)
    }

    fn wait(&mut self, ticket: Ticket) -> Result<Option<(Header, Tensor)>> {
        if !self.open.contains(&ticket.0) {
            return Err(unknown_ticket(self.rank, ticket));
        }
        match self.end_of(ticket.0)? {
            Done::Received(header, tensor) => Ok(Some((header, tensor))),
            Done::Sent | Done::Gathered(_) | Done::Seconds(_) | Done::Finished => Ok(None),
        }
    }

    fn test(&mut self, ticket: Ticket) -> Result<bool> {
        if !self.open.contains(&ticket.0) {
            return Err(unknown_ticket(self.rank, ticket));
        }
        self.ended.extend(self.replies.try_iter());
        Ok(self.ended.contains_key(&ticket.0))
    }

    fn all_gather(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.status.begin(Doing::only(Operation::Gather));
        let bytes = bytes.to_vec();
        let id = self.ask(|id| Command::Gather { id, bytes })?;
        match self.end_of(id)? {
            Done::Gathered(all) => Ok(all),
            _ => Err(Error::transport("all_gather: a reply to something else")),
        }
    }

    fn seconds_of_communication(&mut self) -> Result<Option<f64>> {
        let id = self.ask(|id| Command::Seconds { id })?;
        match self.end_of(id)? {
            Done::Seconds(seconds) => Ok(Some(seconds)),
            _ => Err(Error::transport("seconds_of_communication: a reply to something else")),
        }
    }

    fn abort(&mut self, error: &Error) {
        end_job(&self.status, &self.commands, error);
    }

    fn aborter(&self) -> Aborter {
        let (status, commands) = (self.status.clone(), self.commands.clone());
        Arc::new(move |error| end_job(&status, &commands, error))
    }

    fn finish(&mut self) -> Result<()> {
        self.status.begin(Doing::only(Operation::Finish));
        let id = self.ask(|id| Command::Finish { id })?;
        self.end_of(id)?;
        self.status.leave();
        match self.thread.take().map(JoinHandle::join) {
            Some(Err(_)) => Err(self.gone()),
            Some(Ok(())) | None => Ok(()),
        }
    }
}

impl Drop for MpiTransport {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.abort(&Error::transport("it left before the end"));
        }
    }
}

/// Equal names as equal numbers, in the order in which they come first.
fn numbered(names: &[Vec<u8>]) -> Vec<usize> {
    let mut known: Vec<&Vec<u8>> = Vec::new();
    let number = |name| {
        known.iter().position(|k| *k == name).unwrap_or_else(|| {
            known.push(name);
            known.len() - 1
        })
    };
    names.iter().map(number).collect()
}

/// A launcher that hears of the end forgets what it has not read of our words.
const LAST_WORDS: Duration = Duration::from_millis(150);

/// Prints the error, the first of this process only, and ends all ranks.
fn end_job(status: &Status, commands: &Sender<Command>, error: &Error) {
    static SAID: AtomicBool = AtomicBool::new(false);
    status.leave();
    if !SAID.swap(true, Relaxed) {
        aloud(&format!("pipewright: rank {} ends the job: {error}", status.rank()));
        thread::sleep(LAST_WORDS);
    }
    ffi::abort_if_owner(1);
    if commands.send(Command::Abort).is_ok() {
        thread::sleep(ABORT_PATIENCE);
    }
    // The communication thread is gone or stuck in MPI; a rank that dies ends the job too.
    std::process::abort();
}

/// What the communication thread of this rank found, once all ranks have come to initialise MPI.
fn begun<T>(started: &Receiver<T>, limit: Option<Duration>, rank: usize) -> Result<T> {
    let answer = match limit {
        Some(limit) => started.recv_timeout(limit),
        None => started.recv().map_err(RecvTimeoutError::from),
    };
    answer.map_err(|e| match (e, limit) {
        (RecvTimeoutError::Timeout, Some(limit)) => Error::transport(format!(
            "rank {rank} has waited for {0:.1} s in MPI_Init, the watchdog allows {0:.1} s: it waits for other ranks, of which \
             one is stopped, or ended without MPI_Init",
            limit.as_secs_f64()
        )),
        _ => Error::transport(format!("rank {rank}: the communication thread ended at its start")),
    })
}

fn options(launched: &Launched) -> Result<comm::Options> {
    let bad = |name: &str, text: &str| Error::config(format!("{name}={text}: see the documentation of transport::mpi"));
    let synchronous = match env::var("PIPEWRIGHT_MPI_SYNCHRONOUS").as_deref() {
        Ok("1") => true,
        Ok("0") | Err(_) => false,
        Ok(other) => return Err(bad("PIPEWRIGHT_MPI_SYNCHRONOUS", other)),
    };
    let piece = match env::var("PIPEWRIGHT_MPI_PIECE") {
        Err(_) => PIECE,
        Ok(text) => match text.parse() {
            Ok(n) if (1..=LONGEST_PIECE).contains(&n) => n,
            _ => return Err(bad("PIPEWRIGHT_MPI_PIECE", &text)),
        },
    };
    let panic_at = match env::var("PIPEWRIGHT_MPI_PANIC") {
        Err(_) => None,
        Ok(text) => match text.split_once(':').map(|(rank, n)| (rank.parse::<usize>(), n.parse())) {
            Some((Ok(rank), Ok(n))) => (launched.rank == rank).then_some(n),
            _ => return Err(bad("PIPEWRIGHT_MPI_PANIC", &text)),
        },
    };
    Ok(comm::Options { synchronous, piece, panic_at })
}
