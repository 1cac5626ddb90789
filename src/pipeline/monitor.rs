//! A thread a process that looks after the workers of its status page: one that died, and one that waits for too long.
use super::{faults, status::Status, transport::Aborter};
use crate::{Error, Result};
use std::{
    sync::mpsc::{self, RecvTimeoutError, Sender},
    thread::{self, JoinHandle},
    time::Duration,
};

/// Between two looks: the launcher ends the survivors about a second after a death, and they must have told of it by then.
const INTERVAL: Duration = Duration::from_millis(100);

/// Watches until it is dropped.
pub(crate) struct Monitor {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Monitor {
    /// Watches over the workers `mine` of this process and, from there, the others of their page; ends the job with `abort`.
    pub(crate) fn start(mine: Vec<Status>, abort: Aborter) -> Result<Monitor> {
        let (stop, stopped) = mpsc::channel();
        let body = move || {
            while stopped.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                if let Some(error) = mine.iter().find_map(|status| died(status).or_else(|| waits(status))) {
                    return abort(&error);
                }
            }
        };
        let thread = thread::Builder::new().name("monitor".into()).spawn(body);
        let thread = thread.map_err(|e| Error::transport(format!("no thread to watch over the workers: {e}")))?;
        Ok(Monitor { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // A panic in it was reported by the hook.
            thread.join().unwrap_or_default();
        }
    }
}

/// Another worker that died; told by the lowest that lives.
fn died(me: &Status) -> Option<Error> {
    if !me.is_running() {
        return None;
    }
    let (gone, alive): (Vec<Status>, Vec<Status>) = me.members().filter(Status::is_running).partition(Status::is_gone);
    let dead = gone.first()?;
    let tells = alive.first().is_some_and(|first| first.rank() == me.rank()) && me.first_to_report();
    tells.then(|| Error::transport(format!("a rank died: {dead}")))
}

/// This worker has waited for longer than the watchdog allows; the first who finds so tells what all are doing.
fn waits(me: &Status) -> Option<Error> {
    let limit = faults::watchdog()?;
    let time = me.blocked_for().filter(|time| *time > limit)?;
    if !me.is_running() || !me.first_to_report() {
        return None;
    }
    let all: Vec<String> = me.members().map(|s| format!("\n  {}", s.report())).collect();
    let (time, limit) = (time.as_secs_f64(), limit.as_secs_f64());
    Some(Error::transport(format!(
        "rank {} has waited for {time:.1} s, the watchdog allows {limit:.1} s:{}",
        me.rank(),
        all.concat()
    )))
}
