//! The status page: what every worker is doing, so that others can tell when it cannot any more.
//!
//! One page a host and job (a shared file without a name) or a process (workers as threads), one slot a worker. A worker notes
//! every instruction before it starts it; that takes some 50 ns.
#[cfg(feature = "mpi")]
mod shared;
mod words;

use std::{
    fmt, fs, process,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use words::Words;

/// Kinds of work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Operation {
    /// Nothing of a schedule yet.
    #[default]
    Start,
    /// F.
    Forward,
    /// B.
    Backward,
    /// I.
    InputGradient,
    /// W.
    WeightGradient,
    /// An optimizer update.
    Step,
    /// Giving up a weight version.
    Free,
    /// Posting a receive of a value, or of a gradient.
    Post,
    /// Waiting for a message.
    Receive,
    /// Starting a send.
    Send,
    /// Waiting for the end of a send.
    Wait,
    /// Waiting for the bytes of all workers.
    Gather,
    /// Waiting for all workers at the clean end.
    Finish,
    /// Waiting for the first worker's word to go on.
    Follow,
    /// Summing gradients over the workers of a stage.
    Reduce,
    /// Waiting for the last updates of all workers of a stage.
    Settle,
}

impl Operation {
    const ALL: [Operation; 16] = [
        Operation::Start,
        Operation::Forward,
        Operation::Backward,
        Operation::InputGradient,
        Operation::WeightGradient,
        Operation::Step,
        Operation::Free,
        Operation::Post,
        Operation::Receive,
        Operation::Send,
        Operation::Wait,
        Operation::Gather,
        Operation::Finish,
        Operation::Follow,
        Operation::Reduce,
        Operation::Settle,
    ];
}

/// What forward passes are run for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pass {
    /// Training.
    #[default]
    Training,
    /// An evaluation, each of whose minibatches is one micro-batch.
    Evaluation,
    /// A prediction.
    Prediction,
}

impl Pass {
    const ALL: [Pass; 3] = [Pass::Training, Pass::Evaluation, Pass::Prediction];
}

/// One piece of work, and where in the pipeline it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Doing {
    /// What.
    pub operation: Operation,
    /// What for.
    pub pass: Pass,
    /// For which stage of this worker.
    pub stage: Option<usize>,
    /// For which micro-batch.
    pub mb: Option<usize>,
    /// The edge, of a message,
    pub edge: Option<usize>,
    /// whether it is a gradient,
    pub gradient: bool,
    /// and the other worker.
    pub peer: Option<usize>,
}

impl Doing {
    /// Work that belongs to no stage.
    pub fn only(operation: Operation) -> Doing {
        Doing { operation, ..Doing::default() }
    }

    fn pack(self) -> [u64; 2] {
        // 0 is for none.
        let field = |n: Option<usize>, bits: u32| n.map_or(0, |n| (n as u64 + 1) & ((1 << bits) - 1));
        let what = self.operation as u64 | (self.pass as u64) << 6 | u64::from(self.gradient) << 8;
        [
            what | field(self.stage, 15) << 9 | field(self.mb, 40) << 24,
            field(self.peer, 32) | field(self.edge, 32) << 32,
        ]
    }

    fn unpack([what, message]: [u64; 2]) -> Doing {
        let field = |word: u64, bits: u32| (word & ((1 << bits) - 1)).checked_sub(1).map(|n| n as usize);
        Doing {
            operation: Operation::ALL.get((what & 0x3F) as usize).copied().unwrap_or_default(),
            pass: Pass::ALL.get((what >> 6 & 3) as usize).copied().unwrap_or_default(),
            gradient: what >> 8 & 1 == 1,
            stage: field(what >> 9, 15),
            mb: field(what >> 24, 40),
            peer: field(message, 32),
            edge: field(message >> 32, 32),
        }
    }
}

impl fmt::Display for Doing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(stage) = self.stage {
            write!(f, "stage {stage}, ")?;
        }
        if let Some(mb) = self.mb {
            match self.pass {
                Pass::Training => write!(f, "micro-batch {mb}, ")?,
                Pass::Evaluation => write!(f, "minibatch {mb} of the evaluation, ")?,
                Pass::Prediction => write!(f, "micro-batch {mb} of the prediction, ")?,
            }
        }
        let message = |f: &mut fmt::Formatter<'_>, what: &str, towards: &str| {
            write!(f, "{what} the {}", if self.gradient { "gradient" } else { "value" })?;
            self.edge.map_or(Ok(()), |edge| write!(f, " of edge {edge}"))?;
            self.peer.map_or(Ok(()), |peer| write!(f, " {towards} worker {peer}"))
        };
        match self.operation {
            Operation::Start => f.write_str("before the first instruction"),
            Operation::Forward => f.write_str("forward"),
            Operation::Backward => f.write_str("backward"),
            Operation::InputGradient => f.write_str("input gradient"),
            Operation::WeightGradient => f.write_str("weight gradient"),
            Operation::Step => f.write_str("step"),
            Operation::Free => f.write_str("free a version"),
            Operation::Post => message(f, "post the receive of", "from"),
            Operation::Receive => message(f, "receive", "from"),
            Operation::Send => message(f, "send", "to"),
            Operation::Wait => message(f, "wait for the send of", "to"),
            Operation::Gather => f.write_str("gather from all workers"),
            Operation::Finish => f.write_str("wait for all workers at the end"),
            Operation::Follow => f.write_str("wait for the first worker of stage 0 to say whether to go on"),
            Operation::Reduce => f.write_str("sum gradients over the workers of the stage"),
            Operation::Settle => f.write_str("wait for the last updates of all workers of the stage"),
        }
    }
}

/// Words of a slot: two cache lines, so that workers do not disturb each other.
const SLOT: usize = 16;
/// The words of a slot: the process,
const PID: usize = 0;
/// when it was started (numbers of processes are used again),
const PID_START: usize = 1;
/// one of [`RUNNING`] and [`LEFT`],
const STATE: usize = 2;
/// a packed [`Doing`],
const DOING: usize = 3;
/// when it began,
const SINCE: usize = 5;
/// since when the worker is blocked, or 0,
const BLOCKED: usize = 6;
/// and how many minibatches of training have begun.
const MINIBATCHES: usize = 7;

const RUNNING: u64 = 1;
/// It came to a clean end, or has said why not.
const LEFT: u64 = 2;

/// A worker's slot on a page. Cheap to clone.
#[derive(Clone)]
pub struct Status {
    page: Arc<Words>,
    /// The workers with slots in use, as far as this process knows.
    members: Arc<[usize]>,
    rank: usize,
    /// Nanoseconds for which the worker was blocked so far, known to its own process only.
    waited: Arc<AtomicU64>,
}

impl Status {
    /// The slots of `n` workers of this process.
    pub(crate) fn local(n: usize) -> Vec<Status> {
        let (page, members) = (Arc::new(Words::local((n + 1) * SLOT)), (0..n).collect::<Arc<[usize]>>());
        (0..n)
            .map(|rank| {
                let status = Status { page: page.clone(), members: members.clone(), rank, waited: Arc::default() };
                status.enter();
                status
            })
            .collect()
    }

    /// The worker.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Work begins.
    pub fn begin(&self, doing: Doing) {
        let [what, message] = doing.pack();
        self.store(DOING, what);
        self.store(DOING + 1, message);
        self.store(SINCE, now());
    }

    /// So many minibatches of training have begun.
    pub fn minibatches(&self, n: u64) {
        self.store(MINIBATCHES, n);
    }

    /// What was begun last.
    pub fn doing(&self) -> Doing {
        Doing::unpack([self.load(DOING), self.load(DOING + 1)])
    }

    /// Runs `wait`, which may block until other workers do something.
    pub(crate) fn blocked<T>(&self, wait: impl FnOnce() -> T) -> T {
        let since = now();
        self.store(BLOCKED, since);
        let result = wait();
        self.store(BLOCKED, 0);
        self.waited.fetch_add(now().saturating_sub(since), Relaxed);
        result
    }

    /// Seconds for which the worker, one of this process, was blocked so far.
    pub(crate) fn waited(&self) -> f64 {
        self.waited.load(Relaxed) as f64 * 1e-9
    }

    /// For how long the worker has been blocked, if it is.
    pub(crate) fn blocked_for(&self) -> Option<Duration> {
        let since = self.load(BLOCKED);
        (since > 0).then(|| Duration::from_nanos(now().saturating_sub(since)))
    }

    /// The worker comes to a clean end, or has said why not.
    pub(crate) fn leave(&self) {
        self.store(STATE, LEFT);
    }

    fn enter(&self) {
        // A job of this name that was killed early may have left its file.
        if let Some(word) = self.page.all().first() {
            word.store(0, Relaxed);
        }
        self.slot().iter().for_each(|word| word.store(0, Relaxed));
        self.store(PID, process::id().into());
        self.store(PID_START, process_state(process::id()).map_or(0, |p| p.started));
        self.begin(Doing::default());
        self.store(STATE, RUNNING);
    }

    /// Whether it has neither ended nor said why not.
    pub(crate) fn is_running(&self) -> bool {
        self.load(STATE) == RUNNING
    }

    /// Whether its process is gone, as far as this system tells.
    pub(crate) fn is_gone(&self) -> bool {
        let (pid, started) = (self.load(PID), self.load(PID_START));
        started > 0 && u32::try_from(pid).is_ok_and(|pid| process_state(pid).is_none_or(|p| p.is_over(started)))
    }

    /// The workers of this page.
    pub(crate) fn members(&self) -> impl Iterator<Item = Status> + '_ {
        self.members.iter().map(|&rank| Status { rank, ..self.clone() })
    }

    /// True for the first who asks of all workers of the page: who reports what all see.
    pub(crate) fn first_to_report(&self) -> bool {
        self.page.all().first().is_some_and(|word| word.swap(1, Relaxed) == 0)
    }

    fn slot(&self) -> &[AtomicU64] {
        let start = (self.rank + 1) * SLOT;
        self.page.all().get(start..start + SLOT).unwrap_or_default()
    }

    fn load(&self, word: usize) -> u64 {
        self.slot().get(word).map_or(0, |w| w.load(Relaxed))
    }

    fn store(&self, word: usize, value: u64) {
        if let Some(w) = self.slot().get(word) {
            w.store(value, Relaxed);
        }
    }
}

impl fmt::Display for Status {
    /// Worker, process and place, such as `rank 2 (pid 71), stage 2, micro-batch 17, backward, minibatch 17`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let doing = self.doing();
        write!(f, "rank {} (pid {}), {doing}", self.rank, self.load(PID))?;
        let after = if doing.pass == Pass::Training { "" } else { "after " };
        self.load(MINIBATCHES).checked_sub(1).map_or(Ok(()), |last| write!(f, ", {after}minibatch {last}"))
    }
}

impl Status {
    /// In a sentence of the watchdog's report.
    pub(crate) fn report(&self) -> String {
        let pid = u32::try_from(self.load(PID)).ok();
        let stopped = pid.and_then(process_state).is_some_and(|p| matches!(p.state, 'T' | 't'));
        let begun = Duration::from_nanos(now().saturating_sub(self.load(SINCE))).as_secs_f64();
        let state = match self.blocked_for() {
            _ if !self.is_running() => "has left".to_string(),
            _ if stopped => format!("is stopped (process state T), began this {begun:.1} s ago"),
            Some(time) => format!("has waited for {:.1} s", time.as_secs_f64()),
            None => format!("is busy, began this {begun:.1} s ago"),
        };
        format!("{self}: {state}")
    }
}

/// What the system says of a process.
struct Process {
    state: char,
    /// In ticks since the machine was started.
    started: u64,
}

impl Process {
    /// Whether the process that started then has ended.
    fn is_over(&self, started: u64) -> bool {
        self.started != started || matches!(self.state, 'Z' | 'X')
    }
}

fn process_state(pid: u32) -> Option<Process> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name before may hold anything, but no `)` follows its own.
    let mut fields = text.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?.chars().next()?;
    Some(Process { state, started: fields.nth(18)?.parse().ok()? })
}

/// Nanoseconds since 1970: all processes of a host have the same clock.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packs() {
        let doings = Operation::ALL.map(|operation| Doing { operation, ..Doing::default() });
        let all = Doing {
            operation: Operation::Receive,
            stage: Some(7),
            mb: Some(1 << 33),
            edge: Some(12),
            gradient: true,
            peer: Some(0),
            ..Doing::default()
        };
        let passes = Pass::ALL.map(|pass| Doing { pass, ..all });
        for doing in doings.into_iter().chain(passes).chain([Doing { mb: Some(0), stage: Some(0), ..all }]) {
            assert_eq!(Doing::unpack(doing.pack()), doing);
        }
        assert_eq!(all.to_string(), "stage 7, micro-batch 8589934592, receive the gradient of edge 12 from worker 0");
    }

    #[test]
    fn slots_are_apart() {
        let all = Status::local(3);
        all[1].begin(Doing { stage: Some(1), mb: Some(17), operation: Operation::Backward, ..Doing::default() });
        all[1].minibatches(4);
        let own = process::id();
        let texts: Vec<String> = all[0].members().map(|s| s.to_string()).collect();
        assert_eq!(texts[0], format!("rank 0 (pid {own}), before the first instruction"));
        assert_eq!(texts[1], format!("rank 1 (pid {own}), stage 1, micro-batch 17, backward, minibatch 3"));
        all[1].begin(Doing { pass: Pass::Evaluation, ..all[1].doing() });
        let evaluates = "stage 1, minibatch 17 of the evaluation, backward, after minibatch 3";
        assert_eq!(all[1].to_string(), format!("rank 1 (pid {own}), {evaluates}"));
        assert!(all.iter().all(|s| s.is_running() && !s.is_gone() && s.blocked_for().is_none()));
        all[2].blocked(|| assert!(all[0].members().any(|s| s.blocked_for().is_some())));
        all[2].leave();
        assert!(!all[2].is_running() && all[1].is_running());
        assert!(all[2].first_to_report() && !all[0].first_to_report());
    }
}
