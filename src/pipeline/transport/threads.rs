//! Workers as threads of one process: a message is a handle to a tensor, nothing is copied.
use super::{Aborter, Channel, Header, Ticket, Transport, check_length, check_peer, check_send, unknown_ticket};
use crate::{
    Error, Result,
    pipeline::{
        faults,
        monitor::Monitor,
        status::{Doing, Operation, Status},
    },
    tensor::{Device, Tensor},
};
use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
};

/// How the threads of a world treat each other.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// A send is done only when its receive was posted: the strictest behaviour that MPI allows, for tests.
    pub synchronous: bool,
}

/// Connects `n` workers, to be moved to a thread each.
pub fn world(n: usize) -> Vec<ThreadTransport> {
    world_with(n, Options::default())
}

/// Connects `n` workers as `options` say.
pub fn world_with(n: usize, options: Options) -> Vec<ThreadTransport> {
    let world = Arc::new(World {
        state: Mutex::new(State { present: vec![true; n], ..State::default() }),
        changed: (0..n).map(|_| Condvar::new()).collect(),
        statuses: Status::local(n),
        hosts: vec![0; n],
        options,
    });
    (0..n)
        .map(|rank| ThreadTransport { world: world.clone(), rank, next: 0, gathered: 0, open: HashMap::new() })
        .collect()
}

/// Runs `work` on `n` threads, a worker each, and gives their results in order of rank. Returning counts as the clean end.
///
/// # Errors
/// The error of the worker that failed first, with the places it passed through; a panic is an error too.
pub fn run<T: Send>(
    n: usize,
    options: Options,
    work: impl Fn(&mut ThreadTransport) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    faults::install_panic_hook();
    let transports = world_with(n, options);
    let Some(first) = transports.first() else { return Ok(Vec::new()) };
    let world = first.world.clone();
    let monitor = Monitor::start(world.statuses.clone(), first.aborter())?;
    let run_one = |mut transport: ThreadTransport| {
        let result = work(&mut transport).and_then(|value| transport.finish().map(|()| value));
        result.inspect_err(|e| transport.abort(e))
    };
    // None: panicked; the world knows what it said.
    let mut results: Vec<Option<Result<T>>> = std::thread::scope(|scope| {
        let start = |transport: ThreadTransport| {
            let name = format!("worker {}", transport.rank);
            std::thread::Builder::new().name(name).spawn_scoped(scope, || run_one(transport))
        };
        let threads: Vec<_> = transports.into_iter().map(start).collect();
        let join = |thread: std::io::Result<std::thread::ScopedJoinHandle<Result<T>>>| match thread {
            Ok(thread) => thread.join().ok(),
            Err(e) => Some(Err(Error::transport(format!("a worker's thread cannot be started: {e}")))),
        };
        threads.into_iter().map(join).collect()
    });
    drop(monitor);
    let failed = world.lock().failed.take();
    match failed.map(|f| (f.worker.and_then(|rank| results.swap_remove(rank)), f.why)) {
        Some((Some(Err(e)), _)) => Err(e),
        Some((_, why)) => Err(Error::transport(why)),
        None => results.into_iter().flatten().collect(),
    }
}

/// What the threads share. One lock: a message holds it for well under a microsecond.
struct World {
    state: Mutex<State>,
    /// One for each worker, so that a message wakes only its receiver.
    changed: Vec<Condvar>,
    statuses: Vec<Status>,
    hosts: Vec<usize>,
    options: Options,
}

#[derive(Default)]
struct State {
    lines: HashMap<Line, Queue>,
    gathers: BTreeMap<u64, Gather>,
    /// Who has neither finished nor failed.
    present: Vec<bool>,
    /// Why the job ended, once it has.
    failed: Option<Failure>,
}

/// The first failure: the others follow from it.
struct Failure {
    worker: Option<usize>,
    why: String,
}

/// Messages flow in order from one worker to another on a channel.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Line {
    from: usize,
    to: usize,
    channel: Channel,
}

/// Both ends count, so the n-th receive gets the n-th message in whatever order they are waited for.
#[derive(Default)]
struct Queue {
    sent: u64,
    posted: u64,
    messages: BTreeMap<u64, (Header, Tensor)>,
}

/// The n-th `all_gather` of the world.
#[derive(Default)]
struct Gather {
    parts: BTreeMap<usize, Vec<u8>>,
    taken: usize,
}

/// What a ticket stands for.
#[derive(Clone)]
enum Open {
    Send { line: Line, index: u64 },
    Recv { line: Line, index: u64, max_bytes: usize, device: Device },
}

impl Failure {
    fn seen_by(&self, rank: usize) -> Error {
        Error::transport(format!("worker {rank} stops: {}", self.why))
    }
}

impl World {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic while the lock is held leaves nothing half done that a later reader would trust.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake_all(&self) {
        self.changed.iter().for_each(Condvar::notify_all);
    }

    /// The first failure is the one that is reported.
    fn fail(&self, worker: Option<usize>, why: String) {
        self.lock().failed.get_or_insert(Failure { worker, why });
        self.wake_all();
    }

    /// Lets worker `rank` sleep until `ready` gives something, the job has failed, or worker `peer` cannot provide it any more.
    fn wait_for<T>(
        &self,
        rank: usize,
        what: impl Fn() -> String,
        peers: &[usize],
        ready: impl FnMut(&mut State) -> Option<T>,
    ) -> Result<T> {
        self.statuses[rank].blocked(|| self.sleep_until(rank, what, peers, ready))
    }

    fn sleep_until<T>(
        &self,
        rank: usize,
        what: impl Fn() -> String,
        peers: &[usize],
        mut ready: impl FnMut(&mut State) -> Option<T>,
    ) -> Result<T> {
        let mut state = self.lock();
        loop {
            if let Some(failure) = &state.failed {
                return Err(failure.seen_by(rank));
            }
            if let Some(value) = ready(&mut state) {
                return Ok(value);
            }
            if let Some(gone) = peers.iter().find(|&&p| !state.present[p]) {
                return Err(Error::transport(format!(
                    "worker {rank} waits for {}, but worker {gone} has finished",
                    what()
                )));
            }
            state = self.changed[rank].wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// A worker's end of a [`world`].
pub struct ThreadTransport {
    world: Arc<World>,
    rank: usize,
    next: u64,
    /// Calls of `all_gather` so far: all workers count alike.
    gathered: u64,
    open: HashMap<u64, Open>,
}

impl ThreadTransport {
    fn open(&mut self, what: Open) -> Ticket {
        let id = self.next;
        self.next += 1;
        self.open.insert(id, what);
        Ticket(id)
    }
}

impl Transport for ThreadTransport {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.world.changed.len()
    }

    fn hosts(&self) -> &[usize] {
        &self.world.hosts
    }

    fn status(&self) -> &Status {
        &self.world.statuses[self.rank]
    }

    fn send(&mut self, to: usize, channel: Channel, header: Header, tensor: &Tensor) -> Result<Ticket> {
        check_send(self.size(), to, channel, &header, tensor)?;
        let line = Line { from: self.rank, to, channel };
        let mut state = self.world.lock();
        let queue = state.lines.entry(line).or_default();
        let index = queue.sent;
        queue.sent += 1;
        queue.messages.insert(index, (header, tensor.clone()));
        drop(state);
        self.world.changed[to].notify_all();
        Ok(self.open(Open::Send { line, index }))
    }

    fn post_recv(&mut self, from: usize, channel: Channel, max_bytes: usize, device: &Device) -> Result<Ticket> {
        check_peer(self.size(), from, channel)?;
        let line = Line { from, to: self.rank, channel };
        let mut state = self.world.lock();
        let queue = state.lines.entry(line).or_default();
        let index = queue.posted;
        queue.posted += 1;
        drop(state);
        if self.world.options.synchronous {
            self.world.changed[from].notify_all();
        }
        Ok(self.open(Open::Recv { line, index, max_bytes, device: device.clone() }))
    }

    fn wait(&mut self, ticket: Ticket) -> Result<Option<(Header, Tensor)>> {
        match self.open.remove(&ticket.0).ok_or_else(|| unknown_ticket(self.rank, ticket))? {
            Open::Send { line, index } => {
                if self.world.options.synchronous {
                    let what = || format!("its message on channel {} to be received", line.channel.0);
                    self.world
                        .wait_for(self.rank, what, &[line.to], |state| state.is_posted(line, index).then_some(()))?;
                }
                Ok(None)
            }
            Open::Recv { line, index, max_bytes, device } => {
                let what = || format!("a message on channel {}", line.channel.0);
                let (header, tensor) =
                    self.world.wait_for(self.rank, what, &[line.from], |state| state.take(line, index))?;
                check_length(&header, line.from, line.channel, max_bytes)?;
                Ok(Some((header, tensor.to_device(&device)?)))
            }
        }
    }

    fn test(&mut self, ticket: Ticket) -> Result<bool> {
        let state = self.world.lock();
        if state.failed.is_some() {
            return Ok(true);
        }
        match self.open.get(&ticket.0).ok_or_else(|| unknown_ticket(self.rank, ticket))? {
            Open::Send { line, index } => Ok(!self.world.options.synchronous || state.is_posted(*line, *index)),
            Open::Recv { line, index, .. } => {
                Ok(state.lines.get(line).is_some_and(|queue| queue.messages.contains_key(index)))
            }
        }
    }

    fn all_gather(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let (size, rank, round) = (self.size(), self.rank, self.gathered);
        self.gathered += 1;
        self.status().begin(Doing::only(Operation::Gather));
        self.world.lock().gathers.entry(round).or_default().parts.insert(rank, bytes.to_vec());
        self.world.wake_all();
        let others: Vec<usize> = (0..size).filter(|&r| r != rank).collect();
        self.world.wait_for(rank, || "the others in all_gather".into(), &others, |state| state.gathered(round, size))
    }

    fn abort(&mut self, error: &Error) {
        self.status().leave();
        self.world.fail(Some(self.rank), format!("worker {} failed: {error}", self.rank));
    }

    fn aborter(&self) -> Aborter {
        let world = self.world.clone();
        Arc::new(move |error| world.fail(None, error.to_string()))
    }

    fn finish(&mut self) -> Result<()> {
        let mut state = self.world.lock();
        if let Some(failure) = &state.failed {
            return Err(failure.seen_by(self.rank));
        }
        state.present[self.rank] = false;
        self.status().leave();
        drop(state);
        self.world.wake_all();
        Ok(())
    }
}

impl State {
    fn is_posted(&self, line: Line, index: u64) -> bool {
        self.lines.get(&line).is_some_and(|queue| queue.posted > index)
    }

    fn take(&mut self, line: Line, index: u64) -> Option<(Header, Tensor)> {
        self.lines.get_mut(&line)?.messages.remove(&index)
    }

    /// The parts of all, once they are there; the last who takes them clears up.
    fn gathered(&mut self, round: u64, size: usize) -> Option<Vec<Vec<u8>>> {
        let gather = self.gathers.get_mut(&round).filter(|gather| gather.parts.len() == size)?;
        let parts = gather.parts.values().cloned().collect();
        gather.taken += 1;
        if gather.taken == size {
            self.gathers.remove(&round);
        }
        Some(parts)
    }
}

impl Drop for ThreadTransport {
    fn drop(&mut self) {
        if self.world.lock().present[self.rank] {
            let why = match faults::last_panic().filter(|_| std::thread::panicking()) {
                Some(message) => format!("worker {} panicked: {message} (in {})", self.rank, self.status().doing()),
                None if std::thread::panicking() => {
                    format!("worker {} panicked (in {})", self.rank, self.status().doing())
                }
                None => format!("worker {} left before the end", self.rank),
            };
            self.world.fail(Some(self.rank), why);
        }
    }
}
