//! The communication thread: the one that calls MPI. Commands come over a channel, replies go back over another.
use super::{
    super::{Channel, Header, check_length},
    ffi::{self, Ended, Held, Lane, Memory, Mpi, Outstanding, Peer},
    gather::Gather,
};
use crate::{
    Error, Result,
    clock::seconds_of_this_thread,
    tensor::{Buffer, Device, Tensor},
};
use std::{
    collections::{HashMap, VecDeque},
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
        mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError},
    },
    thread,
    time::{Duration, Instant},
};

/// While the worker waits: for how long the thread looks for completions without a pause, after the last one.
const EAGER: Duration = Duration::from_millis(1);
/// The pause between two looks after that. A command ends it early.
const PAUSE: Duration = Duration::from_micros(60);
/// While the worker computes, perhaps on the same core, pauses grow to this: every look costs it some 40 µs, and it does not ask
/// yet for what ends meanwhile. A send that the other side does not take yet is not worth more looks than a receive.
const LONG_PAUSE: Duration = Duration::from_millis(10);
/// With nothing outstanding MPI may still hold what it accepted but did not put on the wire: so long it is looked after,
const LINGER: Duration = Duration::from_secs(1);
/// so often.
const LINGER_PAUSE: Duration = Duration::from_millis(1);

/// What a worker asks for. `id` is its ticket.
pub(super) enum Command {
    Send {
        id: u64,
        to: usize,
        channel: Channel,
        header: [u8; Header::BYTES],
        tensor: Tensor,
    },
    Receive {
        id: u64,
        from: usize,
        channel: Channel,
        max_bytes: usize,
        buffer: Buffer,
        device: Device,
    },
    Gather {
        id: u64,
        bytes: Vec<u8>,
    },
    Finish {
        id: u64,
    },
    /// What this thread had on a core so far.
    Seconds {
        id: u64,
    },
    /// The worker waits.
    Hurry,
    Abort,
}

/// How a ticket ended.
pub(super) enum Done {
    Sent,
    Received(Header, Tensor),
    Gathered(Vec<Vec<u8>>),
    Seconds(f64),
    Finished,
}

/// A ticket and how it ended.
pub(super) type Reply = (u64, Result<Done>);

/// How messages are sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Options {
    /// A send ends only once its receive has begun.
    pub(super) synchronous: bool,
    /// The longest piece that a message is sent in: MPI counts in C `int`s.
    pub(super) piece: usize,
    /// For tests of faults: the thread panics when it is about to start its n-th message.
    pub(super) panic_at: Option<u64>,
}

/// What an operation is for.
#[derive(Clone, Copy)]
pub(super) enum Key {
    SendPart(u64),
    Header(u64),
    First(u64),
    Rest(u64),
    GatherSize(usize),
    GatherPart,
    GatherSent,
    Finish(u64),
}

/// A send: its parts are the header and the pieces of the data.
struct Sending {
    left: usize,
    header: Held,
    data: Held,
}

/// A receive: header, first piece and the rest, of which how much there is the header says.
struct Receiving {
    line: Line,
    max_bytes: usize,
    device: Device,
    header_memory: Held,
    data: Held,
    header: Option<Header>,
    /// Whether the receives of the rest are posted.
    complete: bool,
    /// Parts outstanding.
    left: usize,
    bytes: usize,
    failed: Option<Error>,
}

/// Where messages flow in order.
type Line = (usize, Channel);

/// The state of the communication thread.
pub(super) struct Comm {
    outstanding: Outstanding<Key>,
    options: Options,
    commands: Receiver<Command>,
    replies: Sender<Reply>,
    /// Whether the worker waits for a reply.
    waiting: Arc<AtomicBool>,
    sending: HashMap<u64, Sending>,
    receiving: HashMap<u64, Receiving>,
    /// Receives whose rest is not posted yet, in order.
    lines: HashMap<Line, VecDeque<u64>>,
    gather: Option<Gather>,
    finishing: Option<u64>,
    started: u64,
}

impl Comm {
    pub(super) fn new(
        mpi: Mpi,
        options: Options,
        commands: Receiver<Command>,
        replies: Sender<Reply>,
        waiting: Arc<AtomicBool>,
    ) -> Comm {
        Comm {
            outstanding: Outstanding::new(mpi),
            options,
            commands,
            replies,
            waiting,
            sending: HashMap::new(),
            receiving: HashMap::new(),
            lines: HashMap::new(),
            gather: None,
            finishing: None,
            started: 0,
        }
    }

    /// Serves until the worker finishes or aborts.
    pub(super) fn run(mut self) {
        let mut ended = Vec::new();
        let mut last = Instant::now();
        while self.finishing.is_none() {
            let quiet = last.elapsed();
            let pause = self.pause(quiet);
            let command = match pause {
                None => self.commands.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(Duration::ZERO) => self.commands.try_recv().map_err(|e| match e {
                    TryRecvError::Empty => RecvTimeoutError::Timeout,
                    TryRecvError::Disconnected => RecvTimeoutError::Disconnected,
                }),
                Some(pause) => self.commands.recv_timeout(pause),
            };
            match command {
                Ok(command) => {
                    last = Instant::now();
                    self.command(command);
                }
                Err(RecvTimeoutError::Timeout) => {}
                // The worker went without a word.
                Err(RecvTimeoutError::Disconnected) => ffi::abort_if_owner(1),
            }
            if let Err(e) = self.outstanding.poll(&mut ended) {
                self.fail_all(&e);
            }
            if ended.is_empty() && pause == Some(Duration::ZERO) {
                thread::yield_now();
            } else if !ended.is_empty() {
                last = Instant::now();
                ended.drain(..).for_each(|e| self.ended(e));
            }
        }
        if let Some(id) = self.finishing {
            let end = self.outstanding.finalize().map(|()| Done::Finished);
            // Nobody listens if the worker has gone meanwhile.
            self.replies.send((id, end)).unwrap_or_default();
        }
    }

    /// How long to wait for a command before the next look, `quiet` after the last command or completion; `None`: until there is
    /// a command.
    fn pause(&self, quiet: Duration) -> Option<Duration> {
        let idle = self.outstanding.len() == 0;
        Some(match (idle, self.waiting.load(Relaxed)) {
            (true, _) if quiet > LINGER => return None,
            (true, _) => LINGER_PAUSE,
            (false, true) if quiet < EAGER => Duration::ZERO,
            (false, true) => PAUSE,
            (false, false) => LONG_PAUSE.min(PAUSE + quiet),
        })
    }

    /// Starts what is asked for.
    fn command(&mut self, command: Command) {
        self.started += u64::from(!matches!(command, Command::Hurry | Command::Seconds { .. }));
        if self.options.panic_at == Some(self.started) {
            panic!("the communication thread panics, as PIPEWRIGHT_MPI_PANIC asks");
        }
        let (id, started) = match command {
            Command::Send { id, to, channel, header, tensor } => (id, self.send(id, to, channel, header, tensor)),
            Command::Receive { id, from, channel, max_bytes, buffer, device } => {
                (id, self.receive(id, (from, channel), max_bytes, buffer, device))
            }
            Command::Gather { id, bytes } => (id, self.start_gather(id, bytes)),
            Command::Finish { id } => (id, self.outstanding.barrier(Key::Finish(id))),
            Command::Seconds { id } => return self.reply(id, Ok(Done::Seconds(seconds_of_this_thread()))),
            Command::Hurry => return,
            Command::Abort => return ffi::abort_if_owner(1),
        };
        if let Err(e) = started {
            self.reply(id, Err(e));
        }
    }

    fn reply(&self, id: u64, result: Result<Done>) {
        // Nobody listens if the worker has gone; its `Abort` follows.
        self.replies.send((id, result)).unwrap_or_default();
    }

    /// MPI as a whole fails: nothing that was started will end.
    fn fail_all(&mut self, why: &Error) {
        let gather = self.gather.take().map(|g| g.id());
        let ids: Vec<u64> =
            self.sending.drain().map(|s| s.0).chain(self.receiving.drain().map(|r| r.0)).chain(gather).collect();
        for id in ids {
            self.reply(id, Err(Error::transport(why.message())));
        }
    }

    fn send(
        &mut self,
        id: u64,
        to: usize,
        channel: Channel,
        header: [u8; Header::BYTES],
        tensor: Tensor,
    ) -> Result<()> {
        let bytes = tensor.byte_len();
        let header = self.outstanding.hold(Memory::Bytes(header.to_vec()))?;
        let data = self.outstanding.hold(Memory::Tensor(tensor))?;
        let (first, rest) = tags(channel);
        let peer = |tag| Peer { lane: Lane::Data, rank: to, tag };
        let synchronous = self.options.synchronous;
        self.outstanding.send(header, 0..Header::BYTES, peer(first), synchronous, Key::SendPart(id))?;
        let mut parts = 1;
        for (i, piece) in pieces(bytes, self.options.piece).enumerate() {
            let peer = peer(if i == 0 { first } else { rest });
            self.outstanding.send(data, piece, peer, synchronous, Key::SendPart(id))?;
            parts += 1;
        }
        self.sending.insert(id, Sending { left: parts, header, data });
        Ok(())
    }

    fn receive(&mut self, id: u64, line: Line, max_bytes: usize, buffer: Buffer, device: Device) -> Result<()> {
        let header_memory = self.outstanding.hold(Memory::Bytes(vec![0; Header::BYTES]))?;
        let data = self.outstanding.hold(Memory::Buffer(buffer))?;
        let peer = Peer { lane: Lane::Data, rank: line.0, tag: tags(line.1).0 };
        self.outstanding.receive(header_memory, 0..Header::BYTES, peer, Key::Header(id))?;
        self.outstanding.receive(data, 0..max_bytes.min(self.options.piece), peer, Key::First(id))?;
        let (header, failed, complete, left, bytes) = (None, None, false, 2, 0);
        let parts = Receiving { line, max_bytes, device, header_memory, data, header, complete, left, bytes, failed };
        self.receiving.insert(id, parts);
        self.lines.entry(line).or_default().push_back(id);
        Ok(())
    }

    fn start_gather(&mut self, id: u64, bytes: Vec<u8>) -> Result<()> {
        let (gather, done) = Gather::start(id, bytes, &mut self.outstanding, self.options)?;
        self.gather = Some(gather);
        if done { self.end_gather() } else { Ok(()) }
    }

    fn end_gather(&mut self) -> Result<()> {
        if let Some(gather) = self.gather.take() {
            let id = gather.id();
            let all = gather.end(&mut self.outstanding);
            self.reply(id, all.map(Done::Gathered));
        }
        Ok(())
    }

    /// Follows up an operation that has ended.
    fn ended(&mut self, ended: Ended<Key>) {
        match ended.key {
            Key::SendPart(id) => self.sent(id, ended.bytes),
            Key::Header(id) | Key::First(id) | Key::Rest(id) => self.received(id, ended.key, ended.bytes),
            Key::GatherSize(_) | Key::GatherPart | Key::GatherSent => {
                let Some(gather) = &mut self.gather else { return };
                let id = gather.id();
                let done =
                    ended.bytes.and_then(|bytes| gather.ended(ended.key, bytes, &mut self.outstanding, self.options));
                match done {
                    Ok(false) => {}
                    Ok(true) => self.end_gather().unwrap_or_default(),
                    Err(e) => self.reply(id, Err(e)),
                }
            }
            Key::Finish(id) => match ended.bytes {
                Ok(_) => self.finishing = Some(id),
                Err(e) => self.reply(id, Err(e)),
            },
        }
    }

    fn sent(&mut self, id: u64, result: Result<usize>) {
        let Some(sending) = self.sending.get_mut(&id) else { return };
        sending.left -= 1;
        let done = sending.left == 0;
        if done || result.is_err() {
            let sending = self.sending.remove(&id);
            // After an error other parts may use the memory still: then it stays.
            for held in sending.into_iter().flat_map(|s| [s.header, s.data]) {
                self.outstanding.release(held);
            }
            self.reply(id, result.map(|_| Done::Sent));
        }
    }

    fn received(&mut self, id: u64, key: Key, result: Result<usize>) {
        let Some(r) = self.receiving.get_mut(&id) else { return };
        r.left -= 1;
        let line = r.line;
        match (key, result) {
            (Key::Header(_), Ok(_)) => match self.outstanding.release(r.header_memory) {
                Some(Memory::Bytes(bytes)) => match Header::decode(&bytes) {
                    Ok(header) => r.header = Some(header),
                    Err(e) => r.failed = Some(e),
                },
                _ => r.failed = Some(Error::transport("a header without memory")),
            },
            (_, Ok(bytes)) => r.bytes += bytes,
            // What the header says of the length is clearer, if it comes.
            (_, Err(e)) => r.failed = r.failed.take().or(Some(e)),
        }
        // MPI may tell of a later message first: that one has waited for this header.
        match self.post_rest(line) {
            Ok(complete) => complete.into_iter().chain([id]).for_each(|id| self.end_receive(id)),
            Err(e) => self.fail_all(&e),
        }
    }

    /// Replies if all parts of a receive have ended.
    fn end_receive(&mut self, id: u64) {
        let over = |r: &Receiving| r.left == 0 && (r.complete || r.failed.is_some());
        if self.receiving.get(&id).is_some_and(over)
            && let Some(r) = self.receiving.remove(&id)
        {
            let result = self.message(r);
            self.reply(id, result);
        }
    }

    /// Posts the receives of what follows the first pieces of a line's messages, in the order of the messages; gives those of
    /// which all is posted now.
    fn post_rest(&mut self, line: Line) -> Result<Vec<u64>> {
        let mut complete = Vec::new();
        let Some(queue) = self.lines.get_mut(&line) else { return Ok(complete) };
        while let Some(&id) = queue.front() {
            if let Some(r) = self.receiving.get_mut(&id) {
                let Some(header) = &r.header else { break };
                let bytes = header.data_bytes();
                if bytes <= r.max_bytes {
                    let peer = Peer { lane: Lane::Data, rank: line.0, tag: tags(line.1).1 };
                    for piece in pieces(bytes, self.options.piece).skip(1) {
                        self.outstanding.receive(r.data, piece, peer, Key::Rest(id))?;
                        r.left += 1;
                    }
                }
                r.complete = true;
                complete.push(id);
            }
            queue.pop_front();
        }
        if queue.is_empty() {
            self.lines.remove(&line);
        }
        Ok(complete)
    }

    /// What was received, checked.
    fn message(&mut self, r: Receiving) -> Result<Done> {
        let (from, channel) = r.line;
        let memory = self.outstanding.release(r.data);
        let place = |e: Error| e.context(format!("message from worker {from} on channel {}", channel.0));
        let Some(header) = r.header else {
            return Err(place(r.failed.unwrap_or_else(|| Error::transport("no header came"))));
        };
        check_length(&header, from, channel, r.max_bytes)?;
        if let Some(e) = r.failed {
            return Err(place(e));
        }
        if r.bytes != header.data_bytes() {
            let (n, of) = (r.bytes, header.data_bytes());
            return Err(place(Error::transport(format!("{n} bytes came, the header said {of}"))));
        }
        let Some(Memory::Buffer(buffer)) = memory else {
            return Err(place(Error::transport("a message without memory")));
        };
        let tensor = Tensor::from_buffer(buffer, header.dtype, &header.shape, &r.device);
        Ok(Done::Received(header, tensor))
    }
}

/// The tags of a channel: of headers and first pieces, and of the rest, whose number a receiver knows only from the header.
fn tags(channel: Channel) -> (usize, usize) {
    let first = channel.0 as usize * 2;
    (first, first + 1)
}

/// The largest tag of a channel.
pub(super) fn largest_tag(channel: Channel) -> usize {
    tags(channel).1
}

/// The pieces of a message; there is always a first one.
pub(super) fn pieces(bytes: usize, piece: usize) -> impl Iterator<Item = Range<usize>> {
    (0..bytes.div_ceil(piece).max(1)).map(move |i| i * piece..bytes.min((i + 1) * piece))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover() {
        assert_eq!(pieces(0, 4).collect::<Vec<_>>(), vec![0..0; 1]);
        assert_eq!(pieces(4, 4).collect::<Vec<_>>(), vec![0..4; 1]);
        assert_eq!(pieces(9, 4).collect::<Vec<_>>(), [0..4, 4..8, 8..9]);
    }
}
