//! How many workers share a core.
use super::gather::gather;
use crate::{Result, pipeline::transport::Transport};
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

/// Where a worker runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Place {
    host: String,
    /// The cores that it may use, as far as the system says.
    cores: BTreeSet<usize>,
    /// How many of them it may use at once.
    at_once: usize,
}

/// The most threads of workers for each core of a host, where each worker has `threads`; below 1 where there are cores enough.
/// Ranks that are bound to cores of their own do not share them.
///
/// # Errors
/// If another worker fails.
pub(super) fn crowding(transport: &mut dyn Transport, threads: usize) -> Result<f64> {
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let at_once = std::thread::available_parallelism().map_or(1, |n| n.get());
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let allowed = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:")).and_then(parse);
    let cores = allowed.unwrap_or_else(|| (0..at_once).collect());
    Ok(most_crowded(&gather(transport, &Place { host, cores, at_once })?, threads))
}

fn most_crowded(places: &[Place], threads: usize) -> f64 {
    let mut hosts: BTreeMap<&str, Vec<&Place>> = BTreeMap::new();
    places.iter().for_each(|p| hosts.entry(&p.host).or_default().push(p));
    let crowding = |workers: &Vec<&Place>| {
        let all: BTreeSet<usize> = workers.iter().flat_map(|p| p.cores.iter().copied()).collect();
        let shared = workers.iter().all(|p| p.cores == all);
        // A quota may allow fewer than all; workers that are bound apart have what they are bound to.
        let cores = if shared { workers.iter().map(|p| p.at_once).min().unwrap_or(1) } else { all.len() };
        workers.len() as f64 * threads as f64 / cores.max(1) as f64
    };
    hosts.values().map(crowding).fold(0.0, f64::max)
}

/// Reads a list such as `0-3,8`.
fn parse(list: &str) -> Option<BTreeSet<usize>> {
    let mut cores = BTreeSet::new();
    for part in list.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        cores.extend(first..=last);
    }
    Some(cores)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(host: &str, cores: &str, at_once: usize) -> Place {
        Place { host: host.into(), cores: parse(cores).expect("a list"), at_once }
    }

    #[test]
    fn workers_bound_apart_share_nothing() {
        assert_eq!(parse("0-2,5\n"), Some(BTreeSet::from([0, 1, 2, 5])));
        assert_eq!(parse("none"), None);
        assert_eq!(most_crowded(&[on("a", "0-1", 2), on("a", "0-1", 2)], 1), 1.0);
        assert_eq!(most_crowded(&vec![on("a", "0-1", 2); 4], 1), 2.0);
        assert_eq!(most_crowded(&[on("a", "0", 1), on("a", "1", 1)], 1), 1.0);
        assert_eq!(most_crowded(&[on("a", "0-7", 2), on("a", "0-7", 2)], 3), 3.0);
        assert_eq!(most_crowded(&vec![on("a", "0-1", 2); 4], usize::MAX), 2.0 * usize::MAX as f64);
        assert_eq!(most_crowded(&[on("a", "0", 1), on("b", "0", 1), on("b", "0", 1)], 1), 2.0);
    }
}
