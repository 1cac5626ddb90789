//! The program as people run it: what it writes, how it stops, and what it says when something is wrong.
#[cfg(feature = "mpi")]
mod launcher;
mod signal;
#[cfg(feature = "mpi")]
use std::process::Child;

use pipewright::tensor::{Isa, Philox};
use serde_json::Value;
use std::{
    path::Path,
    process::{Command, Output, Stdio},
    time::{Duration, Instant},
};

const PROGRAM: &str = env!("CARGO_BIN_EXE_pipewright");
/// Small images of few classes: quick.
const DATA: &str = "synthetic:8x8x1:4:96";

fn command(args: &[&str]) -> Command {
    let mut c = Command::new(PROGRAM);
    c.args(args).stdin(Stdio::null());
    // An inherited launcher would make a rank of it.
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("OMPI_") || name.starts_with("PMI")) {
        c.env_remove(name);
    }
    c
}

fn text(out: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr))
}

/// The JSON object that a command prints last.
fn json(args: &[&str]) -> Value {
    let out = command(args).output().expect("the program runs");
    assert!(out.status.success(), "{args:?}: {}", text(&out));
    let stdout = String::from_utf8_lossy(&out.stdout);
    let last = stdout.lines().last().unwrap_or_default();
    serde_json::from_str(last).unwrap_or_else(|e| panic!("{args:?}: {e}: {last}"))
}

/// A command that must fail, with an error on standard error that holds `words`, and without a panic.
fn fails(args: &[&str], words: &[&str]) {
    let out = command(args).output().expect("the program runs");
    let said = String::from_utf8_lossy(&out.stderr).to_string();
    assert!(!out.status.success(), "{args:?} succeeded: {}", text(&out));
    assert!(!said.contains("panicked"), "{args:?}: {said}");
    for word in words {
        assert!(said.contains(word), "{args:?}: {word:?} expected in {said:?}");
    }
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

fn path(folder: &tempfile::TempDir, name: &str) -> String {
    folder.path().join(name).to_str().expect("a readable name").to_string()
}

/// Waits for `what`, a minute at most.
fn wait_until(what: &str, mut is: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is() {
        assert!(start.elapsed() < Duration::from_secs(60), "{what}: not after a minute");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits for the end of a process that prints little.
#[cfg(feature = "mpi")]
fn end(mut child: Child) -> Output {
    let start = Instant::now();
    while child.try_wait().is_ok_and(|s| s.is_none()) {
        if start.elapsed() > Duration::from_secs(120) {
            let _ = child.kill();
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().expect("it has ended")
}

fn lines(file: &Path) -> usize {
    std::fs::read_to_string(file).map_or(0, |t| t.lines().count())
}

/// The process of a rank, by its log.
#[cfg(feature = "mpi")]
fn pid_of(run: &Path, rank: usize) -> u32 {
    let log = std::fs::read_to_string(run.join(format!("logs/rank-{rank}.log"))).expect("a log");
    let (_, after) = log.split_once("pid=").expect("the log names the process");
    let digits: String = after.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().expect("a number")
}

/// Minibatches of a run that takes a few seconds.
const LONG: u64 = 5000;

/// A run of [`LONG`] minibatches under a synchronous schedule; `mpirun` may start it.
fn long_run<'a>(out: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    // Epochs long enough that evaluations take little of the time.
    let data = "synthetic:8x8x1:4:4000:64";
    let args = ["train", "--model", "mlp", "--width", "12", "--data", data, "--schedule", "1f1b", "--batch", "8"];
    let rest = [
        "--micro-batches",
        "4",
        "--steps",
        "5000",
        "--deterministic",
        "--checkpoints",
        "never",
        "--quiet",
        "--json",
        "--out",
        out,
    ];
    [&args[..], &rest, more].concat()
}

#[test]
fn sigterm_writes_a_checkpoint_and_the_run_goes_on_from_it() {
    let folder = folder();
    let (whole, cut) = (path(&folder, "whole"), path(&folder, "cut"));
    let expected = json(&long_run(&whole, &[]));
    assert_eq!(expected["steps"], LONG);
    let mut child = command(&long_run(&cut, &["--workers", "3"])).stdout(Stdio::piped()).spawn().expect("it runs");
    let steps = folder.path().join("cut/steps.jsonl");
    wait_until("some minibatches", || lines(&steps) > 30);
    signal::send(child.id(), "-TERM");
    assert!(child.wait().expect("it ends").success(), "told to stop, it ends well");
    let report = std::fs::read_to_string(folder.path().join("cut/report.json")).expect("a report");
    let report: Value = serde_json::from_str(&report).expect("a report");
    assert_eq!(report["interrupted"], true);
    let stopped = report["steps"].as_u64().expect("a number");
    assert!(stopped < LONG, "it was to be stopped before its end");
    assert!(folder.path().join(format!("cut/checkpoints/step-{stopped:06}/COMMIT")).exists());
    let resumed = json(&long_run(&cut, &["--workers", "2", "--resume"]));
    for same in ["weights_sha256", "train_loss", "steps", "test_accuracy"] {
        assert_eq!(resumed[same], expected[same], "{same}, stopped after {stopped}");
    }
    assert_eq!(lines(&steps) as u64, LONG);
    // The newest checkpoint, which is that of the interruption, evaluated on other numbers of workers.
    let found = json(&["eval", &cut, "--workers", "4", "--json"]);
    assert_eq!(found["minibatches"], stopped);
    assert_eq!(found, json(&["eval", &cut, "--json"]));
}

#[cfg(feature = "mpi")]
fn mpirun(args: &[&str]) -> Child {
    let mut c = Command::new("mpirun");
    launcher::configure(&mut c).args(["--bind-to", "none"]).args(args);
    c.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it runs")
}

#[cfg(feature = "mpi")]
#[test]
fn ranks_that_were_not_started_alike_are_refused() {
    if !launcher::is_there() {
        return;
    }
    let folder = folder();
    // The same program with a byte more: another build, for all that one can tell.
    let other = path(&folder, "pipewright");
    let mut bytes = std::fs::read(PROGRAM).expect("the program");
    bytes.push(0);
    std::fs::copy(PROGRAM, &other).expect("a copy that may be run");
    std::fs::write(&other, bytes).expect("a copy");
    let args = ["train", "--model", "mlp", "--data", DATA, "--quiet", "--steps", "2"];
    for (program, more, words) in [
        (other.as_str(), &["--seed", "1"][..], "rank 1 and rank 0 do not agree on the program"),
        (PROGRAM, &["--seed", "2"], "rank 1 and rank 0 do not agree on the settings"),
        (PROGRAM, &["--steps", "3"], "rank 1 and rank 0 do not agree on the settings"),
        (PROGRAM, &["--model", "lenet"], "rank 1 and rank 0 do not agree on the model"),
        (PROGRAM, &["--lr", "0.5"], "rank 1 and rank 0 do not agree on the optimizer"),
    ] {
        let first = ["-n", "1", PROGRAM];
        // The last of a flag given twice would be an error: rank 1 gets its own list.
        let theirs: Vec<&str> = match args.iter().position(|a| *a == more[0]) {
            Some(at) => [&args[..at], more, &args[at + 2..]].concat(),
            None => [&args[..], more].concat(),
        };
        let ours = if program == other { theirs.clone() } else { args.to_vec() };
        let ended = end(mpirun(&[&first[..], &ours, &[":", "-n", "1", program], &theirs].concat()));
        let said = text(&ended);
        assert!(!ended.status.success(), "{more:?}: {said}");
        assert!(said.contains(words), "{more:?}: {words:?} expected in {said}");
    }
}

#[cfg(feature = "mpi")]
#[test]
fn sigterm_stops_ranks_at_one_minibatch_and_fewer_ranks_go_on() {
    if !launcher::is_there() {
        return;
    }
    let folder = folder();
    let expected = json(&long_run(&path(&folder, "whole"), &[]));
    let ranks = |n: &str, args: &[&str]| mpirun(&[&["-n", n, PROGRAM], args].concat());
    for (name, rank) in [("-TERM", None), ("-USR1", None), ("-INT", Some(2)), ("-TERM", Some(0))] {
        let cut = path(&folder, &format!("{name} {rank:?}"));
        let mut child = ranks("4", &long_run(&cut, &[]));
        let run = std::path::PathBuf::from(&cut);
        wait_until("some minibatches", || {
            lines(&run.join("steps.jsonl")) > 20 || child.try_wait().is_ok_and(|s| s.is_some())
        });
        match rank {
            // `mpirun` passes it on to the ranks.
            None => signal::send(child.id(), name),
            // Whichever is told, all of them end.
            Some(rank) => signal::send(pid_of(&run, rank), name),
        }
        let ended = end(child);
        let report = std::fs::read_to_string(run.join("report.json"));
        let report = report.unwrap_or_else(|e| panic!("{name}: no report: {e}: {}", text(&ended)));
        let report: Value = serde_json::from_str(&report).expect("a report");
        assert_eq!(report["interrupted"], true);
        let stopped = report["steps"].as_u64().expect("a number");
        assert!(stopped < LONG, "it was to be stopped before its end");
        assert!(ended.status.success() || (name, rank) == ("-TERM", None), "{name}: {}", text(&ended));
        let resumed = end(ranks("2", &long_run(&cut, &["--resume"])));
        assert!(resumed.status.success(), "{}", text(&resumed));
        let stdout = String::from_utf8_lossy(&resumed.stdout);
        let resumed: Value = serde_json::from_str(stdout.lines().last().unwrap_or_default()).expect("a report");
        for same in ["weights_sha256", "train_loss", "steps", "test_accuracy"] {
            assert_eq!(resumed[same], expected[same], "{name}: {same}, stopped after {stopped}");
        }
    }
}

#[test]
fn a_run_leaves_its_settings_plan_profile_metrics_logs_and_report() {
    let folder = folder();
    let out = path(&folder, "run");
    let args = ["train", "--model", "lenet", "--data", DATA, "--batch", "16", "--epochs", "2", "--workers", "2"];
    let report = json(&[&args[..], &["--plan", "1-1", "--keep-best", "--quiet", "--json", "--out", &out]].concat());
    let number = |name: &str| report[name].as_f64().unwrap_or_else(|| panic!("{name}: {report}"));
    for fraction in ["test_accuracy", "efficiency", "bubble_fraction", "communication_fraction"] {
        assert!((0.0..=1.0).contains(&number(fraction)), "{fraction}: {report}");
    }
    for positive in ["samples_per_s", "predicted_samples_per_s"] {
        assert!(number(positive) > 0.0, "{positive}: {report}");
    }
    for (name, len) in
        [("train_loss", 2), ("seconds_per_epoch", 2), ("stages", 2), ("pool_peak_bytes", 2), ("rss_bytes", 2)]
    {
        assert_eq!(report[name].as_array().map(Vec::len), Some(len), "{name}: {report}");
    }
    assert_eq!(report["stages"][0]["staleness"], 1);
    assert_eq!(report["weights_sha256"].as_str().map(str::len), Some(64));
    let run = folder.path().join("run");
    for file in ["config.toml", "plan.toml", "profile.json", "report.json", "logs/rank-0.log", "logs/rank-1.log"] {
        assert!(lines(&run.join(file)) > 0, "{file}");
    }
    assert_eq!(lines(&run.join("steps.jsonl")), 12);
    assert!(run.join("best").is_dir());
    // The plan may be used again, and the profile.
    let plan = path(&folder, "run/plan.toml");
    let (again, profile) = (path(&folder, "again"), path(&folder, "run/profile.json"));
    json(&[&args[..], &["--plan", &plan, "--quiet", "--json", "--out", &again]].concat());
    let args = ["plan", "--model", "lenet", "--data", DATA, "--micro-batch", "16", "--stages", "2", "--json"];
    let planned = json(&[&args[..], &["--profile", &profile]].concat());
    assert_eq!(planned["stages"].as_array().map(Vec::len), Some(2));
}

#[test]
fn settings_may_come_from_a_file_and_flags_win() {
    let folder = folder();
    let file = path(&folder, "run.toml");
    std::fs::write(
        &file,
        format!("model = \"mlp\"\ndata = \"{DATA}\"\nsteps = 3\nbatch = 8\nquiet = true\njson = true\n"),
    )
    .expect("a file");
    assert_eq!(json(&["train", "--config", &file])["steps"], 3);
    assert_eq!(json(&["train", "--config", &file, "--steps", "2"])["steps"], 2);
}

#[test]
fn a_file_may_ask_to_resume_and_write_its_keys_with_dashes() {
    let folder = folder();
    let (file, out) = (path(&folder, "run.toml"), path(&folder, "run"));
    let settings = format!("model = 'mlp'\ndata = '{DATA}'\nmicro-batches = 2\nkeep-best = true\nout = '{out}'\n");
    std::fs::write(&file, &settings).expect("a file");
    let run = |steps: &str| json(&["train", "--config", &file, "--steps", steps, "--quiet", "--json"])["steps"].clone();
    assert_eq!(run("2"), 2);
    std::fs::write(&file, settings + "resume = true\n").expect("a file");
    assert_eq!(run("3"), 3);
}

#[test]
fn progress_that_nobody_hears_ends_no_run() {
    let folder = folder();
    for (i, full) in [true, false].into_iter().enumerate() {
        let out = path(&folder, &i.to_string());
        let mut run = command(&["train", "--model", "mlp", "--data", DATA, "--batch", "16", "--out", &out]);
        run.stdout(Stdio::null());
        let device = std::fs::File::options().write(true).open("/dev/full");
        let mut run = match device.ok().filter(|_| full) {
            Some(device) => run.stderr(device).spawn().expect("it runs"),
            None => run.stderr(Stdio::piped()).spawn().expect("it runs"),
        };
        // A pipe whose reader left.
        drop(run.stderr.take());
        assert!(run.wait().expect("it ends").success(), "{out}");
        assert!(Path::new(&out).join("checkpoints/step-000006/COMMIT").exists(), "{out}");
    }
    // An error that cannot be told is still one, and no panic.
    let mut wrong =
        command(&["train", "--model", "vgg17", "--data", DATA]).stderr(Stdio::piped()).spawn().expect("it runs");
    drop(wrong.stderr.take());
    assert_eq!(wrong.wait().expect("it ends").code(), Some(1));
}

#[test]
fn a_model_that_refuses_small_micro_batches_runs_with_large_ones() {
    // The last images are of one pixel, of which BatchNorm makes nothing when it is alone.
    let args = ["--model", "resnet18", "--width", "4", "--data", "synthetic:8x8x3:10:240:12"];
    let run = ["--schedule", "1f1b", "--steps", "2", "--batch", "16", "--micro-batches", "4", "--quiet", "--json"];
    let run = [&["train"], &args[..], &run].concat();
    assert_eq!(json(&run)["steps"], 2);
    assert_eq!(json(&[&run[..], &["--deterministic", "--workers", "2"]].concat())["steps"], 2);
    assert!(
        json(&[&["plan"], &args[..], &["--micro-batch", "4", "--stages", "2", "--json"]].concat())["stages"].is_array()
    );
    let one = ["--micro-batch", "1", "--stages", "2", "--deterministic"];
    fails(&[&["plan"], &args[..], &one].concat(), &["batch_norm"]);
}

#[test]
fn a_run_goes_on_with_the_instructions_that_it_began_with() {
    let folder = folder();
    let run = |out: &str, isa: Option<&str>, more: &[&str]| {
        let args =
            ["train", "--model", "lenet", "--data", DATA, "--batch", "16", "--deterministic", "--quiet", "--json"];
        let mut run = command(&[&args[..], &["--out", out], more].concat());
        run.env_remove("PIPEWRIGHT_ISA").envs(isa.map(|isa| ("PIPEWRIGHT_ISA", isa)));
        run.output().expect("it runs")
    };
    let report = |out: Output| -> Value {
        let stdout = String::from_utf8_lossy(&out.stdout).to_string();
        serde_json::from_str(stdout.lines().last().unwrap_or_default())
            .unwrap_or_else(|e| panic!("{e}: {}", text(&out)))
    };
    let (whole, cut) = (path(&folder, "whole"), path(&folder, "cut"));
    let expected = report(run(&whole, Some("portable"), &["--steps", "6"]));
    report(run(&cut, Some("portable"), &["--steps", "3"]));
    let others = Isa::available().into_iter().filter(|isa| *isa != Isa::Portable);
    for other in others {
        let refused = run(&cut, Some(other.name()), &["--steps", "6", "--resume"]);
        let said = text(&refused);
        assert!(!refused.status.success(), "{said}");
        for word in ["computed with portable", other.name(), "PIPEWRIGHT_ISA"] {
            assert!(said.contains(word), "{word:?} expected in {said}");
        }
    }
    let resumed = report(run(&cut, None, &["--steps", "6", "--resume"]));
    assert_eq!(resumed["weights_sha256"], expected["weights_sha256"]);
    // An evaluation trains nothing, and may be done wherever there is another set.
    for isa in Isa::available() {
        let found = command(&["eval", &cut, "--json"]).env("PIPEWRIGHT_ISA", isa.name()).output().expect("it runs");
        assert!(found.status.success(), "{isa}: {}", text(&found));
    }
}

#[cfg(feature = "mpi")]
#[test]
fn ranks_compute_with_the_lowest_instructions_of_them_all() {
    if !launcher::is_there() {
        return;
    }
    let folder = folder();
    let args = ["--model", "lenet", "--data", DATA, "--schedule", "1f1b", "--batch", "16", "--steps", "3"];
    let args = [&["train"], &args[..], &["--deterministic", "--quiet", "--json"]].concat();
    let alone = command(&args).env("PIPEWRIGHT_ISA", "portable").output().expect("it runs");
    let out = path(&folder, "run");
    let rank = [&["-n", "1", "env", "-u", "PIPEWRIGHT_ISA", PROGRAM], &args[..], &["--out", &out]].concat();
    let low = [&["-n", "1", "env", "PIPEWRIGHT_ISA=portable", PROGRAM], &args[..], &["--out", &out]].concat();
    let ranks = end(mpirun(&[&rank[..], &[":"], &low].concat()));
    let sha = |out: &Output| -> Value {
        let stdout = String::from_utf8_lossy(&out.stdout).to_string();
        let report: Value = serde_json::from_str(stdout.lines().last().unwrap_or_default()).unwrap_or_default();
        report["weights_sha256"].clone()
    };
    assert!(sha(&alone).is_string(), "{}", text(&alone));
    assert_eq!(sha(&ranks), sha(&alone), "{}", text(&ranks));
}

#[test]
fn what_fails_in_an_evaluation_is_said_to_be_in_one() {
    // The step is so long that what the test set makes of the weights is too large.
    let args = ["train", "--model", "mlp", "--data", DATA, "--steps", "1", "--batch", "96", "--lr", "1e38", "--quiet"];
    for workers in ["1", "2"] {
        let args = [&args[..], &["--deterministic", "--workers", workers]].concat();
        fails(&args, &["not finite", "minibatch 0 of the evaluation, forward", "in evaluation after minibatch 0"]);
        assert!(!text(&command(&args).output().expect("it runs")).contains("step 0"));
    }
}

#[test]
fn what_this_machine_cannot_hold_is_refused_with_numbers() {
    let train = |more: &[&str], words: &[&str]| fails(&[&["train", "--quiet", "--steps", "1"], more].concat(), words);
    for more in [&[][..], &["--deterministic"], &["--optimizer", "adam", "--workers", "2"]] {
        let wide = ["--model", "mlp", "--width", "1000000", "--data", DATA];
        train(&[&wide[..], more].concat(), &["parameters with the optimizer's state", "GB, this machine has"]);
    }
    for size in ["18446744073709551615", "10000000000000"] {
        train(&["--model", "mlp", "--data", &format!("synthetic:28x28x1:10:{size}:1")], &["at most 4294967296", size]);
        train(&["--model", "mlp", "--data", &format!("synthetic:28x28x1:10:64:{size}")], &["at most 4294967296", size]);
        train(&["--model", "mlp", "--width", size, "--data", DATA], &["error: "]);
        fails(&["profile", "--model", "mlp", "--width", size, "--data", DATA], &["error: "]);
    }
    // Too large for the count of its operations too.
    train(&["--model", "resnet18", "--width", "100000000", "--data", "synthetic:8x8x3:4:96"], &["too large"]);
    let profile = ["profile", "--model", "mlp", "--data", "synthetic:1000x1000x1:4:96", "--micro-batch", "1000000"];
    fails(&[&profile[..], &["--width", "4"]].concat(), &["a tensor f32[1000000, 1000, 1000, 1] takes 4000.0 GB"]);
    let workers = ["1048577", "18446744073709551615"];
    workers.iter().for_each(|n| fails(&["simulate", "--kind", "gpipe", "--workers", n], &["workers: at most 1048576"]));
    let simulate = |columns: &str| {
        fails(&["simulate", "--kind", "gpipe", "--cell", "1e-9", "--columns", columns], &["columns: 1 to 100000"])
    };
    ["0", "100001", "99999999999", "18446744073709551615"].iter().for_each(|columns| simulate(columns));
}

#[test]
fn a_folder_of_data_that_is_none_is_refused_by_name() {
    let folder = folder();
    let file = path(&folder, "file");
    std::fs::write(&file, "no folder").expect("a file");
    for (named, words) in [(path(&folder, "nowhere"), "nowhere does not exist"), (file, "file is none")] {
        for data in ["fashion-mnist", "cifar10", "cifar100"] {
            let model = if data == "fashion-mnist" { "mlp" } else { "vgg16" };
            let out = command(&["train", "--model", model, "--data", data]).env("PIPEWRIGHT_DATA", &named).output();
            let out = out.expect("it runs");
            let said = text(&out);
            assert!(!out.status.success() && said.contains("PIPEWRIGHT_DATA") && said.contains(words), "{said}");
        }
    }
}

#[test]
fn a_minibatch_is_no_larger_than_the_data_set() {
    let huge = ["--model", "mlp", "--data", DATA, "--batch", "99999999999999", "--steps", "3", "--quiet", "--json"];
    assert_eq!(json(&[&["train"], &huge[..]].concat())["steps"], 3);
    assert!(json(&[&["bench", "step"], &huge[..]].concat())["samples_per_s"].is_number());
}

#[test]
fn the_synchronous_schedules_agree_on_every_number_of_workers() {
    let run = |schedule: &str, workers: &str| {
        let args =
            ["train", "--model", "lenet", "--data", DATA, "--batch", "24", "--micro-batches", "5", "--deterministic"];
        let report = json(&[&args[..], &["--schedule", schedule, "--workers", workers, "--quiet", "--json"]].concat());
        (report["train_loss"].clone(), report["weights_sha256"].clone())
    };
    let expected = run("sequential", "1");
    for (schedule, workers) in [("gpipe", "2"), ("1f1b", "3"), ("sequential", "4")] {
        assert_eq!(run(schedule, workers), expected, "{schedule} on {workers} workers");
    }
}

#[test]
fn a_step_can_be_timed_and_a_model_profiled() {
    let args = ["bench", "step", "--model", "lenet", "--data", DATA, "--batch", "16", "--steps", "4", "--warm", "2"];
    let found = json(&[&args[..], &["--workers", "2", "--quiet", "--json"]].concat());
    for positive in ["seconds_per_step", "samples_per_s", "gflops_per_core", "efficiency"] {
        assert!(found[positive].as_f64().is_some_and(|v| v > 0.0), "{positive}: {found}");
    }
    let found = json(&["profile", "--model", "lenet", "--data", DATA, "--micro-batch", "4,8", "--json"]);
    let sizes: Vec<_> = found["samples"].as_array().expect("sizes").iter().map(|s| s["micro_batch"].clone()).collect();
    assert_eq!(sizes, [4, 8]);
    let nodes = found["samples"][1]["nodes"].as_array().expect("nodes");
    assert!(nodes.iter().any(|n| n["node"] == "conv2d1" && n["forward"].as_f64().is_some_and(|v| v > 0.0)));
}

#[test]
fn wrong_settings_are_refused_by_name() {
    let folder = folder();
    let train = |more: &[&str], words: &[&str]| {
        fails(&[&["train", "--model", "mlp", "--data", DATA, "--quiet"], more].concat(), words);
    };
    train(&["--schedule", "zigzag"], &["zigzag", "pipedream-vertical"]);
    train(&["--batch", "0"], &["batch: 1 or more expected, got 0"]);
    train(&["--micro-batches", "0", "--schedule", "gpipe"], &["micro_batches: 1 or more"]);
    train(&["--until", "7"], &["until: 0 to 1 expected"]);
    train(&["--lr=-1"], &["lr: 0 ≤ lr"]);
    train(&["--momentum", "1.5"], &["momentum"]);
    train(&["--lr", "NaN"], &["lr"]);
    train(&["--optimizer", "lion"], &["lion", "adamw"]);
    for optimizer in ["adam", "adamw"] {
        train(&["--optimizer", optimizer, "--momentum", "0.5"], &["momentum: belongs to sgd", optimizer]);
    }
    train(&["--dtype", "f8"], &["f8", "f32 or f64"]);
    train(&["--workers", "0"], &["worker"]);
    train(&["--workers", "40"], &["40 stages"]);
    train(&["--workers", "100000000"], &["100000000 stages", "layers"]);
    train(&["--plan", "1-1"], &["the plan is for 2 workers, there are 1"]);
    train(&["--plan", "1-2", "--workers", "3"], &["stage 1 on 2 workers"]);
    train(&["--checkpoints", "0"], &["epoch, never or a number"]);
    train(&["--keep", "0"], &["1 or more to keep"]);
    train(&["--keep-best"], &["--out"]);
    train(&["--resume"], &["--out"]);
    train(&["--resume", "/nowhere/at/all"], &["/nowhere/at/all", "no complete checkpoint"]);
    train(&["--threads", "0"], &["threads"]);
    train(&["--threads", "100000000"], &["threads: at most"]);
    fails(&["train", "--model", "vgg17", "--data", DATA], &["vgg17", "vgg16"]);
    fails(&["train", "--data", "mnist-1d"], &["mnist-1d", "fashion-mnist"]);
    fails(&["train", "--data", "synthetic:8x8"], &["synthetic:8x8"]);
    fails(&["train", "--model", "vgg16", "--data", DATA], &["vgg16"]);
    fails(&["eval", folder.path().to_str().expect("a readable name")], &["config.toml", "the folder of a run"]);
    for size in ["0", "99999999999999"] {
        let words = &["micro_batch: 1 to "];
        fails(&["profile", "--model", "mlp", "--data", DATA, "--micro-batch", size, "--deterministic"], words);
        fails(&["plan", "--model", "mlp", "--data", DATA, "--micro-batch", size, "--deterministic"], words);
    }
    train(&["--cosine", "0"], &["cosine: 1 or more"]);
    let file = path(&folder, "run.toml");
    for (contents, words) in [
        ("modle = \"mlp\"", &["run.toml", "unknown field `modle`", "line 1"][..]),
        ("batch = \"many\"", &["run.toml", "invalid type", "line 1"]),
        ("batch = -4", &["run.toml", "-4"]),
        ("batch = [", &["run.toml", "line 1"]),
        ("checkpoints = \"often\"", &["often"]),
        ("checkpoints = -5", &["checkpoints: epoch, never or a number of minibatches expected", "-5"]),
        ("optimizer = \"adam\"\nmomentum = 0.5", &["momentum: belongs to sgd"]),
        ("resume = true\nmodel = \"mlp\"\ndata = \"synthetic\"", &["--out"]),
        ("micro-batches = 2\nmicro_batches = 2", &["duplicate field"]),
    ] {
        std::fs::write(&file, contents).expect("a file");
        fails(&["train", "--config", &file], words);
    }
    fails(&["train", "--config", "/nowhere.toml"], &["/nowhere.toml"]);
}

#[test]
fn wrong_plans_and_profiles_are_refused_by_name() {
    let folder = folder();
    let file = path(&folder, "plan.toml");
    for (contents, words) in [
        ("cuts = [\"relu1\"", &["plan.toml", "line 1"][..]),
        ("cuts = [\"relu9\"]", &["relu9", "did you mean"]),
        ("cuts = [\"image\"]", &["image", "an input"]),
        ("cuts = [\"linear2\", \"linear1\"]", &["linear1"]),
        ("stages = 2", &["unknown field"]),
        ("", &["either [[stage]] entries or"]),
        (
            "[[stage]]\nworker = 0\nnodes = [\"flatten1\"]\n[[stage]]\nworker = 1\nnodes = [\"linear1\"]",
            &["is in no stage"],
        ),
        ("[[stage]]\nworker = 3\nnodes = []", &["workers 0 to 0"]),
    ] {
        std::fs::write(&file, contents).expect("a file");
        let args = ["train", "--model", "mlp", "--data", DATA, "--workers", "2", "--quiet", "--plan", &file];
        fails(&args, words);
    }
    std::fs::write(&file, b"cuts = [\"\xff\xfe\"]").expect("a file");
    fails(&["train", "--model", "mlp", "--data", DATA, "--plan", &file], &["plan.toml"]);
    let profile = path(&folder, "profile.json");
    for contents in ["", "{", "{\"crowding\": 1.0, \"samples\": []}", "[1, 2]"] {
        std::fs::write(&profile, contents).expect("a file");
        fails(&["plan", "--model", "mlp", "--data", DATA, "--profile", &profile], &["profile.json"]);
    }
    let save = ["profile", "--model", "mlp", "--data", DATA, "--micro-batch", "4", "--deterministic", "--json"];
    json(&[&save[..], &["--save", &profile]].concat());
    let narrow = ["plan", "--model", "mlp", "--width", "7", "--data", DATA, "--stages", "2", "--profile", &profile];
    fails(&narrow, &["profile.json", "another model"]);
    fails(&["plan", "--model", "mlp", "--data", DATA, "--stages", "0"], &["stage"]);
    fails(&["plan", "--model", "mlp", "--data", DATA, "--stages", "99", "--deterministic"], &["99 stages"]);
}

#[test]
fn damaged_checkpoints_are_refused_by_name_or_passed_over() {
    let folder = folder();
    let out = path(&folder, "run");
    let args =
        ["train", "--model", "mlp", "--width", "9", "--data", DATA, "--batch", "16", "--quiet", "--deterministic"];
    let with = |more: &[&'static str]| {
        let all: Vec<String> =
            args.iter().chain(more).map(|s| s.to_string()).chain(["--out".into(), out.clone()]).collect();
        all
    };
    let run = |v: Vec<String>| json(&v.iter().map(String::as_str).collect::<Vec<_>>());
    let fail = |v: Vec<String>, words: &[&str]| fails(&v.iter().map(String::as_str).collect::<Vec<_>>(), words);
    run(with(&["--steps", "8", "--checkpoints", "4", "--json"]));
    let newest = folder.path().join("run/checkpoints/step-000008");
    let weights = newest.join("stage-0.safetensors");
    let whole = std::fs::read(&weights).expect("weights");
    let rng = Philox::new(3, 0, "damage");
    for i in 0..6u64 {
        let mut bytes = whole.clone();
        let at = rng.below(0, i, bytes.len() as u64) as usize;
        bytes[at] ^= 0x10;
        std::fs::write(&weights, &bytes).expect("a file");
        // Named as it is, it is refused.
        let mut args = with(&["--steps", "9", "--resume"]);
        args.insert(args.len() - 2, newest.to_str().expect("a readable name").to_string());
        fail(args, &["stage-0.safetensors", "SHA-256"]);
    }
    std::fs::write(&weights, &whole[..whole.len() / 2]).expect("a file");
    let mut args = with(&["--steps", "9", "--resume"]);
    args.insert(args.len() - 2, newest.to_str().expect("a readable name").to_string());
    fail(args, &["stage-0.safetensors", "bytes expected"]);
    for (file, contents, words) in [
        ("COMMIT", "{}", &["COMMIT", "missing field"][..]),
        ("position.json", "{}", &["position.json"]),
        ("COMMIT", "{\"format\": 7, \"files\": []}", &["format 1 expected, got 7"]),
    ] {
        std::fs::write(&weights, &whole).expect("a file");
        let target = newest.join(file);
        let before = std::fs::read(&target).expect("a file");
        std::fs::write(&target, contents).expect("a file");
        let mut args = with(&["--steps", "10", "--resume"]);
        args.insert(args.len() - 2, newest.to_str().expect("a readable name").to_string());
        fail(args, words);
        std::fs::write(&target, before).expect("a file");
    }
    std::fs::write(&weights, &whole[1..]).expect("a file");
    // The run as a whole goes on from the one before, with a warning, which has no colours in a pipe.
    let resumed = with(&["--steps", "9", "--json", "--resume"]);
    let resumed = command(&resumed.iter().map(String::as_str).collect::<Vec<_>>()).output().expect("it runs");
    let said = text(&resumed);
    assert!(resumed.status.success() && said.contains("\"steps\":9"), "{said}");
    assert!(said.contains("step-000008 is ignored") && !said.contains('\u{1b}'), "{said}");
}

#[test]
fn a_case_is_timed_by_name() {
    let found = json(&["bench", "step", "--case", "mlp_b128", "--steps", "2", "--warm", "1", "--json"]);
    let fields: Vec<&str> = found.as_object().map(|o| o.keys().map(String::as_str).collect()).unwrap_or_default();
    assert_eq!(fields, ["case", "gflops", "median_ms", "rss_bytes", "samples_per_s", "threads"]);
    let number = |name: &str| found[name].as_f64().unwrap_or_default();
    assert!(found["case"] == "mlp_b128" && number("threads") == 1.0 && number("rss_bytes") > 1e6, "{found}");
    let (seconds, pairs) = (number("median_ms") / 1e3, 784.0 * 1024.0 + 1024.0 * 1024.0 + 10240.0);
    assert!((number("samples_per_s") * seconds - 128.0).abs() < 1e-6, "{found}");
    // Forward, and two products backward but for the gradient of the images.
    let operations = 2.0 * 128.0 * (3.0 * pairs - 784.0 * 1024.0);
    assert!((number("gflops") * 1e9 * seconds / operations - 1.0).abs() < 1e-9, "{found}");
    fails(&["bench", "step", "--case", "mlp"], &["case \"mlp\"", "one of mlp_b128, lenet_b64", "lstm_d512_l4_t32_b32"]);
    fails(&["bench", "step", "--case", "mlp_b128", "--model", "lenet"], &["--case", "--model"]);
}

#[test]
fn convolutions_can_be_had_with_all_their_products() {
    let folder = folder();
    let out = path(&folder, "run");
    let model = ["train", "--model", "resnet18", "--width", "16", "--data", "synthetic:8x8x3:4:32:4", "--batch", "16"];
    let rest = ["--micro-batches", "1", "--schedule", "1f1b", "--steps", "1", "--deterministic", "--quiet", "--json"];
    let args = |more: &[&'static str]| [&model[..], &rest, more].concat();
    let weights = |more: &[&'static str]| json(&args(more))["weights_sha256"].clone();
    let with = weights(&[]);
    assert_eq!(with, weights(&["--threads", "2"]));
    let without = weights(&["--no-winograd"]);
    assert_ne!(with, without);
    assert_eq!(without, weights(&["--no-winograd", "--threads", "2", "--workers", "2"]));
    json(&[&args(&["--no-winograd"])[..], &["--out", &out]].concat());
    fails(&[&args(&[])[..], &["--resume", &out]].concat(), &["winograd: false", "winograd: true"]);
}

#[test]
fn sequences_are_learned() {
    let common =
        ["--data", "synthetic-tokens:8:8:256:64", "--width", "16", "--batch", "16", "--schedule", "1f1b", "--json"];
    for (model, accuracy) in [("gpt", 0.7), ("lstm", 0.5)] {
        let args = [&["train", "--model", model, "--optimizer", "adam", "--lr", "0.01", "--epochs", "6"], &common[..]]
            .concat();
        let found = json(&[&args[..], &["--workers", "2", "--quiet", "--deterministic"]].concat());
        let reached = found["test_accuracy"].as_f64().unwrap_or_default();
        assert!(reached > accuracy && reached <= 1.0, "{model}: {reached}");
    }
    fails(&["train", "--model", "gpt", "--data", DATA], &["model \"gpt\" needs tokens, the data has images"]);
    fails(&["train", "--model", "lenet", "--data", "synthetic-tokens"], &["model \"lenet\" needs images"]);
}
