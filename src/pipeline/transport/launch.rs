//! One way to start workers, whatever carries them.
use super::{
    Transport, launcher,
    threads::{self, Options},
};
#[cfg(feature = "mpi")]
use crate::pipeline::{faults, monitor::Monitor};
use crate::{Error, Result};

/// Runs `work` on every worker: on the ranks of the launcher that started this process (each has one worker, `threads` is not
/// used, and each process gets its own worker's result), else on `threads` threads of this process (the result is worker 0's).
///
/// A rank whose `work` fails or panics prints what happened and ends the whole job. If a rank dies, or waits for longer than
/// [`set_watchdog`](crate::pipeline::faults::set_watchdog) allows, another one of its host says so and ends the job. On ranks
/// SIGTERM and SIGINT only ask for the end: see [`stop_requested`](crate::pipeline::faults::stop_requested).
///
/// # Errors
/// What `work` failed with; if a launcher started several ranks but this crate was built without feature `mpi`, since
/// they would be so many runs that know nothing of each other.
pub fn launch<T: Send>(threads: usize, work: impl Fn(&mut dyn Transport) -> Result<T> + Sync) -> Result<T> {
    if let Some(launched) = launcher::detect() {
        #[cfg(feature = "mpi")]
        if let Some(transport) = super::mpi::MpiTransport::from_launcher()? {
            return on_rank(transport, work);
        }
        if launched.size != Some(1) {
            let n = launched.size.map_or("several".into(), |n| n.to_string());
            return Err(Error::config(format!(
                "started by {} with {n} ranks, but built without feature `mpi`: build with `--features mpi`, or start it \
                 alone with `--workers {n}`",
                launched.by
            )));
        }
    }
    let results = threads::run(threads, Options::default(), |transport| work(transport))?;
    results.into_iter().next().ok_or_else(|| Error::config("at least one worker is needed"))
}

#[cfg(feature = "mpi")]
fn on_rank<T>(mut transport: super::mpi::MpiTransport, work: impl Fn(&mut dyn Transport) -> Result<T>) -> Result<T> {
    faults::abort_on_panic(transport.aborter(), transport.status().clone());
    // A launcher that sees a rank die sends SIGTERM to the others, which have something to say of it.
    faults::catch_signals()?;
    let _monitor = Monitor::start(vec![transport.status().clone()], transport.aborter())?;
    let result = work(&mut transport).and_then(|value| transport.finish().map(|()| value));
    result.inspect_err(|e| transport.abort(e))
}
