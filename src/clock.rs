//! Time that threads had on a core.
use rustix::time::{ClockId, clock_gettime};

/// Seconds that the calling thread had on a core so far.
pub(crate) fn seconds_of_this_thread() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}
