//! Where the workers' time went, beside where it was predicted to go.
use crate::pipeline::{
    schedule::simulate::WorkerTime,
    worker::{Spent, Times},
};
use serde::{Deserialize, Serialize};

/// By how much measured and predicted throughput may differ without a warning.
const TOLERATED: f64 = 0.15;

/// Where the time of one worker goes, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Split {
    /// Passes, updates and data.
    pub compute: f64,
    /// Starting receives and sends, waiting for the end of sends, and sums of gradients over the workers of a stage, of which the
    /// others may be late.
    pub communication: f64,
    /// Waiting for messages of other stages, sent or not.
    pub waiting: f64,
}

impl Split {
    /// What a worker measured.
    pub(super) fn measured(t: &Times) -> Split {
        let sums = t.seconds(Spent::Reduce) + t.seconds(Spent::ReduceWait);
        Split {
            compute: t.seconds(Spent::Compute) + t.seconds(Spent::Step) + t.seconds(Spent::Data),
            communication: t.seconds(Spent::Send) + sums,
            waiting: t.seconds(Spent::Receive),
        }
    }

    /// What a simulation found.
    pub fn predicted(t: &WorkerTime) -> Split {
        let communication = (t.end - t.elapsed - t.blocked).max(0.0);
        Split { compute: t.elapsed, communication, waiting: t.blocked }
    }

    /// This and `times` the other.
    pub fn plus(self, times: f64, other: Split) -> Split {
        Split {
            compute: self.compute + times * other.compute,
            communication: self.communication + times * other.communication,
            waiting: self.waiting + times * other.waiting,
        }
    }

    /// In milliseconds and words.
    fn words(self) -> String {
        let [compute, communication, waiting] = [self.compute, self.communication, self.waiting].map(|t| 1e3 * t);
        format!("{compute:.1} compute, {communication:.1} communication, {waiting:.1} waiting")
    }
}

/// What a run was predicted to take beside what it took.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// For each worker, predicted seconds per minibatch.
    pub predicted: Vec<Split>,
    /// For each worker, measured seconds per minibatch.
    pub measured: Vec<Split>,
}

impl Comparison {
    /// A line a worker.
    pub fn table(&self) -> String {
        let both = self.predicted.iter().zip(&self.measured).enumerate();
        let line = |(worker, (p, m)): (usize, (&Split, &Split))| {
            format!("worker {worker:<8} {} ms a minibatch measured; {} predicted", m.words(), p.words())
        };
        both.map(line).collect::<Vec<_>>().join("\n")
    }

    /// Why `measured` samples a second are so far from the `predicted` ones, if they are: the part of a worker's time that differs
    /// most. Waiting follows from what other workers do, so that it is the cause only where nothing else took longer (or shorter).
    pub fn warning(&self, measured: f64, predicted: f64) -> Option<String> {
        let ratio = measured / predicted;
        if !ratio.is_finite() || (ratio - 1.0).abs() <= TOLERATED {
            return None;
        }
        let slower = ratio < 1.0;
        // How much of the difference a part explains: seconds more where the run was slower, less where it was faster.
        let extra = |p: f64, m: f64| if slower { m - p } else { p - m };
        let both = || self.predicted.iter().zip(&self.measured).enumerate();
        let parts = both().flat_map(|(worker, (p, m))| {
            let parts = [("compute", p.compute, m.compute), ("communication", p.communication, m.communication)];
            parts.map(|(name, p, m)| (extra(p, m), worker, name, p, m))
        });
        let found = parts.reduce(|a, b| if b.0 > a.0 { b } else { a });
        let waits = both().map(|(worker, (p, m))| (extra(p.waiting, m.waiting), worker, p.waiting, m.waiting));
        let wait = waits.reduce(|a, b| if b.0 > a.0 { b } else { a });
        let whole = self.predicted.iter().map(|s| s.compute + s.communication + s.waiting).fold(0.0, f64::max);
        // A tenth of what is missing is no cause.
        let least = 0.1 * whole * (1.0 / ratio - 1.0).abs();
        let cause = match (found, wait) {
            (Some((most, worker, name, p, m)), _) if most > least => {
                let why = match (name, slower) {
                    ("compute", true) => "its core was shared or slower than while it was profiled",
                    ("compute", false) => "its core was faster, or shared less, than while it was profiled",
                    (_, true) => "links were slower or busier than measured, or another worker of its stage was late",
                    (_, false) => "links were faster or less busy than measured",
                };
                format!("worker {worker}'s {name} took {} ({:.1} ms a minibatch, {:.1} predicted): {why}", times(m, p), 1e3 * m, 1e3 * p)
            }
            (_, Some((most, worker, p, m))) if most > least => {
                let what = if slower { "messages took longer" } else { "messages took less" };
                format!(
                    "worker {worker} waited {} ({:.1} ms a minibatch, {:.1} predicted) though nobody computed {} than predicted: {what} than measured links promise",
                    times(m, p), 1e3 * m, 1e3 * p, if slower { "longer" } else { "less" }
                )
            }
            _ => "no worker's compute, communication or waiting explains it: time went to the runtime between instructions".into(),
        };
        Some(format!("{:.0} % of the predicted throughput; {cause}", 100.0 * ratio))
    }
}

/// `a` over `b` in words.
fn times(a: f64, b: f64) -> String {
    if b > 1e-9 { format!("{:.2} times what was predicted", a / b) } else { "time, of which none was predicted".into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(compute: f64, communication: f64, waiting: f64) -> Split {
        Split { compute, communication, waiting }
    }

    #[test]
    fn warnings_name_the_worker_and_the_part_that_differs() {
        let predicted = vec![split(0.1, 0.0, 0.02), split(0.1, 0.01, 0.01)];
        let say = |measured: [Split; 2], ratio: f64| {
            let c = Comparison { predicted: predicted.clone(), measured: measured.to_vec() };
            c.warning(100.0 * ratio, 100.0).unwrap_or_default()
        };
        let same = [predicted[0], predicted[1]];
        for near in [0.851, 1.0, 1.149] {
            assert_eq!(say(same, near), "");
        }
        // Worker 0 waits because worker 1 computes longer.
        let slow = say([split(0.1, 0.0, 0.06), split(0.14, 0.01, 0.01)], 0.75);
        assert!(slow.starts_with("75 % of") && slow.contains("worker 1's compute took 1.40 times"), "{slow}");
        assert!(slow.contains("shared or slower"), "{slow}");
        let sums = say([split(0.1, 0.0, 0.06), split(0.1, 0.05, 0.01)], 0.75);
        assert!(sums.contains("worker 1's communication took 5.00 times"), "{sums}");
        let links = say([split(0.1, 0.0, 0.06), split(0.1, 0.01, 0.05)], 0.75);
        assert!(links.contains("waited") && links.contains("messages took longer"), "{links}");
        let fast = say([split(0.07, 0.0, 0.0), split(0.1, 0.01, 0.0)], 1.3);
        assert!(fast.contains("worker 0's compute took 0.70 times") && fast.contains("faster"), "{fast}");
        assert!(say(same, 0.5).contains("between instructions"));
        assert_eq!(say(same, f64::NAN), "");
    }

    #[test]
    fn what_is_neither_compute_nor_blocked_is_communication() {
        let t = WorkerTime { end: 10.0, elapsed: 6.0, blocked: 3.0, ..WorkerTime::default() };
        assert_eq!(Split::predicted(&t), split(6.0, 1.0, 3.0));
        assert_eq!(split(1.0, 2.0, 3.0).plus(2.0, split(1.0, 1.0, 0.5)), split(3.0, 4.0, 4.0));
    }
}
