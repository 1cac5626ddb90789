//! The published recurrence of PipeDream's partitioner (Narayanan et al., SOSP 2019, section 3.1, as the released code has it).
//!
//! With `C[i][j]` the seconds and `W[i][j]` the parameter bytes of what state j has beyond state i, `a[k]` the output bytes of state
//! k, for each level of n groups with links of B bytes/s, innermost first, p = n of the level before (1 at first):
//! ```text
//! A[i][j][m] = (C[i][j] + 4(m-1)/m · W[i][j]/B / p) / m               in one stage (a straight pipeline: for m = 1 only)
//! for m = 2…n, k between i and j, m' = 1…m-1 (a straight pipeline: 1):
//!   last = (C[k][j] + 4(m'-1)/m' · W[k][j]/B) / m'
//!   A[i][j][m] = min(A[i][j][m], max(A[i][k][m-m'], last, 2·a[k]/(B·m'), 2·a[j]/(B·m')))
//! ```
//! without the transfers of a if these do not count, and without that of a[j] where j is the whole graph. The level's `A[·][·][n]`
//! is C of the next. `last` does not divide its synchronization by p, computation and synchronization are added, and no stage has
//! part of a group: so it is in the original, and kept to be compared with it. Latencies do not count.
use super::{
    cost::Part,
    states::{State, states},
};
use crate::{
    Error, Result,
    pipeline::{profile::CostGraph, topology::Topology},
};

/// What the published recurrence answers.
#[derive(Clone, Debug)]
pub struct Compat {
    /// Seconds per minibatch.
    pub seconds: f64,
    /// Seconds per minibatch of data parallelism on all workers, as the recurrence costs one stage at each level.
    pub data_parallel_seconds: f64,
    /// The stages, in order.
    pub stages: Vec<Part>,
}

/// Plans by the published recurrence; of equally fast plans the first that it meets. `transfers` tells whether those of activations
/// count (in the original only if asked for), `straight` whether every stage has one worker.
///
/// # Errors
/// If the graph has more states than can be gone through, some node does not hang together with its first source, or there are more
/// workers than stages can be cut for a straight pipeline.
pub fn plan_compat(graph: &CostGraph, topology: &Topology, straight: bool, transfers: bool) -> Result<Compat> {
    let states = states(graph)?;
    let recurrence = Recurrence::new(&states, topology, straight, transfers);
    let levels = topology.levels().len();
    let (last, n) = (states.len(), topology.levels()[levels - 1].count);
    let row = recurrence.row(levels - 1, 0);
    let Some(seconds) = row.time(last, n) else {
        return Err(Error::plan(format!(
            "no straight pipeline of {} workers: the graph can be cut into {} stages at most",
            topology.workers(),
            recurrence.longest()
        )));
    };
    let mut stages = Vec::new();
    recurrence.unfold((levels - 1, 0, last, n), &[0], &mut stages);
    Ok(Compat { seconds, data_parallel_seconds: recurrence.data_parallel(), stages })
}

/// No time is known.
const NONE: f64 = f64::INFINITY;

/// States are counted from 1: 0 is the empty one.
struct Recurrence<'a> {
    states: &'a [State],
    topology: &'a Topology,
    straight: bool,
    transfers: bool,
    /// For each state those within it, ascending, from 1.
    within: Vec<Vec<usize>>,
    /// C of each level, by i and j: `NONE` unless i is within j.
    compute: Vec<Vec<Vec<f64>>>,
}

/// A of one i: the times of m = 1…n, by j, and what the best last stage is: where it begins, and on how many groups.
struct Row {
    times: Vec<Vec<f64>>,
    splits: Vec<Vec<Option<(usize, usize)>>>,
}

impl Row {
    fn time(&self, j: usize, m: usize) -> Option<f64> {
        Some(self.times[j][m]).filter(|t| *t != NONE)
    }
}

impl<'a> Recurrence<'a> {
    fn new(states: &'a [State], topology: &'a Topology, straight: bool, transfers: bool) -> Recurrence<'a> {
        let count = states.len() + 1;
        let is_within = |k: usize, j: usize| k < j && states[k - 1].nodes.is_within(&states[j - 1].nodes);
        let within = (0..count).map(|j| (1..j).filter(|&k| is_within(k, j)).collect());
        let mut r = Recurrence { states, topology, straight, transfers, within: within.collect(), compute: Vec::new() };
        let mut first = vec![vec![NONE; count]; count];
        for j in 1..count {
            first[0][j] = states[j - 1].seconds;
            for &k in &r.within[j] {
                first[k][j] = states[j - 1].seconds - states[k - 1].seconds;
            }
        }
        r.compute.push(first);
        for level in 1..topology.levels().len() {
            let n = topology.levels()[level - 1].count;
            let next = (0..count).map(|i| r.row(level - 1, i).times.iter().map(|t| t[n]).collect()).collect();
            r.compute.push(next);
        }
        r
    }

    /// W.
    fn param_bytes(&self, i: usize, j: usize) -> f64 {
        self.states[j - 1].param_bytes - if i > 0 { self.states[i - 1].param_bytes } else { 0.0 }
    }

    /// A[i] of a level, from its C.
    fn row(&self, level: usize, i: usize) -> Row {
        let (n, bandwidth) = (self.topology.levels()[level].count, self.topology.levels()[level].link.bandwidth);
        let inner = if level > 0 { self.topology.levels()[level - 1].count as f64 } else { 1.0 };
        let (count, compute) = (self.states.len() + 1, &self.compute[level]);
        let mut row = Row { times: vec![vec![NONE; n + 1]; count], splits: vec![vec![None; n + 1]; count] };
        let most = |m: usize| if self.straight { 1 } else { m };
        for j in (i + 1..count).filter(|&j| compute[i][j] != NONE) {
            for m in 1..=most(n) {
                let (copies, bytes) = (m as f64, self.param_bytes(i, j));
                let sync = 4.0 * (copies - 1.0) * bytes / (bandwidth * copies) / inner;
                row.times[j][m] = (compute[i][j] + sync) / copies;
            }
        }
        for j in i + 1..count {
            for &k in self.within[j].iter().filter(|&&k| k > i && compute[i][k] != NONE && compute[k][j] != NONE) {
                let (before, rest) = row.times.split_at_mut(j);
                let (before, here) = (&before[k], &mut rest[0]);
                for copies in 1..=most(n - 1) {
                    let transfer = |s: usize| 2.0 * self.states[s - 1].output_bytes / (bandwidth * copies as f64);
                    let m = copies as f64;
                    let sync = 4.0 * (m - 1.0) * self.param_bytes(k, j) / (bandwidth * m);
                    let mut last = (compute[k][j] + sync) / m;
                    if self.transfers {
                        last = last.max(transfer(k));
                        if j + 1 < count {
                            last = last.max(transfer(j));
                        }
                    }
                    for m in copies + 1..=n {
                        let time = before[m - copies].max(last);
                        if time < here[m] {
                            here[m] = time;
                            row.splits[j][m] = Some((k, copies));
                        }
                    }
                }
            }
        }
        row
    }

    /// The stages of A[i][j][m] of a level, for every copy of the level's groups: each begins at one of the workers `bases`.
    fn unfold(&self, (level, i, j, m): (usize, usize, usize, usize), bases: &[usize], stages: &mut Vec<Part>) {
        let row = self.row(level, i);
        let mut parts = Vec::new();
        let (mut end, mut left) = (j, m);
        while let Some((k, copies)) = row.splits[end][left] {
            parts.push((k, end, copies));
            (end, left) = (k, left - copies);
        }
        parts.push((i, end, left));
        let (group, mut offset) = (self.topology.group(level), 0);
        for (from, to, copies) in parts.into_iter().rev() {
            let of = |&base: &usize| (offset..offset + copies).map(move |c| base + c * group);
            let bases: Vec<usize> = bases.iter().flat_map(of).collect();
            offset += copies;
            if level > 0 {
                let all = self.topology.levels()[level - 1].count;
                self.unfold((level - 1, from, to, all), &bases, stages);
                continue;
            }
            let is_new = |n: &usize| from == 0 || !self.states[from - 1].nodes.has(*n);
            let nodes = self.states[to - 1].nodes.iter().filter(is_new).collect();
            stages.push(Part { nodes, workers: bases });
        }
    }

    /// One stage at every level, each costed as the level's `A[0][last][n]` in one stage.
    fn data_parallel(&self) -> f64 {
        let (mut seconds, mut inner) = (self.states.last().map_or(0.0, |s| s.seconds), 1.0);
        let bytes = self.states.last().map_or(0.0, |s| s.param_bytes);
        for level in self.topology.levels() {
            let n = level.count as f64;
            seconds = (seconds + 4.0 * (n - 1.0) * bytes / (level.link.bandwidth * n) / inner) / n;
            inner = n;
        }
        seconds
    }

    /// The most stages that the graph can be cut into: the longest chain of states.
    fn longest(&self) -> usize {
        let mut depth = vec![0; self.within.len()];
        for j in 1..depth.len() {
            depth[j] = 1 + self.within[j].iter().map(|&k| depth[k]).max().unwrap_or(0);
        }
        depth.last().copied().unwrap_or(0)
    }
}
