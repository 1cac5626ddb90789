//! Models from the command line: trained, timed and profiled.
mod program;

use pipewright::tensor::Isa;
use program::{DATA, fails, folder, json, path};

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
fn a_minibatch_is_no_larger_than_the_data_set() {
    let huge = ["--model", "mlp", "--data", DATA, "--batch", "99999999999999", "--steps", "3", "--quiet", "--json"];
    assert_eq!(json(&[&["train"], &huge[..]].concat())["steps"], 3);
    assert!(json(&[&["bench", "step"], &huge[..]].concat())["samples_per_s"].is_number());
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
fn the_limit_of_the_cores_is_measured() {
    let found = json(&["bench", "peak", "--threads", "2", "--milliseconds", "20", "--json"]);
    let each = found["gflops"].as_array().expect("one number a thread");
    assert!(each.len() == 2 && each.iter().all(|g| g.as_f64().is_some_and(|g| g > 0.1 && g < 1e4)), "{found}");
    assert_eq!(found["isa"].as_str(), Isa::chosen().ok().map(Isa::name));
}

#[test]
fn products_are_timed_by_name() {
    let found = json(&["bench", "products", "--only", "128x1024x784 tb", "--milliseconds", "5", "--json"]);
    let all = found["products"].as_array().expect("one product");
    assert!(all.len() == 1 && all[0]["product"] == "128x1024x784 tb", "{found}");
    let [median, best, peak] = ["gflops", "best_gflops", "peak_gflops"].map(|f| all[0][f].as_f64().unwrap_or_default());
    assert!(median > 0.1 && best >= median && peak > 0.1, "{found}");
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
