//! Signals to processes.
use std::process::Command;

/// Sends the signal `name`, such as `-TERM`, to the process `pid`. A shell does it: not every machine has a program for it.
pub fn send(pid: u32, name: &str) {
    let sent = Command::new("sh").args(["-c", &format!("kill {name} {pid}")]).status();
    assert!(sent.is_ok_and(|s| s.success()), "kill {name} {pid}");
}
