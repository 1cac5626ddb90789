//! The helper threads of a device.
//!
//! A training step is some hundred pieces of work a few hundred microseconds long, and waking a sleeping thread takes tens of
//! them. So helpers stay awake for a while after each piece, giving way to whoever wants their core, and one that comes too late
//! is not waited for.
//!
//! The unsafe code here rests on one invariant: helpers call a job only between an entry into the open `state` and their leaving
//! it, and [`Team::run`], which borrows the job, does not return before it has closed the state and all have left.
use super::par::MOST_THREADS;
use crate::{Error, Result};
use std::{
    any::Any,
    cell::UnsafeCell,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, TryLockError,
        atomic::{AtomicBool, AtomicU64, Ordering::*},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// How long a helper without work stays awake.
const AWAKE: Duration = Duration::from_micros(300);
/// Looks for work, a few nanoseconds each, before one that gives way to others.
const EAGER: u32 = 2000;
/// Set while a job may be entered. Below it is how many are inside, above it which job it is.
const OPEN: u64 = 1 << 15;
const INSIDE: u64 = OPEN - 1;
const NUMBER: u32 = 16;
/// More would be counted into the bit above.
const _: () = assert!(MOST_THREADS as u64 <= INSIDE);

type Job = dyn Fn() + Sync + 'static;

struct Shared {
    state: AtomicU64,
    /// Written while the state is closed and nobody is inside, read inside.
    job: UnsafeCell<Option<*const Job>>,
    stop: AtomicBool,
    panicked: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `job` is written by the one thread that holds `Team::busy`, while the state keeps all others from reading it; the
// function it leads to is `Sync`.
unsafe impl Sync for Shared {}
// SAFETY: as above.
unsafe impl Send for Shared {}

struct Helper {
    asleep: Arc<AtomicBool>,
    handle: JoinHandle<()>,
}

/// Some helper threads.
pub(super) struct Team {
    shared: Arc<Shared>,
    helpers: Vec<Helper>,
    /// Held while a job is open.
    busy: Mutex<()>,
}

impl Team {
    /// Starts `count` helpers, fewer than [`MOST_THREADS`].
    pub(super) fn new(count: usize) -> Result<Team> {
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            job: UnsafeCell::new(None),
            stop: AtomicBool::new(false),
            panicked: Mutex::new(None),
        });
        let mut team = Team { shared, helpers: Vec::new(), busy: Mutex::new(()) };
        for i in 0..count {
            let asleep = Arc::new(AtomicBool::new(false));
            let (shared, flag) = (team.shared.clone(), asleep.clone());
            let started = thread::Builder::new().name(format!("cpu-{}", i + 1)).spawn(move || shared.help(&flag));
            let handle =
                started.map_err(|e| Error::device(format!("cpu: {} threads cannot be started: {e}", count + 1)))?;
            team.helpers.push(Helper { asleep, handle });
        }
        Ok(team)
    }

    /// Calls `job` in this thread, and meanwhile in every helper that comes before this thread is done. If another thread has the
    /// helpers, in this one alone.
    pub(super) fn run(&self, job: &(dyn Fn() + Sync)) {
        let busy = match self.busy.try_lock() {
            Ok(busy) => busy,
            // A job fell in its caller's thread, after which all had left it.
            Err(TryLockError::Poisoned(busy)) => busy.into_inner(),
            Err(TryLockError::WouldBlock) => return job(),
        };
        // Of a job that fell in both threads the caller has heard already.
        self.shared.panicked().take();
        // SAFETY: only the lifetime changes; the job is not called after this function has ended.
        let lasting: *const Job = unsafe { std::mem::transmute(std::ptr::from_ref(job)) };
        // SAFETY: the state is closed with nobody inside, and `busy` keeps other writers out.
        unsafe { *self.shared.job.get() = Some(lasting) };
        let number = (self.shared.state.load(Relaxed) >> NUMBER) + 1;
        // Sequentially consistent, as in `help`: either this thread sees that a helper sleeps, or the helper sees the job.
        self.shared.state.store(number << NUMBER | OPEN, SeqCst);
        for helper in &self.helpers {
            if helper.asleep.load(SeqCst) {
                helper.handle.thread().unpark();
            }
        }
        let open = Open(&self.shared);
        job();
        drop(open);
        let panicked = self.shared.panicked().take();
        if let Some(panic) = panicked {
            drop(busy);
            resume_unwind(panic);
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        for helper in self.helpers.drain(..) {
            helper.handle.thread().unpark();
            // A helper catches the panics of its jobs.
            helper.handle.join().unwrap_or_default();
        }
    }
}

/// An open job; dropped, also by a panic, it is closed, and all helpers have left it.
struct Open<'a>(&'a Shared);

impl Drop for Open<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.fetch_and(!OPEN, AcqRel);
        let mut looks = 0;
        while state & INSIDE > 0 {
            wait_a_little(&mut looks);
            state = self.0.state.load(Acquire);
        }
    }
}

fn wait_a_little(looks: &mut u32) {
    *looks += 1;
    if *looks < EAGER { std::hint::spin_loop() } else { thread::yield_now() }
}

impl Shared {
    fn panicked(&self) -> MutexGuard<'_, Option<Box<dyn Any + Send>>> {
        self.panicked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A helper's life.
    fn help(&self, asleep: &AtomicBool) {
        let mut last = 0;
        while let Some(number) = self.enter(last, asleep) {
            last = number;
            // SAFETY: inside, so that the job is there and lasts until this thread leaves.
            let done = catch_unwind(AssertUnwindSafe(|| unsafe {
                if let Some(job) = *self.job.get() {
                    (*job)();
                }
            }));
            if let Err(panic) = done {
                *self.panicked() = Some(panic);
            }
            self.state.fetch_sub(1, Release);
        }
    }

    /// Enters the next job after the one numbered `last`; gives its number, or nothing at the end.
    fn enter(&self, last: u64, asleep: &AtomicBool) -> Option<u64> {
        let (mut looks, mut since) = (0, Instant::now());
        loop {
            let state = self.state.load(SeqCst);
            if state & OPEN > 0 && state >> NUMBER != last {
                if self.state.compare_exchange(state, state + 1, AcqRel, Relaxed).is_ok() {
                    asleep.store(false, SeqCst);
                    return Some(state >> NUMBER);
                }
                continue;
            }
            if self.stop.load(SeqCst) {
                return None;
            }
            if asleep.load(Relaxed) {
                thread::park();
                asleep.store(false, SeqCst);
                (looks, since) = (0, Instant::now());
            } else if looks >= EAGER && since.elapsed() > AWAKE {
                // Said before the last look.
                asleep.store(true, SeqCst);
            } else {
                wait_a_little(&mut looks);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn jobs_end_before_run_does() {
        let team = Team::new(3).unwrap();
        for round in 0..2000usize {
            // Each time other memory, which is gone when the job is.
            let left: Vec<AtomicUsize> = (0..round % 7).map(|_| AtomicUsize::new(1)).collect();
            team.run(&|| left.iter().for_each(|l| _ = l.swap(0, Relaxed)));
            assert!(left.iter().all(|l| l.load(Relaxed) == 0));
            if round % 500 == 0 {
                // Long enough for all to fall asleep.
                thread::sleep(4 * AWAKE);
            }
        }
    }

    /// The caller and one helper work at once.
    fn both_come(team: &Team) {
        let (came, end) = (AtomicUsize::new(0), Instant::now() + Duration::from_secs(20));
        // Both wait for each other.
        team.run(&|| {
            came.fetch_add(1, SeqCst);
            while came.load(SeqCst) < 2 && Instant::now() < end {
                thread::yield_now();
            }
        });
        assert_eq!(came.load(SeqCst), 2);
    }

    #[test]
    fn helpers_help_after_sleep() {
        let team = Team::new(1).unwrap();
        for pause in [Duration::ZERO, 10 * AWAKE] {
            thread::sleep(pause);
            both_come(&team);
        }
    }

    #[test]
    fn a_job_within_a_job_runs_alone() {
        let team = Team::new(2).unwrap();
        let calls = AtomicUsize::new(0);
        team.run(&|| team.run(&|| _ = calls.fetch_add(1, Relaxed)));
        assert!((1..=3).contains(&calls.load(Relaxed)));
    }

    #[test]
    fn panics_reach_the_caller_and_the_team_lives_on() {
        let team = Team::new(1).unwrap();
        let caller = thread::current().id();
        for in_helper in [true, false] {
            let end = Instant::now() + Duration::from_secs(20);
            let stop = AtomicBool::new(false);
            let fell = catch_unwind(AssertUnwindSafe(|| {
                team.run(&|| {
                    if (thread::current().id() != caller) == in_helper {
                        stop.store(true, SeqCst);
                        panic!("as the test asks");
                    }
                    while !stop.load(SeqCst) && Instant::now() < end {
                        thread::yield_now();
                    }
                });
            }));
            assert_eq!(fell.unwrap_err().downcast_ref::<&str>(), Some(&"as the test asks"));
        }
        let calls = AtomicUsize::new(0);
        team.run(&|| _ = calls.fetch_add(1, Relaxed));
        assert!(calls.load(Relaxed) >= 1);
        both_come(&team);
    }

    #[test]
    fn a_job_that_falls_in_all_threads_is_told_once() {
        let team = Team::new(1).unwrap();
        let (came, end) = (AtomicUsize::new(0), Instant::now() + Duration::from_secs(20));
        let fell = catch_unwind(AssertUnwindSafe(|| {
            team.run(&|| {
                came.fetch_add(1, SeqCst);
                while came.load(SeqCst) < 2 && Instant::now() < end {
                    thread::yield_now();
                }
                panic!("as the test asks");
            });
        }));
        assert!(fell.is_err());
        both_come(&team);
    }
}
