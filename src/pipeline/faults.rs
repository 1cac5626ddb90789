//! What happens when a worker panics, fails, dies or is asked to stop.
use std::{any::Any, cell::RefCell, panic, sync::Once};

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
