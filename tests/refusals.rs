//! What the program refuses, and what it says then.
mod program;

use pipewright::tensor::Philox;
use program::{DATA, command, fails, folder, json, path, text};

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
    train(&["--plan", "1-2", "--workers", "2"], &["the plan is for 3 workers, there are 2"]);
    train(&["--plan", "2-0"], &["stage 1 has no worker"]);
    train(&["--plan", "2-1", "--workers", "3", "--schedule", "pipedream-vertical"], &["takes one worker a stage"]);
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
    for (threads, words) in
        [("0", "at least one thread"), ("4097", "at most 4096"), ("18446744073709551615", "at most")]
    {
        fails(&["profile", "--model", "mlp", "--data", DATA, "--threads", threads], &[words]);
        fails(&["bench", "peak", "--milliseconds", "1", "--threads", threads], &[words]);
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
