//! Which worker holds which stage changes nothing of what is computed: plans whose stages lie on workers in any order train, stop, go on
//! and report as those in order do.
mod launcher;

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

const TASK: &[&str] =
    &["train", "--model", "mlp", "--data", "synthetic:8x8x1:4:256:64", "--batch", "16", "--deterministic"];

/// `pipewright` on three threads, or on as many ranks.
fn run(over_mpi: bool, args: &[&str]) -> Output {
    let program = env!("CARGO_BIN_EXE_pipewright");
    let mut command = Command::new("timeout");
    command.args(["-k", "5", "100"]);
    match over_mpi {
        true => launcher::configure(&mut command).args(["mpirun", "--bind-to", "none", "-n", "3", program]),
        false => command.arg(program),
    };
    command.args(TASK).args(args).args(["--quiet", "--json"]);
    if !over_mpi {
        command.args(["--workers", "3"]);
    }
    command.output().expect("the program")
}

/// What a run reports that depends neither on the clock nor on which worker is which.
fn outcome(output: &Output) -> [serde_json::Value; 5] {
    let text = String::from_utf8_lossy(&output.stdout);
    let json = &text[text.find('{').unwrap_or(0)..];
    let report: serde_json::Value =
        serde_json::from_str(json).unwrap_or_else(|e| panic!("{e}: {text}{}", String::from_utf8_lossy(&output.stderr)));
    assert!(report["test_accuracy"].is_number(), "{report}");
    ["weights_sha256", "train_loss", "test_accuracy", "steps", "interrupted"].map(|key| report[key].clone())
}

/// The plan that a run wrote into its folder, worker w replaced by `workers[w]`, as a file.
fn permuted(of: &Path, workers: [usize; 3], to: &Path) {
    let text = fs::read_to_string(of.join("plan.toml")).expect("the plan of the run");
    let mut plan: toml::Table = text.parse().expect("a plan is TOML");
    let replace = |w: &mut toml::Value| {
        let number = w.as_integer().and_then(|w| usize::try_from(w).ok()).expect("a worker");
        *w = toml::Value::Integer(workers[number] as i64);
    };
    for stage in plan["stage"].as_array_mut().expect("stages") {
        let stage = stage.as_table_mut().expect("a stage");
        stage.get_mut("worker").into_iter().for_each(replace);
        stage.get_mut("workers").and_then(|w| w.as_array_mut()).into_iter().flatten().for_each(replace);
    }
    fs::write(to, plan.to_string()).expect("a folder of our own");
}

/// The losses of all minibatches, to the last bit.
fn losses(out: &Path) -> Vec<(u64, u64)> {
    let text = fs::read_to_string(out.join("steps.jsonl")).expect("the metrics");
    let line = |line: &str| {
        let line: serde_json::Value = serde_json::from_str(line).expect("a line");
        (line["minibatch"].as_u64().expect("a number"), line["loss"].as_f64().expect("a loss").to_bits())
    };
    text.lines().map(line).collect()
}

/// Runs 12 minibatches and goes on to 24, on workers in order and in each of these orders, whose outcome must be the same.
fn same(over_mpi: bool, schedule: &str, shape: &str, orders: &[[usize; 3]]) {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let both = |plan: &str, name: &str| {
        let (first, out) = (at(name), at(name).display().to_string());
        let begin = ["--schedule", schedule, "--plan", plan, "--steps", "12", "--out", &out];
        let begun = outcome(&run(over_mpi, &begin));
        // The plan is the one of the checkpoint.
        let resumed =
            outcome(&run(over_mpi, &["--schedule", schedule, "--steps", "24", "--out", &out, "--resume", &out]));
        (begun, resumed, losses(&first))
    };
    let expected = both(shape, "in order");
    assert_eq!(expected.2.len(), 24, "{schedule} {shape}: {:?}", expected.2);
    for order in orders {
        let (name, plan) = (format!("{order:?}"), at(&format!("{order:?}.toml")));
        permuted(&at("in order"), *order, &plan);
        assert_eq!(both(&plan.display().to_string(), &name), expected, "{schedule} {shape} on workers {order:?}");
    }
}

#[test]
fn threads_in_any_order_do_the_same() {
    for (schedule, shape) in [("pipedream", "1-1-1"), ("pipedream", "2-1"), ("1f1b", "1-2")] {
        same(false, schedule, shape, &[[0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]]);
    }
    for (schedule, shape) in [("gpipe", "1-1-1"), ("pipedream-vertical", "1-1-1"), ("pipedream", "1-2"), ("1f1b", "3")]
    {
        same(false, schedule, shape, &[[2, 0, 1]]);
    }
}

#[test]
fn ranks_in_any_order_do_the_same() {
    if !cfg!(feature = "mpi") || !launcher::is_there() {
        return;
    }
    for (schedule, shape) in [("pipedream", "1-1-1"), ("pipedream", "2-1"), ("1f1b", "1-2")] {
        same(true, schedule, shape, &[[2, 0, 1]]);
    }
}

/// The leader is the first worker of stage 0, whatever its number: told to stop, all stop at one minibatch.
#[test]
fn a_run_stops_wherever_its_first_stage_lies() {
    use pipewright::pipeline::{
        lead::Lead,
        transport::{Transport, threads},
    };
    use pipewright::tensor::Device;
    for leader in 0..3 {
        for told in 0..3 {
            let all = threads::run(3, threads::Options::default(), |t| {
                let mut lead = Lead::new(&Device::reference(), leader, 2)?;
                let (mut done, is_told) = (0, t.rank() == told);
                while lead.goes_on(t, is_told && done == 5)? {
                    done += 1;
                }
                lead.finish(t)?;
                Ok(done)
            });
            let all = all.unwrap_or_else(|e| panic!("{leader} leads, {told} is told: {e}"));
            assert!(all.iter().all(|done| *done == all[0]) && (6..12).contains(&all[0]), "{leader}, {told}: {all:?}");
        }
    }
}
