//! The `schedule` and `simulate` commands from outside.
use serde_json::Value;
use std::process::{Command, Output, Stdio};

fn pipewright(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pipewright")).args(args).output().expect("the program runs")
}

/// What a command that succeeds prints.
fn printed(args: &[&str]) -> String {
    let out = pipewright(args);
    assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).expect("text")
}

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&printed(args)).expect("one JSON object")
}

/// What a command that fails says.
fn refused(args: &[&str]) -> String {
    let out = pipewright(args);
    assert!(!out.status.success(), "{args:?} succeeded: {}", String::from_utf8_lossy(&out.stdout));
    String::from_utf8(out.stderr).expect("text")
}

#[test]
fn golden_numbers_are_printed() {
    for (kind, peaks) in [("gpipe", [8, 8, 8, 8]), ("1f1b", [4, 3, 2, 1])] {
        for lowered in [&[][..], &["--lowered"]] {
            let args = ["schedule", "--kind", kind, "--workers", "4", "--micro-batches", "8", "--json"];
            let found = json(&[&args, lowered].concat());
            assert_eq!(found["makespan"], 33.0, "{kind}");
            assert_eq!(format!("{:.4}", found["bubble_fraction"].as_f64().unwrap()), "0.2727", "{kind}");
            assert_eq!(found["peak_activations"], serde_json::json!(peaks), "{kind}");
            assert_eq!(found["weight_versions"], serde_json::json!([1, 1, 1, 1]), "{kind}");
            assert_eq!(found["instructions"][3][0], if lowered.is_empty() { "3F0" } else { "P2>0" }, "{kind}");
        }
    }
    let found = json(&["schedule", "--kind", "pipedream", "--json"]);
    assert_eq!(found["weight_versions"], serde_json::json!([4, 3, 2, 1]));
    assert_eq!(found["staleness"], serde_json::json!([3, 2, 1, 0]));
}

#[test]
fn what_is_printed_can_be_edited_and_proven_again() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("programs.txt");
    let check = |text: &str, more: &[&str]| {
        std::fs::write(&file, text).unwrap();
        pipewright(&[&["schedule", "--check", file.to_str().unwrap()], more].concat())
    };
    for kind in ["sequential", "gpipe", "1f1b", "pipedream", "pipedream-vertical", "pipedream-nostash"] {
        for lowered in [&[][..], &["--lowered"]] {
            let args = ["schedule", "--kind", kind, "--workers", "3", "--micro-batches", "5"];
            let text = printed(&[&args, lowered].concat());
            let proven = check(&text, &[]);
            let facts = String::from_utf8(proven.stdout).unwrap();
            assert!(proven.status.success() && text.contains(facts.lines().next().unwrap()), "{kind}: {facts}");
            // The same facts stand at the end of what was printed, as comments.
            assert!(facts.lines().all(|line| text.contains(&format!("\n# {line}\n"))), "{kind}: {facts}");
        }
    }
    let text = printed(&["schedule", "--kind", "1f1b", "--workers", "3", "--micro-batches", "5"]);
    let one_at_a_time = (1..5).fold(text.clone(), |text, k| {
        let (forward, backward) = (format!("1F{k}"), format!("1B{}", k - 1));
        text.replace(&format!("{forward} {backward}"), &format!("{backward} {forward}"))
    });
    let out = check(&one_at_a_time, &["--json"]);
    let found: Value = serde_json::from_slice(&out.stdout).expect("JSON");
    assert_eq!(found["peak_activations"], serde_json::json!([3, 1, 1]), "an edit that is safe");
    for (from, to, expected) in [
        ("1B2", "1B3", "broken: worker 1, instruction "),
        ("1B2", "2B2", "stage 2 is not on this worker"),
        ("2U", "", "rule step broken: worker 2"),
        ("micro-batches 5", "micro-batches five", "line 7, column 15: a number expected, got \"five\""),
        ("2U", "2U P0>0", "rule "),
    ] {
        let out = check(&text.replace(from, to), &[]);
        let error = String::from_utf8(out.stderr).unwrap();
        assert!(!out.status.success() && error.contains(expected), "{to:?}: {expected:?} is not in {error:?}");
    }
}

#[test]
fn long_programs_stay_short_as_text() {
    let text = printed(&["schedule", "--kind", "pipedream", "--micro-batches", "1000000000000", "--lowered"]);
    assert!(text.contains("repeat 999999999") && text.len() < 3000, "{text}");
    let error = refused(&["schedule", "--kind", "pipedream", "--micro-batches", "1000000000000", "--json"]);
    assert!(error.contains("too many"), "{error}");
}

/// As with `pipewright schedule … | head`: more text than a pipe holds, and nobody reads it.
#[test]
fn readers_may_leave_early() {
    let args = ["schedule", "--kind", "1f1b", "--workers", "8", "--micro-batches", "2000"];
    let mut command = Command::new(env!("CARGO_BIN_EXE_pipewright"));
    let mut child = command.args(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program runs");
    drop(child.stdout.take());
    let out = child.wait_with_output().expect("the program ends");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
}

#[test]
fn a_simulation_is_drawn() {
    let drawn = printed(&["simulate", "--kind", "1f1b", "--workers", "2", "--micro-batches", "3", "--update", "1"]);
    let expected = "\
makespan 13 s, bubble 23.1 %, 4.333 s a micro-batch
worker 0: busy 10 s, bubble 23.1 %, communication 0 s, at most 2 micro-batches in flight
worker 1: busy 10 s, bubble 23.1 %, communication 0 s, at most 1 micro-batches in flight

  0 01..aa2bb.cc|
  1 .0aa1bb2cc|..
";
    assert!(drawn.starts_with(expected), "{drawn}");
    let shared = printed(&["simulate", "--kind", "gpipe", "--workers", "2", "--micro-batches", "2", "--cores", "1"]);
    assert!(shared.contains("makespan 12 s") && shared.contains("\n  1 .001aabbbb..\n"), "{shared}");
    let cut = printed(&["simulate", "--kind", "gpipe", "--columns", "5", "--cell", "2"]);
    assert!(cut.contains("\n  0 0246.…\n"), "{cut}");
}

#[test]
fn the_simulator_prints_the_golden_numbers() {
    for kind in ["gpipe", "1f1b"] {
        let found = json(&["simulate", "--kind", kind, "--json"]);
        assert_eq!(found["makespan"], 33.0, "{kind}");
        assert_eq!(format!("{:.4}", found["bubble_fraction"].as_f64().unwrap()), "0.2727", "{kind}");
        assert_eq!(found["workers"][2]["busy"], 24.0, "{kind}");
    }
    // The slowest stage sets the pace; a slow link too.
    let uneven = ["simulate", "--kind", "pipedream", "--micro-batches", "200", "--forward", "1,1,2,1", "--json"];
    let pace = |found: &Value| found["seconds_per_micro_batch"].as_f64().unwrap();
    assert_eq!(pace(&json(&[&uneven[..], &["--backward", "2,2,4,2"]].concat())), 6.0);
    assert_eq!(pace(&json(&[&uneven[..], &["--update", "0,3,0,0"]].concat())), 6.0);
    let slow_link = ["--bytes", "0,80,0", "--bandwidth", "10", "--latency", "1"];
    assert!(pace(&json(&[&uneven[..], &slow_link].concat())) >= 8.0);
}

#[test]
fn a_plan_is_simulated_with_its_profile() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let model = ["--model", "mlp", "--width", "64", "--data", "synthetic", "--micro-batch", "32"];
    let save = ["--deterministic", "--stages", "2", "--save-profile", &path("profile.json")];
    let plan = printed(&[&["plan"][..], &model, &save].concat());
    std::fs::write(path("plan.toml"), plan).unwrap();
    let simulate = |plan: &str, profile: &[&str]| {
        let args = ["simulate", "--kind", "pipedream", "--micro-batches", "100", "--json", "--plan", plan];
        json(&[&args[..], &model, profile].concat())
    };
    let by_files = simulate(&path("plan.toml"), &["--profile", &path("profile.json")]);
    assert_eq!(by_files, simulate("1-1", &["--deterministic"]));
    let (speed, pace) = (&by_files["samples_per_s"], &by_files["seconds_per_micro_batch"]);
    approx::assert_relative_eq!(speed.as_f64().unwrap() * pace.as_f64().unwrap(), 32.0, max_relative = 1e-9);
}

#[test]
fn the_planner_and_a_run_agree() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run").to_str().unwrap().to_owned();
    // The wide layers' updates weigh more than their passes.
    let model = ["--model", "lenet", "--width", "256", "--data", "synthetic", "--deterministic"];
    let mut seen = Vec::new();
    for m in [1, 4] {
        let (samples, m) = ((2 * m).to_string(), m.to_string());
        let plan = ["plan", "--stages", "2", "--micro-batch", "2", "--micro-batches", &m];
        let plan = printed(&[&plan[..], &model].concat());
        let train = ["train", "--steps", "1", "--workers", "2", "--schedule", "1f1b", "--quiet", "--out", &run];
        printed(&[&train[..], &model, &["--batch", &samples, "--micro-batches", &m]].concat());
        let theirs = std::fs::read_to_string(format!("{run}/plan.toml")).unwrap();
        let (mine, _) = plan.split_once("\n# in steady state").expect("a last line");
        assert_eq!(mine, theirs, "{m} micro-batches");
        seen.push(theirs);
        std::fs::remove_dir_all(&run).unwrap();
    }
    assert_ne!(seen[0], seen[1], "updates count for nothing");
}

#[test]
fn what_cannot_be_is_refused() {
    for (args, expected) in [
        (&["simulate", "--kind", "gpipe", "--forward", "1,2"][..], "forward: one number or 4 expected, got 2"),
        (&["simulate", "--kind", "gpipe", "--backward=-1"], "backward: 0 to 1e9 expected, got -1e0"),
        (&["simulate", "--kind", "gpipe", "--update", "nan"], "update: 0 to 1e9 expected, got NaN"),
        (&["simulate", "--kind", "gpipe", "--cell", "0"], "cell: 1e-9 to 1e9 s expected, got 0e0"),
        (&["simulate", "--kind", "gpipe", "--cell", "1e-300"], "cell: 1e-9 to 1e9 s expected, got 1e-300"),
        (&["simulate", "--kind", "gpipe", "--backward", "1,1,1,1e300"], "backward: 0 to 1e9 expected, got 1e300"),
        (&["simulate", "--kind", "gpipe", "--bytes", "inf"], "bytes: 0 to 1e18 expected, got inf"),
        (
            &["simulate", "--kind", "pipedream", "--workers", "1000000"],
            "8 micro-batches on 1000000 workers: a schedule",
        ),
        (
            &["simulate", "--kind", "1f1b", "--micro-batches", "1000000"],
            "1000000 micro-batches on 4 workers: a schedule",
        ),
        (&["simulate", "--kind", "gpipe", "--cores", "0"], "0 cores; more than 0 expected"),
        (&["simulate", "--kind", "gpipe", "--bandwidth", "0"], "a link of 0 bytes/s"),
        (&["simulate", "--kind", "gpipe", "--plan", "1-1", "--forward", "1"], "cannot be used with"),
        (&["simulate", "--kind", "gpipe", "--workers", "0"], "at least one worker"),
        (&["schedule"], "--kind"),
        (&["schedule", "--kind", "zigzag"], "no schedule is called \"zigzag\""),
        (&["schedule", "--kind", "gpipe", "--workers", "0"], "at least one worker"),
        (&["schedule", "--kind", "gpipe", "--micro-batches", "0"], "at least one micro-batch"),
        (&["schedule", "--kind", "gpipe", "--check", "a"], "cannot be used with"),
        (
            &["schedule", "--kind", "gpipe", "--workers", "3000", "--micro-batches", "3000"],
            "at most 4194304 instructions",
        ),
        (&["schedule", "--check", "/no/such/file"], "/no/such/file"),
        (&["schedule", "--check", env!("CARGO_BIN_EXE_pipewright")], "a text file expected"),
        (&["plan", "--deterministic", "--profile", env!("CARGO_BIN_EXE_pipewright")], "a text file expected"),
        (&["plan", "--deterministic", "--micro-batches", "0"], "micro_batches: 1 or more"),
    ] {
        let error = refused(args);
        assert!(error.contains(expected), "{args:?}: {expected:?} is not in {error:?}");
    }
}
