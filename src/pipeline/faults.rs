//! What happens when a worker panics, fails, dies or is asked to stop.
use super::{status::Status, transport::Aborter};
use crate::{Error, Result};
use std::{
    any::Any,
    cell::RefCell,
    panic,
    sync::{
        Arc, Once,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

/// Set by a signal that asks the job to end.
static STOP: std::sync::OnceLock<Arc<AtomicBool>> = std::sync::OnceLock::new();

/// From now on SIGTERM, SIGINT and SIGUSR1 ask the training loop to end after the minibatch at hand; a second SIGTERM or SIGINT
/// ends the process at once. SIGUSR1 is for launchers: Open MPI and batch systems pass it on without killing anything a second
/// later.
///
/// # Errors
/// If the system refuses the handlers.
pub fn catch_signals() -> Result<()> {
    static CAUGHT: AtomicBool = AtomicBool::new(false);
    // Registered twice, the first signal would count as the second too.
    if CAUGHT.swap(true, Relaxed) {
        return Ok(());
    }
    let flag = STOP.get_or_init(Arc::default);
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        let refused = |e| Error::transport(format!("signal {signal} cannot be handled: {e}"));
        // The first of the two acts when the flag is set already.
        signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, flag.clone()).map_err(refused)?;
        signal_hook::flag::register(signal, flag.clone()).map_err(refused)?;
    }
    let signal = signal_hook::consts::SIGUSR1;
    let refused = |e| Error::transport(format!("signal {signal} cannot be handled: {e}"));
    signal_hook::flag::register(signal, flag.clone()).map_err(refused)?;
    Ok(())
}

/// Whether a signal has asked the job to end.
pub fn stop_requested() -> bool {
    STOP.get().is_some_and(|flag| flag.load(Relaxed))
}

/// How long a worker may wait for others, in milliseconds; 0 for ever.
static WATCHDOG: AtomicU64 = AtomicU64::new(300_000);

/// Lets the watchdog end the job once a worker of this process has waited for others for longer than `limit`, saying who waits
/// for what; zero: never. It is 300 s until this is called.
pub fn set_watchdog(limit: Duration) {
    let millis = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
    // Less than a millisecond is not for ever.
    WATCHDOG.store(if limit.is_zero() { 0 } else { millis.max(1) }, Relaxed);
}

/// How long a worker may wait for others, if there is a limit.
pub fn watchdog() -> Option<Duration> {
    Some(WATCHDOG.load(Relaxed)).filter(|&millis| millis > 0).map(Duration::from_millis)
}

thread_local! {
    /// The message of this thread's last panic, for whoever must tell the others why this worker is gone.
    static LAST_PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// What this thread's last panic said, if [`install_panic_hook`] saw one.
pub(crate) fn last_panic() -> Option<String> {
    LAST_PANIC.with_borrow(Clone::clone)
}

/// Makes panics remember what they said. Installed once; the hook that was there before still runs.
pub fn install_panic_hook() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            let place = info.location().map(|l| format!(" at {}:{}", l.file(), l.line())).unwrap_or_default();
            let said = format!("{}{place}", panic_message(info.payload()));
            LAST_PANIC.with_borrow_mut(|last| *last = Some(said));
            before(info);
        }));
    });
}

/// The text of a panic.
fn panic_message(payload: &dyn Any) -> &str {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("(no text)")
}

/// From now on a panic in any thread of this process ends the whole job through `abort`, saying what the worker was doing:
/// unwinding would leave the other ranks waiting for ever.
pub fn abort_on_panic(abort: Aborter, status: Status) {
    install_panic_hook();
    let before = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        before(info);
        let thread = std::thread::current().name().unwrap_or("without a name").to_string();
        let said = last_panic().unwrap_or_default();
        abort(&Error::transport(format!("a panic in thread {thread:?}: {said}")).context(status.to_string()));
    }));
}
