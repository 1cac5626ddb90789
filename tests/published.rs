//! The planners on the published profiles, and the published recurrence against what the released partitioner answered (others' data,
//! not part of this repository: skipped where it is absent).
use pipewright::pipeline::{
    planner::{Limits, Mode, Part, Space, judge, plan_compat, plan_jointly, plan_replicated, shape_of},
    profile::{CostGraph, CostNode},
    schedule::{
        Kind, Wiring, prepare, simulate,
        simulate::{Costs, EdgeCost, StageCost},
    },
    topology::{Level, Link, Topology},
};
use serde_json::Value;
use std::{collections::HashMap, io::Write, path::PathBuf, time::Instant};

/// The folder of the published answers; the profiles lie beside it.
fn published() -> Option<PathBuf> {
    let default = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../shared/data/published");
    let folder = std::env::var_os("PIPEWRIGHT_PUBLISHED").map_or(default, PathBuf::from);
    if folder.is_dir() {
        return Some(folder);
    }
    // Past the test runner, which keeps what a passing test prints to itself.
    let line = format!("skipped: {} is not there (PIPEWRIGHT_PUBLISHED names the folder)\n", folder.display());
    std::io::stderr().write_all(line.as_bytes()).expect("standard error");
    None
}

#[test]
fn the_released_partitioner_answers_the_same() {
    let Some(folder) = published() else { return };
    let text = std::fs::read_to_string(folder.join("planner_expected.json")).expect("the answers");
    let expected: Value = serde_json::from_str(&text).expect("JSON");
    let mut graphs: HashMap<String, CostGraph> = HashMap::new();
    let mut wrong = Vec::new();
    let mut tried = 0;
    for case in expected["cases"].as_array().expect("cases") {
        let word = |name: &str| case[name].as_str().expect("a text").to_string();
        let numbers = |name: &str| -> Vec<f64> {
            case[name].as_array().expect("numbers").iter().map(|x| x.as_f64().expect("a number")).collect()
        };
        let flags: Vec<&str> = case["flags"].as_array().expect("flags").iter().filter_map(Value::as_str).collect();
        let has = |flag: &str| flags.contains(&flag);
        if has("--use_memory_constraint") || has("--use_fewer_machines") {
            continue;
        }
        let model = word("model").replace("gnmt", "gnmt8");
        let graph = graphs.entry(model.clone()).or_insert_with(|| {
            let path = folder.join(format!("../profiles/{model}.txt"));
            CostGraph::load_published(&path).and_then(|g| Ok(g.without_ends()?.graph)).expect("a profile")
        });
        let level = |(n, bandwidth): (f64, f64)| Level { count: n as usize, link: Link { latency: 0.0, bandwidth } };
        let topology = Topology::new(numbers("n").into_iter().zip(numbers("b")).map(level).collect()).expect("workers");
        let start = Instant::now();
        let found = plan_compat(graph, &topology, has("--straight_pipeline"), has("--activation_compression_ratio"));
        let found = found.expect("a plan");
        let took = start.elapsed().as_secs_f64();
        let id = word("id");
        println!("{id}: {took:.3} s");
        let near = |a: f64, b: &Value| b.as_f64().is_some_and(|b| (a - b).abs() <= 1e-6 * b.abs());
        let single = graph.seconds();
        let all = [
            ("time_per_stage_s", found.seconds),
            ("single_worker_time_s", single),
            ("speedup_vs_single", single / found.seconds),
            ("dp_speedup_vs_single", single / found.data_parallel_seconds),
            ("speedup_vs_dp", found.data_parallel_seconds / found.seconds),
        ];
        wrong.extend(
            all.iter()
                .filter(|(name, x)| !near(*x, &case[*name]))
                .map(|(name, x)| format!("{id}: {name} of {x}, {} expected", case[*name])),
        );
        if !cfg!(debug_assertions) && took >= 1.0 {
            wrong.push(format!("{id}: {took} s"));
        }
        tried += 1;
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(tried > 0, "no case in {}", folder.display());
}

/// The planner of replicated stages on every published profile, four servers of four.
#[test]
fn published_profiles_are_planned_in_less_than_a_second() {
    let Some(folder) = published() else { return };
    let level = |bandwidth| Level { count: 4, link: Link { latency: 0.0, bandwidth } };
    let topology = Topology::new(vec![level(10e9), level(1.25e9)]).expect("workers");
    let files = std::fs::read_dir(folder.join("../profiles")).expect("the profiles");
    for file in files.map(|f| f.expect("a file").path()) {
        let graph = CostGraph::load_published(&file).and_then(|g| Ok(g.without_ends()?.graph)).expect("a profile");
        let start = Instant::now();
        let (best, _) = plan_replicated(&graph, &topology, &Limits::default()).expect("a plan");
        let took = start.elapsed().as_secs_f64();
        println!("{}: {took:.3} s, {}", file.display(), best.shape());
        assert!(cfg!(debug_assertions) || took < 1.0, "{}: {took} s", file.display());
        let seconds = |stages: &[Part]| judge(&graph, &topology, stages).expect("a plan").seconds();
        let ours = seconds(&best.stages) * (1.0 - 1e-9);
        let all = Part { nodes: (0..graph.nodes().len()).collect(), workers: (0..16).collect() };
        assert!(ours <= seconds(&[all]));
        for (straight, transfers) in [(false, true), (false, false), (true, true)] {
            // It gives up on the largest.
            if let Ok(theirs) = plan_compat(&graph, &topology, straight, transfers) {
                assert!(ours <= seconds(&theirs.stages), "{}", file.display());
            }
        }
    }
}

/// The choice of the schedule, micro-batches and all on the same workers.
#[test]
fn published_profiles_are_planned_jointly_in_less_than_ten_seconds() {
    let Some(folder) = published() else { return };
    let level = |bandwidth| Level { count: 4, link: Link { latency: 0.0, bandwidth } };
    let topology = Topology::new(vec![level(10e9), level(1.25e9)]).expect("workers");
    let flushed = [4, 8, 16, 32, 64].map(|m| Mode { schedule: Kind::OneFOneB, micro_batches: m });
    let space = Space::of([Mode::PIPEDREAM].into_iter().chain(flushed).collect());
    let files = std::fs::read_dir(folder.join("../profiles")).expect("the profiles");
    for file in files.map(|f| f.expect("a file").path()) {
        let graph = CostGraph::load_published(&file).and_then(|g| Ok(g.without_ends()?.graph)).expect("a profile");
        let start = Instant::now();
        let graphs = |m| Ok(graph.in_micro_batches(m));
        let (choice, others) = plan_jointly(&graphs, &topology, &space).expect("a plan");
        let took = start.elapsed().as_secs_f64();
        println!("{}: {took:.3} s, {} {}, {:.1} ms", file.display(), choice.shape(), choice.mode, 1e3 * choice.seconds);
        for o in others {
            println!("  not {} {} {:.1} ms {}", o.shape, o.mode, 1e3 * o.seconds, o.why);
        }
        assert!(cfg!(debug_assertions) || took < 10.0, "{}: {took} s", file.display());
    }
}

/// The servers of the published runs: workers of one, servers, bytes/s inside and between them.
type Servers = (usize, usize, f64, f64);

const FOUR_OF_FOUR: Servers = (4, 4, 10e9, 1.25e9);
const TWO_OF_EIGHT: Servers = (8, 2, 30e9, 3.125e9);

/// What was published (Narayanan et al., SOSP 2019, table 1) where a profile was too: the profile, the servers, the configuration that
/// was chosen, how many times faster than data parallelism it ran, and whether it is the fastest by the costs here too.
const ROWS: [(&str, Servers, &str, f64, bool); 9] = [
    ("vgg16", FOUR_OF_FOUR, "15-1", 5.28, true),
    ("vgg16", TWO_OF_EIGHT, "15-1", 2.98, true),
    ("resnet50", FOUR_OF_FOUR, "16", 1.0, true),
    ("resnet50", TWO_OF_EIGHT, "16", 1.0, true),
    ("alexnet", FOUR_OF_FOUR, "15-1", 4.92, true),
    ("alexnet", TWO_OF_EIGHT, "15-1", 2.04, true),
    ("gnmt8", (4, 1, 10e9, 1.25e9), "straight", 1.5, true),
    ("gnmt8", (4, 3, 10e9, 1.25e9), "straight", 3.0, true),
    // Why: docs/planning.md.
    ("gnmt8", TWO_OF_EIGHT, "16", 1.0, false),
];

/// Times that differ by less are a tie.
const TIE: f64 = 1.05;

/// Seconds of F and of B of a stage.
fn passes(graph: &CostGraph, stage: &Part) -> [f64; 2] {
    let sum = |time: fn(&CostNode) -> f64| stage.nodes.iter().map(|&n| time(&graph.nodes()[n])).sum();
    [sum(|n| n.forward), sum(|n| n.backward)]
}

/// Seconds per minibatch of PipeDream's schedule by the simulator, whose links are shared by nobody.
fn simulated(graph: &CostGraph, topology: &Topology, stages: &[Part]) -> f64 {
    let judged = judge(graph, topology, stages).expect("a plan");
    let cost = |(stage, sync): (&Part, &f64)| {
        let [forward, backward] = passes(graph, stage);
        let reduce = (sync * stage.workers.len() as f64 - backward).max(0.0);
        StageCost { forward, input_grad: backward / 2.0, weight_grad: backward / 2.0, reduce, ..Default::default() }
    };
    let stage_of = |n: usize| stages.iter().position(|s| s.nodes.contains(&n)).expect("a stage");
    let edge = |cut: usize| {
        let crosses = |&n: &usize| stage_of(n) <= cut && graph.readers(n).iter().any(|&r| stage_of(r) > cut);
        let bytes: f64 = (0..graph.nodes().len()).filter(crosses).map(|n| graph.nodes()[n].output_bytes).sum();
        let pairs = stages[cut].workers.iter().flat_map(|&a| stages[cut + 1].workers.iter().map(move |&b| (a, b)));
        let level = pairs.filter_map(|(a, b)| topology.between(a, b)).max().expect("two workers");
        let seconds = bytes / topology.slowest(level).bandwidth;
        EdgeCost { forward: seconds, backward: seconds, ..EdgeCost::default() }
    };
    let wiring = Wiring::replicated(&stages.iter().map(|s| s.workers.len()).collect::<Vec<_>>());
    let costs = Costs {
        stages: stages.iter().zip(&judged.sync_seconds).map(cost).collect(),
        edges: (0..stages.len() - 1).map(edge).collect(),
        ..Costs::default()
    };
    let shape = wiring.shape().expect("a shape");
    let (programs, _) = prepare(Kind::PipeDream, &shape, &wiring, 64 * topology.workers()).expect("programs");
    simulate(&programs, &wiring, &costs).expect("a timeline").seconds_per_micro_batch
}

/// Data parallelism, the best straight pipeline, and the best of all cuts of the graph's order into all workers but one, and that one.
fn configurations(graph: &CostGraph, topology: &Topology) -> [Vec<Part>; 3] {
    let (order, n) = (graph.order(), topology.workers());
    let data_parallel = vec![Part { nodes: (0..order.len()).collect(), workers: (0..n).collect() }];
    let limits = Limits { straight: true, ..Limits::default() };
    let straight = plan_replicated(graph, topology, &limits).expect("a plan").0.stages;
    let seconds = |stages: &Vec<Part>| judge(graph, topology, stages).expect("a plan").seconds();
    let part =
        |nodes: &[usize], workers: std::ops::Range<usize>| Part { nodes: nodes.to_vec(), workers: workers.collect() };
    let hybrid = (1..order.len())
        .map(|cut| vec![part(&order[..cut], 0..n - 1), part(&order[cut..], n - 1..n)])
        .min_by(|a, b| seconds(a).total_cmp(&seconds(b)))
        .expect("two nodes");
    [data_parallel, straight, hybrid]
}

/// Of the configurations that were published, the one that won there wins here, by the planner's costs and by the simulator. What it
/// prints is the table of docs/planning.md.
#[test]
fn published_configurations_rank_as_they_did() {
    let Some(folder) = published() else { return };
    for (model, (inner, outer, fast, slow), winner, factor, agrees) in ROWS {
        let path = folder.join(format!("../profiles/{model}.txt"));
        let graph = CostGraph::load_published(&path).and_then(|g| Ok(g.without_ends()?.graph)).expect("a profile");
        let level = |count, bandwidth| Level { count, link: Link { latency: 0.0, bandwidth } };
        let topology = Topology::new(vec![level(inner, fast), level(outer, slow)]).expect("workers");
        let all = configurations(&graph, &topology);
        let at = match winner {
            "straight" => 1,
            shape => all.iter().position(|stages| shape_of(stages) == shape).expect("a configuration"),
        };
        let costs = all.each_ref().map(|stages| judge(&graph, &topology, stages).expect("a plan").seconds());
        let simulations = all.each_ref().map(|stages| simulated(&graph, &topology, stages));
        let row = format!("{model} {inner}x{outer} {winner} {factor}");
        for (how, seconds) in [("costs", costs), ("simulator", simulations)] {
            let shapes = all.each_ref().map(|stages| shape_of(stages));
            println!(
                "{row}: {how}: {}",
                (0..3).map(|c| format!("{} {:.2} ms, ", shapes[c], 1e3 * seconds[c])).collect::<String>()
            );
            let least = seconds.iter().copied().fold(f64::INFINITY, f64::min);
            assert_eq!(seconds[at] <= TIE * least, agrees, "{row} by {how}: {seconds:?}");
        }
        // Where the factor comes from: passes alone; sums that hide behind F and B; behind B only; half the batch.
        let largest = |graph: &CostGraph, stages: &[Part], of: &dyn Fn(f64, f64) -> f64| {
            let j = judge(graph, &topology, stages).expect("a plan");
            let stage =
                |(s, sync): (&Part, &f64)| of(passes(graph, s).iter().sum::<f64>() / s.workers.len() as f64, *sync);
            let of_stages = stages.iter().zip(&j.sync_seconds).map(stage);
            of_stages.chain(j.edge_seconds.iter().map(|&e| of(0.0, e))).fold(0.0, f64::max)
        };
        let half = graph.in_micro_batches(2);
        let ratio = |time: &dyn Fn(&[Part]) -> f64| time(&all[0]) / time(&all[at]);
        println!(
            "{row}: passes {:.2}, sums behind F and B {:.2}, behind B {:.2}; half the batch {:.2}, {:.2}",
            ratio(&|s| largest(&graph, s, &|work, _| work)),
            ratio(&|s| largest(&graph, s, &f64::max)),
            costs[0] / costs[at],
            ratio(&|s| largest(&half, s, &f64::max)),
            ratio(&|s| judge(&half, &topology, s).expect("a plan").seconds()),
        );
    }
}

/// A chain of two layers behind an input.
const SMALL: &str = "in -- Input0 -- forward_compute_time=9.000, backward_compute_time=0.000, activation_size=8, parameter_size=0
a -- Conv2d(3, 64, kernel_size=(3, 3)) -- forward_compute_time=1.5, backward_compute_time=2, activation_size=[4.0; 2; 1], parameter_size=12.000
b -- Odd -- name -- forward_compute_time=1, backward_compute_time=1e0, activation_size=0, parameter_size=0 -- stage_id=3

\tin -- a
\ta -- b";

#[test]
fn the_text_format_is_read() -> pipewright::Result<()> {
    for text in [SMALL.to_string(), SMALL.replace('\n', "\r\n"), format!("\n{SMALL}\n\n")] {
        let whole = CostGraph::from_published(&text)?;
        let a = &whole.nodes()[1];
        assert_eq!((a.name.as_str(), a.what.as_str()), ("a", "Conv2d(3, 64, kernel_size=(3, 3))"));
        assert_eq!((a.forward, a.backward, a.output_bytes, a.param_bytes), (0.0015, 0.002, 7.0, 12.0));
        assert_eq!(whole.nodes()[2].what, "Odd -- name");
        assert_eq!((whole.readers(0), whole.sources(2), whole.order()), (&[1][..], &[1][..], &[0, 1, 2][..]));
        let trimmed = whole.without_ends()?;
        assert_eq!((trimmed.was, trimmed.left_out), (vec![1, 2], vec![(0, None)]));
        assert_eq!(trimmed.graph.sources(1), [0]);
    }
    // A result that nothing reads belongs to the node that makes it.
    let part = |id: &str| {
        format!(
            "{id} -- __getitem__(0) -- {}",
            SMALL.lines().next().expect("a line").split_once("0 -- ").expect("costs").1
        )
    };
    let more = SMALL.replace("\n\n", &format!("\n{}\n{}\n\n", part("c"), part("d"))) + "\n\ta -- c\n\tc -- d";
    let trimmed = CostGraph::from_published(&more)?.without_ends()?;
    assert_eq!((trimmed.was, trimmed.left_out), (vec![1, 2, 3], vec![(0, None), (4, Some(2))]));
    Ok(())
}

#[test]
fn what_is_no_profile_is_said() {
    let with = |from: &str, to: &str| SMALL.replacen(from, to, 1);
    let cases: &[(String, &[&str])] = &[
        (String::new(), &["empty", "forward_compute_time"]),
        ("\n \n".to_string(), &["empty"]),
        ("garbage".to_string(), &["line 1", "a node expected", "garbage"]),
        ("\u{0}".repeat(1000), &["line 1", "a node expected"]),
        (with("a -- Conv", " -- Conv"), &["line 2", "a node expected"]),
        (with(", parameter_size=12.000", ""), &["line 2", "a node expected"]),
        (with("parameter_size=12.000", "parameters=12.000"), &["line 2", "a node expected"]),
        (with("parameter_size=12.000", "activation_size=12.000"), &["line 2", "activation_size", "twice"]),
        (with("=1.5", "=-1.5"), &["line 2", "forward_compute_time=\"-1.5\"", "0 or more"]),
        (with("=1.5", "=NaN"), &["line 2", "NaN"]),
        (with("=1.5", "=inf"), &["line 2", "inf"]),
        (with("=1.5", "="), &["line 2", "a number of 0 or more"]),
        (with("=1.5", "=1e300"), &["line 2", "\"a\"", "forward", "expected"]),
        (with("=12.000", "=1e17"), &["line 2", "\"a\"", "parameters", "bytes"]),
        (with("[4.0; 2; 1]", "[4.0; 2; 1"), &["line 2", "[4.0"]),
        (with("[4.0; 2; 1]", "[4.0; x]"), &["line 2", "\"x\""]),
        (with("[4.0; 2; 1]", "[1e15; 1e15]"), &["line 2", "output"]),
        (with("=12.000", "=[12.000]"), &["line 2", "parameter_size"]),
        (with("stage_id=3", "stage_id=x"), &["line 3", "stage_id"]),
        (with("b -- Odd", "a -- Odd"), &["line 3", "\"a\"", "twice"]),
        (with("\ta -- b", "\ta -- c"), &["line 6", "\"c\"", "not in the profile"]),
        (with("\ta -- b", "\ta, b"), &["line 6", "an edge expected"]),
        (with("\ta -- b", "\tin -- a"), &["line 6", "twice"]),
        (with("\ta -- b", "\tb -- b"), &["line 6", "\"b\"", "cycle"]),
        (with("\ta -- b", "a -- b"), &["line 6", "an edge expected", "TAB"]),
        (format!("{SMALL}\n\tb -- a"), &["depends on itself", "cycle"]),
    ];
    for (text, words) in cases {
        let said = CostGraph::from_published(text).expect_err(text).to_string();
        words.iter().for_each(|w| assert!(said.contains(w), "{w:?} is not in {said}"));
    }
    let only = CostGraph::from_published(SMALL.lines().next().expect("a line")).expect("an input");
    assert!(only.without_ends().expect_err("nothing").to_string().contains("a layer expected"));
    let missing = CostGraph::load_published(&PathBuf::from("/nowhere/profile.txt")).expect_err("no file").to_string();
    assert!(missing.contains("profile.txt"), "{missing}");
}
