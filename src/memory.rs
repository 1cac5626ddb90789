//! How much memory this machine has, for what must not be asked of it, and how much of it this process held.
use crate::{Error, Result};
use std::sync::OnceLock;

/// Makes sure that the machine has the `bytes` that `what` takes, where it says how many it has.
///
/// # Errors
/// With both numbers.
pub(crate) fn check(what: impl FnOnce() -> String, bytes: u128) -> Result<()> {
    within(total(), what, bytes)
}

fn within(total: Option<u64>, what: impl FnOnce() -> String, bytes: u128) -> Result<()> {
    match total {
        Some(total) if bytes > total.into() => {
            let gb = |bytes: f64| bytes / 1e9;
            let (want, have) = (gb(bytes as f64), gb(total as f64));
            Err(Error::device(format!("{} takes {want:.1} GB, this machine has {have:.1} GB", what())))
        }
        _ => Ok(()),
    }
}

/// All memory of this machine in bytes, as it was when it was first asked for.
fn total() -> Option<u64> {
    static ONCE: OnceLock<Option<u64>> = OnceLock::new();
    *ONCE.get_or_init(|| read(&std::fs::read_to_string("/proc/meminfo").ok()?, "MemTotal:"))
}

/// The most memory that this process ever held, in bytes, where the system says it.
pub(crate) fn peak() -> Option<u64> {
    read(&std::fs::read_to_string("/proc/self/status").ok()?, "VmHWM:")
}

/// The bytes of a line such as `MemTotal: 8 kB`.
fn read(lines: &str, name: &str) -> Option<u64> {
    let line = lines.lines().find_map(|l| l.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The elements of a tensor of `shape`.
pub(crate) fn elements(shape: &[usize]) -> u128 {
    shape.iter().fold(1, |n, &d| u128::saturating_mul(n, d as u128))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_machine_lacks_is_refused_with_both_numbers() {
        let total = read("MemFree: 1 kB\nMemTotal:       2000000 kB\nBuffers: 5 kB\n", "MemTotal:");
        assert_eq!(total, Some(2_048_000_000));
        assert!(within(total, String::new, 2_048_000_000).is_ok());
        let error = within(total, || "it".into(), elements(&[usize::MAX; 3])).unwrap_err().to_string();
        assert!(error.contains("it takes ") && error.contains("this machine has 2.0 GB"), "{error}");
        assert!(within(None, String::new, u128::MAX).is_ok());
        assert_eq!(read("MemTotal: many", "MemTotal:"), None);
    }
}
