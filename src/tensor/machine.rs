//! Machines described by their rates, for what kernels take where nothing can be run.
use crate::{Error, Result};

/// A machine as the roofline model sees it (Williams, Waterman and Patterson, CACM 2009): a kernel computes and moves its operands
/// at the same time, so that the slower of the two tells how long it runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Machine {
    /// Floating-point operations per second; a multiply-add counts as two.
    pub flops: f64,
    /// Bytes per second between kernels and memory.
    pub bandwidth: f64,
    /// Seconds that a kernel takes beyond its work: its launch.
    pub latency: f64,
}

/// What any machine's rates, and the launches of its kernels, lie between.
const RATES: std::ops::RangeInclusive<f64> = 1.0..=1e24;
const LATENCIES: std::ops::RangeInclusive<f64> = 0.0..=1e3;

impl Machine {
    /// # Errors
    /// If a rate or the latency is one that no machine has, by its name.
    pub fn check(&self) -> Result<()> {
        let numbers = [
            ("flops", self.flops, RATES, "operations/s"),
            ("bandwidth", self.bandwidth, RATES, "bytes/s"),
            ("latency", self.latency, LATENCIES, "s"),
        ];
        match numbers.into_iter().find(|(_, x, range, _)| !range.contains(x)) {
            None => Ok(()),
            Some((name, x, range, unit)) => Err(Error::config(format!(
                "{name} of a device: {:e} to {:e} {unit} expected, got {x:e}",
                range.start(),
                range.end()
            ))),
        }
    }

    /// Seconds of a kernel of so many floating-point operations, whose operands have so many bytes.
    pub fn seconds(&self, flops: u64, bytes: u64) -> f64 {
        self.latency + (flops as f64 / self.flops).max(bytes as f64 / self.bandwidth)
    }
}
