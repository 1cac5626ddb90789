//! The published recurrence on profiles of our own, against a search of every plan that it may choose.
use pipewright::{
    Result,
    pipeline::{
        planner::{judge, plan_compat},
        profile::CostGraph,
        topology::{Level, Link, Topology},
    },
};
use proptest::prelude::*;
use std::collections::HashMap;

/// Milliseconds, bytes handed on and bytes of parameters of a node.
type Costs = (u32, u32, u32);

/// The profile in the published text format. Each edge is a source and a reader.
fn profile(costs: &[Costs], edges: &[(usize, usize)]) -> Result<CostGraph> {
    let node = |(n, (ms, output, params)): (usize, &Costs)| {
        let forward = ms / 3;
        format!(
            "n{n} -- Layer({n}, bias=True) -- forward_compute_time={forward}, backward_compute_time={}, \
             activation_size={output}.000, parameter_size={params}.000\n",
            ms - forward
        )
    };
    let nodes: String = costs.iter().enumerate().map(node).collect();
    let edges: String = edges.iter().map(|(a, b)| format!("\tn{a} -- n{b}\n")).collect();
    CostGraph::from_published(&(nodes + &edges))
}

fn topology(levels: &[(usize, f64)]) -> Result<Topology> {
    let level = |&(count, bandwidth): &(usize, f64)| Level { count, link: Link { latency: 0.0, bandwidth } };
    Topology::new(levels.iter().map(level).collect())
}

/// Every plan, from the front: sets of nodes are bits.
struct Search<'a> {
    costs: &'a [Costs],
    edges: &'a [(usize, usize)],
    levels: &'a [(usize, f64)],
    straight: bool,
    transfers: bool,
    known: HashMap<(usize, u32, u32), f64>,
}

impl Search<'_> {
    fn whole(&self) -> u32 {
        (1 << self.costs.len()) - 1
    }

    fn sum(&self, set: u32, of: impl Fn(&Costs) -> u32) -> f64 {
        (0..self.costs.len()).filter(|n| set >> n & 1 == 1).map(|n| f64::from(of(&self.costs[n]))).sum()
    }

    fn is_closed(&self, set: u32) -> bool {
        self.edges.iter().all(|(a, b)| set >> b & 1 == 0 || set >> a & 1 == 1)
    }

    /// The sets that a stage from `i` may end at, short of `j`.
    fn between(&self, i: u32, j: u32) -> Vec<u32> {
        (1..=self.whole()).filter(|&k| k & i == i && k & j == k && k != i && k != j && self.is_closed(k)).collect()
    }

    fn ancestors(&self, n: usize) -> u32 {
        self.edges.iter().filter(|(_, b)| *b == n).fold(0, |all, &(a, _)| all | 1 << a | self.ancestors(a))
    }

    /// What the augmented antichain of a state hands on: its last nodes, and their ancestors with readers that are neither
    /// such a last node nor an ancestor of it.
    fn output(&self, set: u32) -> f64 {
        let readers = |n: usize| self.edges.iter().filter(move |(a, _)| *a == n).map(|(_, b)| *b);
        let members = || (0..self.costs.len()).filter(|n| set >> n & 1 == 1);
        let is_last = |n: usize| readers(n).all(|r| set >> r & 1 == 0);
        let mut kept = 0u32;
        for last in members().filter(|&n| is_last(n)) {
            let before = self.ancestors(last);
            kept |= 1 << last;
            for n in members().filter(|n| before >> n & 1 == 1) {
                if readers(n).any(|r| r != last && before >> r & 1 == 0) {
                    kept |= 1 << n;
                }
            }
        }
        self.sum(kept, |c| c.1)
    }

    /// Seconds of what j has beyond i on a whole group of the level below.
    fn compute(&mut self, level: usize, i: u32, j: u32) -> f64 {
        if level == 0 {
            return self.sum(j & !i, |c| c.0) / 1e3;
        }
        if let Some(&t) = self.known.get(&(level, i, j)) {
            return t;
        }
        let t = self.pipeline(level - 1, i, j, self.levels[level - 1].0);
        self.known.insert((level, i, j), t);
        t
    }

    /// The first stage, on m groups: its synchronization is divided by p.
    fn first(&mut self, level: usize, i: u32, j: u32, m: usize) -> f64 {
        if self.straight && m > 1 {
            return f64::INFINITY;
        }
        let p = if level > 0 { self.levels[level - 1].0 as f64 } else { 1.0 };
        let (copies, bytes) = (m as f64, self.sum(j & !i, |c| c.2));
        (self.compute(level, i, j) + 4.0 * (copies - 1.0) / copies * bytes / self.levels[level].1 / p) / copies
    }

    fn later(&mut self, level: usize, i: u32, j: u32, m: usize) -> f64 {
        if self.straight && m > 1 {
            return f64::INFINITY;
        }
        let (copies, bytes, bandwidth) = (m as f64, self.sum(j & !i, |c| c.2), self.levels[level].1);
        let mut t = (self.compute(level, i, j) + 4.0 * (copies - 1.0) / copies * bytes / bandwidth) / copies;
        if self.transfers {
            t = t.max(2.0 * self.output(i) / (bandwidth * copies));
            if j != self.whole() {
                t = t.max(2.0 * self.output(j) / (bandwidth * copies));
            }
        }
        t
    }

    /// The best pipeline on m groups of what j has beyond i.
    fn pipeline(&mut self, level: usize, i: u32, j: u32, m: usize) -> f64 {
        let mut best = self.first(level, i, j, m);
        for k in self.between(i, j) {
            for copies in 1..m {
                let t = self.first(level, i, k, copies).max(self.tail(level, k, j, m - copies));
                best = best.min(t);
            }
        }
        best
    }

    /// The best of later stages only.
    fn tail(&mut self, level: usize, i: u32, j: u32, m: usize) -> f64 {
        let mut best = self.later(level, i, j, m);
        for k in self.between(i, j) {
            for copies in 1..m {
                let t = self.later(level, i, k, copies).max(self.tail(level, k, j, m - copies));
                best = best.min(t);
            }
        }
        best
    }
}

/// Plans, compares with the search, and makes sure that the stages are a plan, and at one level of the cost that is claimed.
fn compare(
    costs: &[Costs],
    edges: &[(usize, usize)],
    levels: &[(usize, f64)],
    straight: bool,
    transfers: bool,
) -> Result<()> {
    let (graph, topology) = (profile(costs, edges)?, topology(levels)?);
    let mut search = Search { costs, edges, levels, straight, transfers, known: HashMap::new() };
    let whole = search.whole();
    let best = search.pipeline(levels.len() - 1, 0, whole, levels[levels.len() - 1].0);
    let case = format!("{costs:?} {edges:?} {levels:?} {straight} {transfers}");
    let found = match plan_compat(&graph, &topology, straight, transfers) {
        Ok(found) => found,
        Err(e) => {
            assert_eq!(best, f64::INFINITY, "{case}: {e}");
            assert!(e.to_string().contains("no straight pipeline"), "{case}: {e}");
            return Ok(());
        }
    };
    approx::assert_relative_eq!(found.seconds, best, max_relative = 1e-9);
    judge(&graph, &topology, &found.stages)?;
    let workers: usize = found.stages.iter().map(|s| s.workers.len()).sum();
    assert_eq!(workers, topology.workers(), "{case}");
    if levels.len() == 1 {
        let (mut done, mut seconds) = (0, 0.0_f64);
        for stage in &found.stages {
            let next = stage.nodes.iter().fold(done, |set, n| set | 1 << n);
            let (of, m) = (if done == 0 { Search::first } else { Search::later }, stage.workers.len());
            seconds = seconds.max(of(&mut search, 0, done, next, m));
            done = next;
        }
        approx::assert_relative_eq!(found.seconds, seconds, max_relative = 1e-9);
    }
    Ok(())
}

fn compare_all(costs: &[Costs], edges: &[(usize, usize)]) -> Result<()> {
    let tops: [&[(usize, f64)]; 6] =
        [&[(1, 1e3)], &[(4, 2e4)], &[(3, 1e9)], &[(2, 1e5), (2, 1e4)], &[(3, 1e6), (2, 3e3)], &[(1, 1e4), (3, 1e4)]];
    for levels in tops {
        for (straight, transfers) in [(false, false), (false, true), (true, false), (true, true)] {
            compare(costs, edges, levels, straight, transfers)?;
        }
    }
    Ok(())
}

#[test]
fn chains() -> Result<()> {
    compare_all(&[(30, 100, 20)], &[])?;
    compare_all(&[(30, 100, 20), (60, 10, 500)], &[(0, 1)])?;
    let edges = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)];
    compare_all(&[(50, 400, 0), (30, 900, 10), (0, 100, 0), (20, 60, 40), (10, 10, 3000), (5, 1, 900)], &edges)?;
    // Nothing takes any time, and nothing hands anything on.
    compare_all(&[(0, 0, 0); 4], &edges[..3])
}

#[test]
fn diamonds() -> Result<()> {
    let edges = [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4)];
    compare_all(&[(20, 300, 10), (40, 100, 700), (10, 50, 0), (0, 150, 0), (30, 10, 400)], &edges)
}

#[test]
fn branches_and_skips() -> Result<()> {
    // Three branches of unequal length, the first node read again at the end.
    let edges = [(0, 1), (0, 2), (0, 3), (1, 4), (2, 5), (4, 5), (3, 6), (5, 6), (0, 6)];
    let costs = [(10, 80, 5), (20, 40, 90), (30, 20, 10), (15, 70, 0), (25, 10, 300), (5, 60, 0), (40, 5, 50)];
    compare_all(&costs, &edges)?;
    // Two ends.
    compare_all(&costs[..4], &edges[..3])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn no_plan_is_faster(
        costs in prop::collection::vec((0u32..60, 0u32..400, 0u32..900), 2..7),
        from in prop::collection::vec((any::<prop::sample::Index>(), any::<Option<prop::sample::Index>>()), 6),
        level in (1usize..5, 2u32..7),
        outer in prop::option::of((1usize..4, 2u32..7)),
        straight in any::<bool>(),
        transfers in any::<bool>(),
    ) {
        // Each node but the first reads one or two before it, so that all hang together with the first.
        let mut edges = Vec::new();
        for n in 1..costs.len() {
            let (a, b) = (from[n - 1].0.index(n), from[n - 1].1.map(|i| i.index(n)));
            edges.push((a, n));
            edges.extend(b.filter(|&b| b != a).map(|b| (b, n)));
        }
        let levels: Vec<(usize, f64)> = [Some(level), outer].into_iter().flatten()
            .map(|(count, digits)| (count, 10f64.powi(digits as i32))).collect();
        compare(&costs, &edges, &levels, straight, transfers)?;
    }
}

#[test]
fn what_cannot_be_planned_is_said() -> Result<()> {
    let fails = |found: Result<_>, words: &[&str]| {
        let said = found.map(|_: pipewright::pipeline::planner::Compat| ()).expect_err("an error").to_string();
        words.iter().for_each(|w| assert!(said.contains(w), "{w:?} is not in {said}"));
    };
    let four = topology(&[(4, 1e9)])?;
    let chain = profile(&[(1, 1, 1); 3], &[(0, 1), (1, 2)])?;
    fails(plan_compat(&chain, &four, true, true), &["4 workers", "3 stages at most"]);
    let apart = profile(&[(1, 1, 1); 3], &[(0, 1)])?;
    fails(plan_compat(&apart, &four, false, true), &["\"n2\"", "\"n0\""]);
    // 20 branches: a million ways to cut.
    let edges: Vec<(usize, usize)> = (1..=20).flat_map(|n| [(0, n), (n, 21)]).collect();
    fails(plan_compat(&profile(&[(1, 1, 1); 22], &edges)?, &four, false, true), &["every way", "1500"]);
    Ok(())
}

#[test]
fn topologies_that_cannot_be_are_refused() {
    for (levels, words) in [
        (&[][..], &["no workers", "4,4"][..]),
        (&[(0, 1e9)], &["0 workers", "1 to 128"]),
        (&[(4, 1e9), (0, 1e9)], &["4,0 workers", "1 to 128"]),
        (&[(64, 1e9), (4, 1e9)], &["64,4 workers", "1 to 128"]),
        (&[(usize::MAX, 1e9), (3, 1e9)], &["1 to 128"]),
        (&[(4, 1e9), (4, f64::NAN)], &["NaN bytes/s", "level 1"]),
        (&[(4, 0.0)], &["0 bytes/s", "level 0"]),
        (&[(4, -1.0)], &["-1 bytes/s"]),
    ] {
        let said = topology(levels).expect_err("an error").to_string();
        words.iter().for_each(|w| assert!(said.contains(w), "{w:?} is not in {said}"));
    }
}
