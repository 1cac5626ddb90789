//! `pipewright plan --workers`: what it prints, and what it refuses.
mod program;

use pipewright::pipeline::{planner::plan_compat, profile::CostGraph, topology::*};
use program::{DATA, command, fails, folder, json, path, text};
use serde_json::Value;

/// Five layers behind an input, most of the time in the first and most of the parameters in the last.
const PROFILE: &str =
    "in -- Input -- forward_compute_time=5, backward_compute_time=0, activation_size=1000, parameter_size=0
a -- Conv -- forward_compute_time=20, backward_compute_time=40, activation_size=4000000, parameter_size=10000
b -- Conv -- forward_compute_time=10, backward_compute_time=20, activation_size=1000000, parameter_size=20000
c -- ReLU -- forward_compute_time=0, backward_compute_time=0, activation_size=1000000, parameter_size=0
d -- Linear -- forward_compute_time=2, backward_compute_time=4, activation_size=10000, parameter_size=400000000
e -- Linear -- forward_compute_time=1, backward_compute_time=1, activation_size=1000, parameter_size=9000000
\tin -- a
\ta -- b
\tb -- c
\tc -- d
\td -- e
";

fn saved(folder: &tempfile::TempDir, text: &str) -> String {
    let file = path(folder, "profile.txt");
    std::fs::write(&file, text).expect("a file");
    file
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().expect("a list").iter().map(|x| x.as_f64().expect("a number")).collect()
}

#[test]
fn the_published_recurrence_answers_in_json() {
    let folder = folder();
    let file = saved(&folder, PROFILE);
    let args = ["plan", "--profile", &file, "--compat", "--workers", "2,2", "--bandwidth", "1e9,1e8", "--json"];
    let answer = json(&args);
    let mut keys: Vec<&String> = answer.as_object().expect("an object").keys().collect();
    keys.sort();
    let expected = [
        "config",
        "memory_bytes",
        "planning_s",
        "speedup_vs_data_parallel",
        "speedup_vs_single",
        "stages",
        "time_per_minibatch_s",
        "warmup",
    ];
    assert_eq!(keys, expected);
    let graph = CostGraph::from_published(PROFILE).and_then(|g| Ok(g.without_ends()?.graph)).expect("a profile");
    let level = |bandwidth| Level { count: 2, link: Link { latency: 0.0, bandwidth } };
    let topology = Topology::new(vec![level(1e9), level(1e8)]).expect("workers");
    let plan = |transfers| plan_compat(&graph, &topology, false, transfers).expect("a plan");
    assert_eq!(answer["time_per_minibatch_s"], plan(true).seconds);
    assert_eq!(answer["speedup_vs_single"], 0.098 / plan(true).seconds);
    let nodes: Vec<&str> = answer["stages"]
        .as_array()
        .expect("stages")
        .iter()
        .flat_map(|s| s["nodes"].as_array().expect("nodes"))
        .filter_map(Value::as_str)
        .collect();
    assert_eq!(nodes, ["in", "a", "b", "c", "d", "e"], "each once, in order");
    let workers: Vec<f64> =
        answer["stages"].as_array().expect("stages").iter().flat_map(|s| numbers(&s["workers"])).collect();
    let replicas: Vec<String> =
        answer["stages"].as_array().expect("stages").iter().map(|s| numbers(&s["workers"]).len().to_string()).collect();
    assert_eq!((answer["config"].as_str(), workers.len()), (Some(replicas.join("-").as_str()), 4));
    assert_eq!(numbers(&answer["memory_bytes"]).len(), 4);
    assert_eq!(numbers(&answer["warmup"]).len(), replicas.len());
    let free = json(&[&args[..], &["--no-transfers"]].concat());
    assert_eq!(free["time_per_minibatch_s"], plan(false).seconds);
    assert!(free["time_per_minibatch_s"].as_f64() < answer["time_per_minibatch_s"].as_f64(), "transfers count");
    let straight = json(&[&args[..], &["--straight"]].concat());
    assert_eq!(
        (straight["config"].as_str(), numbers(&straight["warmup"])),
        (Some("1-1-1-1"), vec![3.0, 2.0, 1.0, 0.0])
    );
    assert_eq!(straight["time_per_minibatch_s"], 0.06);
    // In words.
    let out = command(&args[..args.len() - 1]).output().expect("it runs");
    let said = text(&out);
    for word in [answer["config"].as_str().expect("a shape"), "data parallelism", "in to"] {
        assert!(out.status.success() && said.contains(word), "{word:?} is not in {said}");
    }
}

#[test]
fn the_planner_answers_in_json_and_tells_the_runners_up() {
    let folder = folder();
    let file = saved(&folder, PROFILE);
    let args = ["plan", "--profile", &file, "--workers", "4", "--bandwidth", "1e9"];
    let answer = json(&[&args[..], &["--json"]].concat());
    // The first three layers are nearly all of the time, the others nearly all of the parameters: on one worker these take 8 ms, in
    // which three do 90 ms of the others' in 30.
    assert_eq!(answer["config"], "3-1");
    assert_eq!(answer["time_per_minibatch_s"], 0.03);
    approx::assert_relative_eq!(
        answer["speedup_vs_single"].as_f64().expect("a number"),
        98.0 / 30.0,
        max_relative = 1e-12
    );
    // An all-reduce of 3/2 · 409.03 MB at 1 GB/s outlasts 65 ms of B; F is 33 ms.
    let all_reduce = 1.5 * 409.03e6 / 1e9;
    let data_parallel = (0.033 + all_reduce) / 4.0;
    let speedup = answer["speedup_vs_data_parallel"].as_f64().expect("a number");
    approx::assert_relative_eq!(speedup, data_parallel / 0.03, max_relative = 1e-12);
    assert_eq!(numbers(&answer["warmup"]), [1.0, 0.0]);
    // Two minibatches: 6 MB kept for B and 0.03 MB of weights; then gradients and momentum.
    let (first, second) = (2.0 * 6.03e6 + 2.0 * 0.03e6, 1.011e6 + 3.0 * 409e6);
    assert_eq!(numbers(&answer["memory_bytes"]), [first, first, first, second]);
    assert_eq!(answer["stages"][0]["nodes"], serde_json::json!(["in", "a", "b", "c"]));
    assert_eq!(answer["stages"][1]["workers"], serde_json::json!([3]));
    let out = command(&args).output().expect("it runs");
    let said = text(&out);
    for word in ["3-1: 30.000 ms", "not 4 (data parallelism)", "outlasts B", "not 1-1 (straight)", "stage 0 computes"] {
        assert!(out.status.success() && said.contains(word), "{word:?} is not in {said}");
    }
    let limited = |more: &[&str]| json(&[&args[..], more, &["--json"]].concat());
    // Data parallelism is slower than one worker.
    assert_eq!(limited(&["--stages", "1"])["config"], "1");
    assert_eq!(limited(&["--straight"])["config"], "1-1");
    // One worker that holds all of the parameters has no room beside three times 409 MB of them.
    assert_eq!(limited(&["--memory", "1229e6"])["config"], "3-1");
    fails(&[&args[..], &["--memory", "1e6"]].concat(), &["no plan fits into 1000000 bytes", "the least", "4 workers"]);
    fails(&[&args[..], &["--memory", "NaN"]].concat(), &["NaN bytes", "more than 0"]);
    fails(&[&args[..], &["--stages", "0"]].concat(), &["0 stages", "1 or more"]);
    fails(&[&args[..], &["--compat", "--stages", "2"]].concat(), &["--stages", "--compat"]);
}

#[test]
fn models_are_planned_too() {
    let folder = folder();
    let profile = path(&folder, "profile.json");
    let model = ["plan", "--model", "lenet", "--data", DATA, "--deterministic", "--micro-batch", "8"];
    for compat in [&[][..], &["--compat"]] {
        let workers = [&["--workers", "3", "--bandwidth", "1e9", "--json"][..], compat].concat();
        let measured = json(&[&model[..], &workers, &["--save-profile", &profile]].concat());
        let mut again = json(&[&model[..], &workers, &["--profile", &profile]].concat());
        again["planning_s"] = measured["planning_s"].clone();
        assert_eq!(measured, again);
        assert!(measured["stages"].as_array().is_some_and(|s| !s.is_empty()), "{measured}");
    }
}

#[test]
fn what_is_wrong_with_the_arguments_is_said() {
    let folder = folder();
    let file = saved(&folder, PROFILE);
    let cases: &[(&[&str], &[&str])] = &[
        (&["--compat", "--workers", "0", "--bandwidth", "1e9"], &["0 workers", "1 to 128"]),
        (&["--compat", "--workers", "4,4", "--bandwidth", "1e9"], &["bandwidth", "2 levels", "got 1"]),
        (&["--compat", "--workers", "4"], &["bandwidth", "1 levels", "got 0"]),
        (&["--compat", "--workers", "4", "--bandwidth", "NaN"], &["NaN bytes/s"]),
        (&["--compat", "--workers", "4", "--bandwidth", "1e9", "--latency=-1"], &["latency of -1 s"]),
        (&["--compat", "--workers", "4", "--bandwidth", "1e9", "--latency", "0,0"], &["latency", "got 2"]),
        (&["--compat", "--workers", "9999", "--bandwidth", "1e9"], &["9999 workers", "1 to 128"]),
        (&["--compat", "--workers", "99999999999999999999", "--bandwidth", "1e9"], &["--workers"]),
        (&["--compat", "--straight", "--workers", "9", "--bandwidth", "1e9"], &["9 workers", "5 stages at most"]),
        (&["--compat", "--workers", "4", "--bandwidth", "1e9", "--memory", "1e9"], &["--memory", "--compat"]),
        (&["--compat"], &["need --workers"]),
        (&["--workers", "4", "--bandwidth", "1e9", "--no-transfers"], &["--compat"]),
        (&[], &["needs --workers", "profile.txt"]),
    ];
    for (args, words) in cases {
        fails(&[&["plan", "--profile", &file], *args].concat(), words);
    }
    let workers = ["--compat", "--workers", "4", "--bandwidth", "1e9"];
    for (text, words) in [
        (PROFILE.replace("=20,", "=NaN,"), ["line 2", "NaN"]),
        (format!("{PROFILE}\te -- a\n"), ["depends on itself", "profile.txt"]),
        (PROFILE.lines().take(1).collect(), ["a layer expected", "inputs"]),
        (PROFILE.replace(char::is_numeric, "0"), ["0 s", "nothing to plan by"]),
        (String::new(), ["empty", "profile.txt"]),
    ] {
        fails(&[&["plan", "--profile", &saved(&folder, &text)][..], &workers].concat(), &words);
    }
    fails(
        &["plan", "--model", "mlp", "--data", DATA, "--deterministic", "--bandwidth", "1,2"],
        &["bandwidth", "one number"],
    );
}

/// The schedule and the number of micro-batches are chosen too, within limits of one's own.
#[test]
fn the_schedule_is_chosen_within_limits() {
    let folder = folder();
    let file = saved(&folder, PROFILE);
    let task = ["plan", "--profile", &file, "--workers", "2,2", "--bandwidth", "1e9,1e8", "--json", "--schedule"];
    let answer = |more: &[&str]| json(&[&task[..], more].concat());
    let seconds = |answer: &Value| answer["time_per_minibatch_s"].as_f64().expect("seconds");
    let free = answer(&["auto"]);
    let flushed = answer(&["auto", "--staleness", "0", "--stages", "3"]);
    assert!(numbers(&flushed["staleness"]).iter().all(|s| *s == 0.0), "{flushed}");
    assert!(seconds(&free) <= seconds(&flushed));
    let lean = answer(&["pipedream", "--versions", "1", "--straight"]);
    assert!(numbers(&lean["weight_versions"]).iter().all(|v| *v == 1.0), "{lean}");
    assert_eq!((lean["schedule"].as_str(), lean["micro_batches"].as_u64()), (Some("pipedream"), Some(1)));
    let cut = answer(&["1f1b", "--micro-batches", "3,6", "--cut", "b,d"]);
    let first = |s: usize| cut["stages"][s]["nodes"][0].as_str();
    assert_eq!(cut["stages"].as_array().map(Vec::len), Some(3), "{cut}");
    assert_eq!([first(0), first(1), first(2)], [Some("in"), Some("b"), Some("d")]);
    assert!([3, 6].contains(&cut["micro_batches"].as_u64().expect("a number")));
    let plan = ["plan", "--profile", &file, "--workers", "4", "--bandwidth", "1e9"];
    let out = command(&[&plan[..], &["--schedule", "auto"]].concat()).output().expect("the program runs");
    let text = text(&out);
    assert!(text.contains(" under ") && text.contains("staleness") && text.contains("\nnot "), "{text}");

    for (more, words) in [
        (&["--versions", "2"][..], &["--versions needs --schedule"][..]),
        (&["--micro-batches", "4"], &["--micro-batches", "--schedule"]),
        (&["--schedule", "1f1b", "--micro-batches", "0"], &["micro_batches", "got 0"]),
        (&["--schedule", "often"], &["often", "pipedream"]),
        (&["--schedule", "auto", "--cut", "f"], &["there is no node \"f\""]),
        (&["--schedule", "auto", "--cut", "d,b"], &["before \"b\"", "does not come after"]),
        (&["--schedule", "auto", "--versions", "0"], &["0 weight versions"]),
        (&["--schedule", "auto", "--memory", "1000"], &["no plan keeps to the limits", "of 1000 bytes"]),
        (&["--schedule", "auto", "--compat"], &["--compat"]),
    ] {
        fails(&[&plan[..], more].concat(), words);
    }
    fails(&["plan", "--schedule", "auto"], &["--schedule needs --workers"]);
}

/// Under a synchronous schedule whatever the planner chooses trains as one worker does.
#[test]
fn a_run_takes_the_plan_that_the_planner_chooses() {
    let task = ["train", "--model", "mlp", "--data", DATA, "--batch", "16", "--steps", "12", "--quiet", "--json"];
    let run = |more: &[&str]| json(&[&task[..], more].concat());
    for workers in ["1", "3"] {
        let answer = run(&["--plan", "auto", "--workers", workers]);
        let stages = answer["stages"].as_array().expect("stages");
        let mut on: Vec<u64> = stages.iter().flat_map(|s| numbers(&s["workers"])).map(|w| w as u64).collect();
        on.sort_unstable();
        assert_eq!(on, (0..workers.parse().expect("a number")).collect::<Vec<u64>>(), "{answer}");
    }
    let vertical = run(&["--plan", "auto", "--workers", "2", "--schedule", "pipedream-vertical"]);
    assert_eq!(vertical["stages"].as_array().map(Vec::len), Some(2), "it takes one worker a stage");
    let same = ["--schedule", "1f1b", "--deterministic"];
    let chosen = run(&[&same[..], &["--plan", "auto", "--workers", "3"]].concat());
    assert_eq!(chosen["weights_sha256"], run(&same)["weights_sha256"]);
}

#[test]
fn schedules_and_simulations_take_shapes() {
    let answer = json(&["schedule", "--kind", "pipedream", "--replicas", "2-1", "--micro-batches", "5", "--json"]);
    assert_eq!(numbers(&answer["staleness"]), [1.0, 0.0]);
    assert_eq!(answer["instructions"].as_array().map(Vec::len), Some(3));
    assert_eq!(
        answer["instructions"][1],
        serde_json::json!(["0F1", "0F3", "0B1", "0A1", "0U", "0B3", "0A3", "0U", "0A5", "0U"])
    );
    // Two workers for a stage that takes twice as long.
    let simulate = ["simulate", "--kind", "pipedream", "--replicas", "2-1", "--micro-batches", "1000", "--json"];
    let answer = json(&[&simulate[..], &["--forward", "2,1", "--backward", "4,2"]].concat());
    let makespan = answer["makespan"].as_f64().expect("a time");
    assert!((3000.0..3020.0).contains(&makespan), "{answer}");
    fails(&["schedule", "--kind", "pipedream", "--replicas", "2-0"], &["stage 1 has no worker"]);
    fails(&["schedule", "--kind", "pipedream", "--replicas", "two"], &["a shape such as 2-1-1 expected, got \"two\""]);
}
