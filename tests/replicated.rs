//! The planner of replicated stages against exhaustive search, written from the definition of the costs.
use pipewright::{
    Result,
    layers::*,
    optim::Sgd,
    pipeline::{
        planner::{Limits, Part, judge, plan_compat, plan_replicated},
        profile::{CostGraph, CostNode, Profile},
        topology::{Level, Link, Topology, Worker},
    },
    tensor::DType,
};
use proptest::prelude::*;
use std::time::Instant;

/// Costs that are whole numbers, divisible by all numbers of workers here, so that equal plans are equal to the last bit.
type Costs = [u32; 5];

fn graph(costs: &[Costs], edges: &[(usize, usize)]) -> Result<CostGraph> {
    let node = |(n, c): (usize, &Costs)| {
        let [forward, backward, output_bytes, param_bytes, saved_bytes] = c.map(|x| 60.0 * f64::from(x));
        CostNode {
            name: format!("n{n}"),
            what: "Layer".into(),
            forward,
            backward,
            output_bytes,
            param_bytes,
            saved_bytes,
        }
    };
    CostGraph::new(costs.iter().enumerate().map(node).collect(), edges)
}

fn topology(levels: &[(usize, Link)]) -> Result<Topology> {
    Topology::new(levels.iter().map(|&(count, link)| Level { count, link }).collect())
}

/// Every plan of stages on neighbouring workers, the last stage on the last workers, of all orders of unequal ones. Sets of nodes are
/// bits.
struct Search<'a> {
    costs: &'a [Costs],
    edges: &'a [(usize, usize)],
    levels: &'a [(usize, Link)],
    kinds: &'a [Worker],
}

/// Seconds, workers, stages, bytes of the fullest worker.
type Worth = (f64, usize, usize, f64);

fn is_better(a: Worth, b: Worth) -> bool {
    let equal = (a.0 - b.0).abs() <= 1e-9 * b.0;
    if equal { (a.1, a.2, a.3) < (b.1, b.2, b.3) } else { a.0 < b.0 }
}

impl Search<'_> {
    fn workers(&self) -> usize {
        self.levels.iter().map(|l| l.0).product()
    }

    fn sum(&self, set: u32, what: usize) -> f64 {
        (0..self.costs.len()).filter(|n| set >> n & 1 == 1).map(|n| 60.0 * f64::from(self.costs[n][what])).sum()
    }

    fn is_closed(&self, set: u32) -> bool {
        self.edges.iter().all(|(a, b)| set >> b & 1 == 0 || set >> a & 1 == 1)
    }

    /// Bytes that are made in a set and read beyond it.
    fn crossing(&self, set: u32) -> f64 {
        let is_read = |n: &usize| self.edges.iter().any(|(a, b)| a == n && set >> b & 1 == 0);
        let crossing = (0..self.costs.len()).filter(|n| set >> n & 1 == 1).filter(is_read);
        self.sum(crossing.fold(0, |all, n| all | 1 << n), 2)
    }

    /// The links that messages between two workers pass, and each worker's or group's side of them: level, group, group.
    fn path(&self, a: usize, b: usize) -> Vec<(usize, usize, usize)> {
        let mut group = 1;
        let mut path = Vec::new();
        for (level, (count, _)) in self.levels.iter().enumerate() {
            if a / group != b / group {
                path.push((level, a / group, b / group));
            }
            group *= count;
        }
        path
    }

    /// Seconds that the messages of a byte take of the busiest link, averaged over many minibatches.
    fn edge(&self, from: &[usize], to: &[usize]) -> f64 {
        let minibatches = 60;
        let mut busy = std::collections::HashMap::new();
        for j in 0..minibatches {
            for (level, a, b) in self.path(from[j % from.len()], to[j % to.len()]) {
                for side in [(level, a, true), (level, b, false)] {
                    *busy.entry(side).or_insert(0.0) += 1.0 / self.levels[level].1.bandwidth;
                }
            }
        }
        busy.values().copied().fold(0.0, f64::max) / minibatches as f64
    }

    /// What a plan is worth: the sets of nodes that its stages end with, and their workers.
    /// And whether all workers hold what they must.
    fn judge(&self, ends: &[u32], workers: &[Vec<usize>]) -> (Worth, bool) {
        let (mut seconds, mut memory, mut before, mut fits) = (0.0_f64, 0.0_f64, 0, true);
        for (s, (&end, on)) in ends.iter().zip(workers).enumerate() {
            let (set, r) = (end & !before, on.len() as f64);
            let links: Vec<Link> = on
                .iter()
                .flat_map(|&a| on.iter().flat_map(move |&b| self.path(a, b)))
                .map(|(level, ..)| self.levels[level].1)
                .collect();
            let slowest = links.iter().map(|l| l.bandwidth).fold(f64::INFINITY, f64::min);
            let latest = links.iter().map(|l| l.latency).fold(0.0, f64::max);
            let reduce = 2.0 * (r - 1.0) / r * self.sum(set, 3) / slowest + 2.0 * (r - 1.0) * latest;
            let speed = on.iter().map(|&w| self.kinds[w].speed).fold(f64::INFINITY, f64::min);
            seconds = seconds.max((self.sum(set, 0) / speed + (self.sum(set, 1) / speed).max(reduce)) / r);
            if s > 0 {
                seconds = seconds.max(self.crossing(before) * self.edge(&workers[s - 1], on));
            }
            let later: usize = workers[s..].iter().map(Vec::len).sum();
            let versions = ((later - 1) / on.len() + 1) as f64;
            let held = self.sum(set, 4) + self.crossing(before) + self.sum(set, 3);
            let held = versions * held + 2.0 * self.sum(set, 3);
            fits &= on.iter().all(|&w| held <= self.kinds[w].memory);
            memory = memory.max(held);
            before = end;
        }
        ((seconds, workers.iter().map(Vec::len).sum(), ends.len(), memory), fits)
    }

    fn plans(&self, straight: bool, mut tell: impl FnMut(Worth, bool)) {
        let all: Vec<usize> = (0..self.workers()).collect();
        let orders = if self.kinds.iter().all(|k| *k == self.kinds[0]) { vec![all] } else { orders(&all) };
        for order in orders {
            self.plans_in(&order, straight, &mut tell);
        }
    }

    fn plans_in(&self, order: &[usize], straight: bool, tell: &mut impl FnMut(Worth, bool)) {
        for used in 1..=self.workers() {
            // Every way to write the number as a sum: a bit is a border.
            for borders in 0u32..1 << (used - 1) {
                let mut workers = vec![vec![order[order.len() - used]]];
                for w in 1..used {
                    if borders >> (w - 1) & 1 == 1 {
                        workers.push(Vec::new());
                    }
                    workers.last_mut().expect("a stage").push(order[order.len() - used + w]);
                }
                if !straight || workers.iter().all(|w| w.len() == 1) {
                    self.ends(&workers, &mut Vec::new(), tell);
                }
            }
        }
    }

    /// Every way to end the stages that are left.
    fn ends(&self, workers: &[Vec<usize>], ends: &mut Vec<u32>, tell: &mut impl FnMut(Worth, bool)) {
        let (whole, before) = ((1 << self.costs.len()) - 1, ends.last().copied().unwrap_or(0));
        if ends.len() + 1 == workers.len() {
            if before != whole {
                ends.push(whole);
                let (worth, fits) = self.judge(ends, workers);
                tell(worth, fits);
                ends.pop();
            }
            return;
        }
        for end in (1..whole).filter(|&e| e & before == before && e != before && self.is_closed(e)) {
            ends.push(end);
            self.ends(workers, ends, tell);
            ends.pop();
        }
    }
}

/// All orders of some numbers.
fn orders(of: &[usize]) -> Vec<Vec<usize>> {
    if of.is_empty() {
        return vec![Vec::new()];
    }
    let begin = |at: usize| {
        let rest = orders(&[&of[..at], &of[at + 1..]].concat());
        rest.into_iter().map(move |r| [vec![of[at]], r].concat())
    };
    (0..of.len()).flat_map(begin).collect()
}

/// Plans for equal workers and compares with the search.
fn compare(costs: &[Costs], edges: &[(usize, usize)], levels: &[(usize, Link)], limits: Limits) -> Result<()> {
    compare_with(costs, edges, levels, &vec![Worker::default(); levels.iter().map(|l| l.0).product()], limits)
}

/// Plans and compares with the search.
fn compare_with(
    costs: &[Costs],
    edges: &[(usize, usize)],
    levels: &[(usize, Link)],
    kinds: &[Worker],
    limits: Limits,
) -> Result<()> {
    let (graph, topology) = (graph(costs, edges)?, topology(levels)?.with_workers(kinds.to_vec())?);
    let search = Search { costs, edges, levels, kinds };
    let (mut best, mut smallest): (Option<Worth>, f64) = (None, f64::INFINITY);
    search.plans(limits.straight, |found, fits| {
        smallest = smallest.min(found.3);
        let fits = fits && limits.memory.is_none_or(|m| found.3 <= m) && limits.stages.is_none_or(|s| found.2 <= s);
        if fits && best.is_none_or(|b| is_better(found, b)) {
            best = Some(found);
        }
    });
    let case = format!("{costs:?} {edges:?} {levels:?} {kinds:?} {limits:?}");
    let planned = plan_replicated(&graph, &topology, &limits);
    let (plan, others) = match (planned, best) {
        (Err(e), None) => {
            let said = e.to_string();
            assert!(said.contains("fits into"), "{case}: {said}");
            assert!(
                limits.stages.is_some() || said.contains(&format!(" {smallest:.0}")),
                "{case}: {smallest} in {said}"
            );
            return Ok(());
        }
        (planned, None) => {
            // The published recurrence's plan may fit where no plan of neighbouring workers does.
            assert!(levels.len() > 1 && planned?.0.name.starts_with("published"), "{case}");
            return Ok(());
        }
        (planned, Some(_)) => planned?,
    };
    let best = best.expect("a plan");
    let judged = judge(&graph, &topology, &plan.stages)?;
    assert_eq!(judged, plan.judged, "{case}");
    let ends = plan.stages.iter().scan(0, |set, s| {
        *set = s.nodes.iter().fold(*set, |set, n| set | 1 << n);
        Some(*set)
    });
    let workers: Vec<Vec<usize>> = plan.stages.iter().map(|s| s.workers.clone()).collect();
    let claimed = search.judge(&ends.collect::<Vec<_>>(), &workers);
    let (claimed, fits) = claimed;
    assert!(fits, "{case}: {:?}", plan.stages);
    approx::assert_relative_eq!(claimed.0, judged.seconds(), max_relative = 1e-12);
    assert_eq!(claimed.3, judged.most_memory(), "{case}");
    assert!(!is_better(best, claimed), "{case}: {best:?} is better than {claimed:?}");
    if levels.len() == 1 {
        assert_eq!(claimed, best, "{case}");
    }
    for other in others {
        let theirs = &other.judged;
        let breaks = limits.memory.is_some_and(|m| theirs.most_memory() > m)
            || limits.stages.is_some_and(|s| other.stages.len() > s)
            || other.stages.iter().zip(&theirs.memory).any(|(s, m)| s.workers.iter().any(|&w| kinds[w].memory < *m))
            || limits.straight && other.stages.iter().any(|s| s.workers.len() > 1);
        assert!(breaks || theirs.seconds() >= judged.seconds() * (1.0 - 1e-9), "{case}: {} is faster", other.name);
        assert!(!other.lost_to(&plan, &topology, &limits).is_empty());
    }
    Ok(())
}

fn edges_of(count: usize, bits: u32) -> Vec<(usize, usize)> {
    let all = (0..count).flat_map(|b| (0..b).map(move |a| (a, b)));
    all.enumerate().filter(|(i, _)| bits >> (i % 32) & 1 == 1).map(|(_, e)| e).collect()
}

fn limits() -> impl Strategy<Value = Limits> {
    let memory = prop::option::weighted(0.4, (500u32..30_000).prop_map(f64::from));
    let stages = prop::option::weighted(0.3, 1usize..4);
    (memory, stages, prop::bool::weighted(0.2)).prop_map(|(memory, stages, straight)| Limits {
        memory,
        stages,
        straight,
    })
}

fn link() -> impl Strategy<Value = Link> {
    let bandwidth = prop::sample::select(vec![0.25, 1.0, 4.0, 64.0]);
    (bandwidth, prop::sample::select(vec![0.0, 0.0, 15.0])).prop_map(|(bandwidth, latency)| Link { bandwidth, latency })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn no_plan_of_equal_workers_is_better(
        costs in prop::collection::vec([0u32..20, 0u32..40, 0u32..9, 0u32..60, 0u32..9], 1..9),
        // Of two masks, so that half of the edges are missing.
        bits in (any::<u32>(), any::<u32>()),
        workers in 1usize..6,
        link in link(),
        limits in limits(),
    ) {
        // Without edges there are too many plans to try them all.
        let few = if costs.len() > 6 { bits.0 | 0x4924_9249 } else { bits.0 & bits.1 };
        compare(&costs, &edges_of(costs.len(), few), &[(workers, link)], limits)?;
    }

    #[test]
    fn no_plan_on_two_levels_is_better(
        costs in prop::collection::vec([0u32..20, 0u32..40, 0u32..9, 0u32..60, 0u32..9], 1..6),
        bits in any::<u32>(),
        counts in prop::sample::select(vec![(2, 2), (3, 2), (2, 3), (1, 4), (4, 1)]),
        links in (link(), link()),
        limits in limits(),
    ) {
        let levels = [(counts.0, links.0), (counts.1, links.1)];
        compare(&costs, &edges_of(costs.len(), bits), &levels, limits)?;
    }

    #[test]
    fn no_plan_of_unequal_workers_is_better(
        costs in prop::collection::vec([0u32..20, 0u32..40, 0u32..9, 0u32..60, 0u32..9], 1..6),
        bits in any::<u32>(),
        counts in prop::sample::select(vec![vec![1], vec![3], vec![4], vec![2, 2]]),
        links in prop::collection::vec(link(), 2),
        speeds in prop::collection::vec(prop::sample::select(vec![0.5, 1.0, 2.0]), 4),
        memories in prop::collection::vec(prop::option::of(500u32..30_000), 4),
        limits in limits(),
    ) {
        let kind = |(&speed, memory): (&f64, &Option<u32>)| Worker { speed, memory: memory.map_or(f64::INFINITY, f64::from) };
        let kinds: Vec<Worker> = speeds.iter().zip(&memories).map(kind).collect();
        let levels: Vec<(usize, Link)> = counts.into_iter().zip(links).collect();
        let workers: usize = levels.iter().map(|l| l.0).product();
        compare_with(&costs, &edges_of(costs.len(), bits), &levels, &kinds[..workers], limits)?;
    }

    #[test]
    fn the_published_plan_is_never_better(
        costs in prop::collection::vec([0u32..20, 0u32..40, 0u32..9, 0u32..60, 0u32..9], 1..14),
        bits in any::<u32>(),
        counts in prop::sample::select(vec![vec![4, 4], vec![2, 2, 2], vec![16], vec![3, 5]]),
        links in prop::collection::vec(link(), 3),
    ) {
        let mut edges = edges_of(costs.len(), bits);
        // All hang together with the first node.
        edges.extend((1..costs.len()).filter(|b| !edges.iter().any(|e| e.1 == *b)).map(|b| (0, b)).collect::<Vec<_>>());
        let graph = graph(&costs, &edges)?;
        let topology = topology(&counts.into_iter().zip(links).collect::<Vec<_>>())?;
        let seconds = |stages: &[Part]| Ok::<f64, pipewright::Error>(judge(&graph, &topology, stages)?.seconds());
        let (best, _) = plan_replicated(&graph, &topology, &Limits::default())?;
        let ours = seconds(&best.stages)? * (1.0 - 1e-9);
        for transfers in [true, false] {
            let theirs = seconds(&plan_compat(&graph, &topology, false, transfers)?.stages)?;
            prop_assert!(ours <= theirs, "{ours} s, {theirs} s");
        }
        let all = Part { nodes: (0..costs.len()).collect(), workers: (0..topology.workers()).collect() };
        prop_assert!(ours <= seconds(&[all])?);
        let straight = plan_replicated(&graph, &topology, &Limits { straight: true, ..Limits::default() })?.0;
        prop_assert!(straight.stages.iter().all(|s| s.workers.len() == 1));
        prop_assert!(ours <= straight.judged.seconds());
        let again = plan_replicated(&graph, &topology, &Limits::default())?.0;
        prop_assert_eq!(again.stages, best.stages);
    }
}

#[test]
fn degenerate_graphs_are_planned() -> Result<()> {
    let free = Link { latency: 0.0, bandwidth: 1.0 };
    for (costs, edges) in [
        (vec![[1, 2, 3, 4, 5]], vec![]),
        (vec![[0; 5]; 4], vec![(0, 1), (1, 2), (2, 3)]),
        (vec![[0; 5]; 3], vec![]),
        // Several first and last nodes.
        (vec![[3, 3, 1, 1, 1]; 5], vec![(0, 2), (1, 2), (2, 3), (2, 4)]),
    ] {
        for workers in [1, 4] {
            compare(&costs, &edges, &[(workers, free)], Limits::default())?;
        }
    }
    Ok(())
}

#[test]
fn what_is_no_plan_is_said() -> Result<()> {
    let graph = graph(&[[1; 5]; 3], &[(0, 1), (1, 2)])?;
    let topology = topology(&[(3, Link { latency: 0.0, bandwidth: 1.0 })])?;
    let part = |nodes: &[usize], workers: &[usize]| Part { nodes: nodes.to_vec(), workers: workers.to_vec() };
    judge(&graph, &topology, &[part(&[0, 1], &[2, 0]), part(&[2], &[1])])?;
    for (stages, words) in [
        (vec![part(&[0, 1], &[0])], &["\"n2\"", "no stage"][..]),
        (vec![part(&[0, 1], &[0]), part(&[1, 2], &[1])], &["node 1", "stage 1"]),
        (vec![part(&[0, 1, 2, 3], &[0])], &["node 3"]),
        (vec![part(&[0, 1, 2], &[])], &["no worker"]),
        (vec![part(&[0, 1, 2], &[0]), part(&[], &[1])], &["stage 1", "no node"]),
        (vec![part(&[0, 1, 2], &[3])], &["worker 3"]),
        (vec![part(&[0, 1], &[0, 1]), part(&[2], &[1])], &["worker 1"]),
        (vec![part(&[0, 2], &[0]), part(&[1], &[1])], &["\"n2\"", "\"n1\"", "reads"]),
    ] {
        let said = judge(&graph, &topology, &stages).expect_err("an error").to_string();
        words.iter().for_each(|w| assert!(said.contains(w), "{w:?} is not in {said}"));
    }
    Ok(())
}

/// Cells of many branches, each read by the next two: more ways to cut it than atoms.
#[test]
fn a_graph_that_can_be_cut_in_too_many_ways_is_planned_along_orders() -> Result<()> {
    let (mut costs, mut edges) = (vec![[1, 2, 9, 1, 9]], Vec::new());
    let mut cells = vec![0, 0];
    for cell in 0..18 {
        let sources = [cells[cell], cells[cell + 1]];
        let mut branches = Vec::new();
        for branch in 0..10 {
            for step in 0..4u32 {
                let n = costs.len();
                edges.push((if step == 0 { sources[branch % 2] } else { n - 1 }, n));
                costs.push([1 + step, (branch as u32 * 7 + step) % 9, 1 + step, 3, 1]);
            }
            branches.push(costs.len() - 1);
        }
        edges.extend(branches.into_iter().map(|b| (b, costs.len())));
        cells.push(costs.len());
        costs.push([1, 1, 2, 0, 1]);
    }
    let graph = graph(&costs, &edges)?;
    let link = |bandwidth| Link { latency: 0.0, bandwidth };
    for bandwidth in [1e-2, 1.0, 1e6] {
        let topology = topology(&[(4, link(1e3)), (4, link(bandwidth))])?;
        let start = Instant::now();
        let (best, others) = plan_replicated(&graph, &topology, &Limits::default())?;
        let took = start.elapsed().as_secs_f64();
        println!("{took:.3} s at {bandwidth} bytes/s: {}", best.shape());
        assert!(cfg!(debug_assertions) || took < 1.0, "{took} s at {bandwidth} bytes/s");
        assert_eq!(judge(&graph, &topology, &best.stages)?, best.judged);
        assert!(others.iter().all(|o| o.judged.seconds() >= best.judged.seconds()));
    }
    Ok(())
}

/// Layers that share parameters stay together, and stages are neighbours in the order of the graph, so that a plan can be run.
#[test]
fn plans_of_models_are_plans() -> Result<()> {
    let mut g = Graph::new();
    let (x, label) = (g.input("x", [8]), g.label("label"));
    let first = g.add(Linear::new(8, 8), [x])?;
    let mut h = first;
    for _ in 0..4 {
        h = g.add(Linear::new(8, 8), [h])?;
        let skip = g.add(Relu, [h])?;
        h = g.add(Concat::new(1), [h, skip])?;
        h = g.add(Linear::new(16, 8), [h])?;
    }
    h = g.add(Relu, [h])?;
    let tied = g.add_tied(Linear::new(8, 8), [h], first)?;
    let loss = g.add(CrossEntropy::new(), [tied, label])?;
    let g = g.with_loss(loss)?;
    let costs = Profile::estimate(&g, &Sgd::new(0.1), DType::F32, &[64])?.at(64)?;
    let topology = topology(&[(4, Link { latency: 0.0, bandwidth: 1e9 })])?;
    let graph = CostGraph::of_model(&g, &costs)?;
    // What is tied spans all but the loss.
    let best = plan_replicated(&graph, &topology, &Limits { straight: true, ..Limits::default() })?.0;
    assert!(best.stages.len() <= 2, "{:?}", best.stages);
    best.plan(&g)?;
    Ok(())
}

/// Many unequal workers: some orders only, but none holds too much.
#[test]
fn many_unequal_workers_are_planned_within_their_memory() -> Result<()> {
    let graph = graph(&[[5, 9, 40, 3, 40]; 12], &(1..12).map(|n| (n - 1, n)).collect::<Vec<_>>())?;
    let link = |bandwidth| Link { latency: 0.0, bandwidth };
    let even = topology(&[(4, link(64.0)), (2, link(8.0))])?;
    // The second server is twice as fast, and one worker of each holds little.
    let kind = |w: usize| Worker { speed: if w < 4 { 1.0 } else { 2.0 }, memory: if w % 4 == 1 { 9e3 } else { 1e6 } };
    let uneven = even.clone().with_workers((0..8).map(kind).collect())?;
    let limits = Limits::default();
    let (best, others) = plan_replicated(&graph, &uneven, &limits)?;
    for plan in others.iter().chain([&best]) {
        assert_eq!(judge(&graph, &uneven, &plan.stages)?, plan.judged);
    }
    for (stage, held) in best.stages.iter().zip(&best.judged.memory) {
        assert!(stage.workers.iter().all(|&w| kind(w).memory >= *held), "{stage:?} holds {held}");
    }
    // 12 nodes of 840 s: eight workers of speed 1 need 1260 s, and these are one and a half times as fast.
    let slow = plan_replicated(&graph, &even, &limits)?.0.judged.seconds();
    assert!(best.judged.seconds() < slow && best.judged.seconds() >= 840.0, "{} s, {slow} s", best.judged.seconds());
    Ok(())
}

#[test]
fn topology_files_say_what_is_wrong() -> Result<()> {
    let text = "[[level]]\ncount = 2\nbandwidth = 10e9\n[[level]]\ncount = 1\nbandwidth = 1e9\nlatency = 5e-5\n";
    let even = Topology::from_text(text)?;
    let levels = [(2, Link { latency: 0.0, bandwidth: 10e9 }), (1, Link { latency: 5e-5, bandwidth: 1e9 })];
    assert_eq!(even, topology(&levels)?);
    assert!(even.is_even());
    let uneven = Topology::from_text(&format!("{text}[[worker]]\nspeed = 2.0\n[[worker]]\nmemory = 1e9\n"))?;
    assert!(!uneven.is_even());
    for topology in [&even, &uneven] {
        assert_eq!(Topology::from_text(&topology.to_text())?, *topology);
    }
    assert_eq!(uneven.worker(0), Worker { speed: 2.0, ..Worker::default() });
    assert_eq!(uneven.worker(1), Worker { memory: 1e9, ..Worker::default() });
    for (text, words) in [
        (String::new(), &["not a topology", "level"][..]),
        ("level = []".to_string(), &["no workers"]),
        (text.replace("count = 2", "count = -2"), &["line 2", "-2"]),
        (text.replace("count = 2", "colour = 2"), &["line 2", "colour"]),
        (text.replace("1e9", "nan"), &["NaN bytes/s", "level 1"]),
        (format!("{text}[[worker]]\n"), &["1 workers", "have 2"]),
        (format!("{text}[[worker]]\nspeed = 0.0\n[[worker]]\n"), &["worker 0", "speed of 0"]),
        (format!("{text}[[worker]]\n[[worker]]\nmemory = nan\n"), &["worker 1", "NaN bytes"]),
    ] {
        let said = Topology::from_text(&text).expect_err(&text).to_string();
        words.iter().for_each(|w| assert!(said.contains(w), "{w:?} is not in {said}"));
    }
    Ok(())
}
