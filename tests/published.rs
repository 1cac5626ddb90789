//! The planners on the published profiles, and the published recurrence against what the released partitioner answered (others' data,
//! not part of this repository: skipped where it is absent).
use pipewright::pipeline::{
    planner::{Limits, Part, judge, plan_compat, plan_replicated},
    profile::CostGraph,
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
