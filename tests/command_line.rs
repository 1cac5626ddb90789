//! The program as people run it: what it writes, how it stops and goes on, alone and as ranks.
#[cfg(feature = "mpi")]
mod launcher;
mod program;
mod signal;

use pipewright::tensor::Isa;
#[cfg(feature = "mpi")]
use program::PROGRAM;
use program::{DATA, command, fails, folder, json, path, text};
use serde_json::Value;
#[cfg(feature = "mpi")]
use std::process::{Child, Command};
use std::{
    path::Path,
    process::{Output, Stdio},
    time::{Duration, Instant},
};

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
