//! Split, replicas, schedule and micro-batches chosen together, against all there are.
use pipewright::{
    Result,
    pipeline::{
        planner::{Choice, Limits, Mode, Part, Space, evaluate, plan_jointly},
        profile::{CostGraph, CostNode},
        schedule::Kind,
        topology::{Level, Link, Topology},
    },
};
use proptest::{prelude::*, test_runner::RngSeed};

/// Forward, backward, output, parameters, saved.
type Costs = [u32; 5];

fn graph(costs: &[Costs], bits: u32) -> Result<CostGraph> {
    let node = |(n, c): (usize, &Costs)| {
        let [forward, backward, output_bytes, param_bytes, saved_bytes] = c.map(f64::from);
        CostNode {
            name: format!("n{n}"),
            what: String::new(),
            forward,
            backward,
            output_bytes,
            param_bytes,
            saved_bytes,
        }
    };
    let all = (0..costs.len()).flat_map(|b| (0..b).map(move |a| (a, b)));
    let edges: Vec<(usize, usize)> =
        all.enumerate().filter(|(i, _)| bits >> (i % 32) & 1 == 1).map(|(_, e)| e).collect();
    CostGraph::new(costs.iter().enumerate().map(node).collect(), &edges)
}

fn modes(micro_batches: &[usize]) -> Vec<Mode> {
    let flushed = micro_batches.iter().map(|&m| Mode { schedule: Kind::OneFOneB, micro_batches: m });
    [Mode::PIPEDREAM].into_iter().chain(flushed).collect()
}

/// All plans of a graph on at most so many workers.
fn plans(graph: &CostGraph, workers: usize) -> Vec<Vec<Part>> {
    let count = graph.nodes().len();
    let mut found = Vec::new();
    let mut under_way: Vec<Vec<Part>> = vec![Vec::new()];
    while let Some(stages) = under_way.pop() {
        let done: Vec<usize> = stages.iter().flat_map(|s| s.nodes.clone()).collect();
        let used: usize = stages.iter().map(|s| s.workers.len()).sum();
        if done.len() == count {
            found.push(stages);
            continue;
        }
        for set in 1u32..1 << count {
            let nodes: Vec<usize> = (0..count).filter(|n| set >> n & 1 == 1).collect();
            let is_ready = |n: &usize| {
                !done.contains(n) && graph.sources(*n).iter().all(|s| done.contains(s) || nodes.contains(s))
            };
            if !nodes.iter().all(is_ready) {
                continue;
            }
            for replicas in 1..=workers - used {
                let part = Part { nodes: nodes.clone(), workers: (used..used + replicas).collect() };
                under_way.push([&stages[..], &[part]].concat());
            }
        }
    }
    found
}

fn holds(choice: &Choice, graph: &CostGraph, space: &Space) {
    let mut nodes: Vec<usize> = choice.stages.iter().flat_map(|s| s.nodes.clone()).collect();
    nodes.sort_unstable();
    assert_eq!(nodes, (0..graph.nodes().len()).collect::<Vec<_>>(), "each node once");
    assert!(choice.stages.iter().all(|s| !s.nodes.is_empty() && !s.workers.is_empty()));
    assert!(space.limits.memory.is_none_or(|most| choice.judged.memory.iter().all(|m| *m <= most)), "{choice:?}");
    assert!(space.limits.stages.is_none_or(|most| choice.stages.len() <= most), "{choice:?}");
    assert!(space.versions.is_none_or(|most| choice.versions.iter().all(|v| *v <= most)), "{choice:?}");
    assert!(space.staleness.is_none_or(|most| choice.staleness.iter().all(|s| *s <= most)), "{choice:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, rng_seed: RngSeed::Fixed(7), ..ProptestConfig::default() })]

    /// At most 15 % above the best of all plans under all schedules that keep to the limits, each with the warm-up that suits it.
    #[test]
    fn no_choice_is_much_better(
        costs in prop::collection::vec([0u32..20, 1u32..40, 0u32..9, 0u32..60, 0u32..9], 1..7),
        bits in any::<u32>(),
        workers in 1usize..5,
        bandwidth in prop::sample::select(vec![0.25, 1.0, 4.0, 64.0]),
        latency in prop::sample::select(vec![0.0, 2.0]),
        memory in prop::option::weighted(0.3, 300u32..2_000),
        stages in prop::option::weighted(0.3, 1usize..4),
        versions in prop::option::weighted(0.3, 1usize..4),
        staleness in prop::option::weighted(0.3, 0usize..3),
    ) {
        // Most layers follow each other.
        let graph = graph(&costs, bits | 0x2525)?;
        let topology = Topology::new(vec![Level { count: workers, link: Link { latency, bandwidth } }])?;
        let limits = Limits { memory: memory.map(f64::from), stages, straight: false };
        let space = Space { limits, versions, staleness, ..Space::of(modes(&[2, 4])) };
        let mut best = f64::INFINITY;
        for stages in plans(&graph, workers) {
            for &mode in &space.modes {
                let graph = graph.in_micro_batches(mode.micro_batches);
                if let Ok(choice) = evaluate(mode, &graph, &topology, &space, stages.clone()) {
                    holds(&choice, &graph, &space);
                    best = best.min(choice.seconds);
                }
            }
        }
        match plan_jointly(&|m| Ok(graph.in_micro_batches(m)), &topology, &space) {
            Ok((choice, others)) => {
                holds(&choice, &graph, &space);
                prop_assert!(choice.seconds <= best * 1.15, "{} {} {} where {best} is possible", choice.shape(), choice.mode, choice.seconds);
                prop_assert!(choice.seconds >= best * (1.0 - 1e-9));
                prop_assert!(others.iter().all(|o| !o.why.is_empty()));
                let again = plan_jointly(&|m| Ok(graph.in_micro_batches(m)), &topology, &space)?;
                prop_assert_eq!(again, (choice, others));
            }
            Err(e) => prop_assert!(best.is_infinite(), "{e}, where {best} is possible"),
        }
    }
}
