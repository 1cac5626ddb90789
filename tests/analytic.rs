//! Profiles of a device that is given by its rates, beside kernels counted by hand.
mod program;

use pipewright::{
    Result,
    layers::{Conv2d, Graph, Linear},
    optim::Sgd,
    pipeline::profile::{NodeCost, Profile},
    tensor::{DType, Machine},
};
use program::{DATA, fails, folder, json, path};

/// A kernel: its floating-point operations and the bytes of its operands.
type Kernel = (f64, f64);

const MACHINES: [Machine; 4] = [
    Machine { flops: 2.0, bandwidth: 1e24, latency: 0.0 },
    Machine { flops: 1e24, bandwidth: 4.0, latency: 0.0 },
    Machine { flops: 1e24, bandwidth: 1e24, latency: 3.0 },
    // Products are limited by the one rate, sums by the other.
    Machine { flops: 1.0, bandwidth: 4.0, latency: 0.5 },
];

fn seconds(machine: Machine, kernels: &[Kernel]) -> f64 {
    let one = |&(flops, bytes): &Kernel| machine.latency + f64::max(flops / machine.flops, bytes / machine.bandwidth);
    kernels.iter().map(one).sum()
}

/// Compares the node at `at` with its kernels of F, I and W.
fn expect(graph: &Graph, samples: usize, at: usize, kernels: [&[Kernel]; 3]) -> Result<()> {
    for machine in MACHINES {
        let profile = Profile::analytic(graph, &Sgd::new(0.1), DType::F32, &[samples], machine)?;
        let c: &NodeCost = &profile.samples[0].nodes[at];
        for (got, kernels) in [c.forward, c.input_grad, c.weight_grad].into_iter().zip(kernels) {
            approx::assert_relative_eq!(got, seconds(machine, kernels), max_relative = 1e-12, epsilon = 1e-20);
        }
    }
    Ok(())
}

#[test]
fn linear_layers_take_what_their_kernels_do() -> Result<()> {
    let mut g = Graph::new();
    let x = g.input("x", [3]);
    let a = g.add(Linear::new(3, 5), [x])?;
    g.add(Linear::new(5, 2), [a])?;
    // y[4,2] = x[4,5] w[2,5]ᵀ + b[2]; dx = dy w; dw = dyᵀ x, db the sum of dy's rows.
    let product = 2.0 * 4.0 * 5.0 * 2.0;
    let (x, w, b, y) = (4.0 * 20.0, 4.0 * 10.0, 4.0 * 2.0, 4.0 * 8.0);
    expect(&g, 4, 2, [&[(product, x + w + b + y)], &[(product, y + w + x)], &[(product, y + x + w), (8.0, y + b)]])?;
    // Nothing is asked of the gradient of an input of the model.
    let product = 2.0 * 4.0 * 3.0 * 5.0;
    let (x, w, b, y) = (4.0 * 12.0, 4.0 * 15.0, 4.0 * 5.0, 4.0 * 20.0);
    expect(&g, 4, 1, [&[(product, x + w + b + y)], &[], &[(product, y + x + w), (20.0, y + b)]])?;
    // A gradient is added to the sum of those before, then w − lr·g: one kernel for each parameter.
    let sizes = [15.0, 5.0, 10.0, 2.0];
    let each = |flops: f64, bytes: f64| sizes.map(|n| (flops * n, bytes * n));
    for machine in MACHINES {
        let nodes = &Profile::analytic(&g, &Sgd::new(0.1), DType::F32, &[4], machine)?.samples[0].nodes;
        let sum = |time: fn(&NodeCost) -> f64| nodes.iter().map(time).sum::<f64>();
        approx::assert_relative_eq!(sum(|c| c.fold), seconds(machine, &each(2.0, 12.0)), max_relative = 1e-12);
        approx::assert_relative_eq!(sum(|c| c.update), seconds(machine, &each(4.0, 12.0)), max_relative = 1e-12);
    }
    Ok(())
}

#[test]
fn convolutions_take_what_their_kernels_do() -> Result<()> {
    let mut g = Graph::new();
    let x = g.input("x", [6, 6, 1]);
    let a = g.add(Conv2d::new(1, 3, 1), [x])?;
    g.add(Conv2d::new(3, 4, 3), [a])?;
    // y[2,4,4,4] = x[2,6,6,3] ∗ w[3,3,3,4] + b[4].
    let product = 2.0 * (2.0 * 4.0 * 4.0 * 4.0) * (3.0 * 3.0 * 3.0);
    let (x, w, b, y) = (4.0 * 216.0, 4.0 * 108.0, 4.0 * 4.0, 4.0 * 128.0);
    expect(&g, 2, 2, [&[(product, x + w + b + y)], &[(product, w + y + x)], &[(product, x + y + w), (128.0, y + b)]])
}

#[test]
fn devices_are_profiled_planned_and_simulated() {
    let model = ["--model", "mlp", "--data", DATA, "--micro-batch", "8"];
    let device = ["--device-flops", "15.7e12", "--device-bandwidth", "900e9", "--device-latency", "5e-6"];
    let run = |command: &str, more: &[&str]| json(&[&[command][..], &model, &device, more, &["--json"]].concat());
    let profile = run("profile", &[]);
    let forward = |node: usize| profile["samples"][0]["nodes"][node]["forward"].as_f64().expect("a time");
    // A launch, and little beside it; the input is no kernel.
    assert!(forward(0) == 0.0 && (5e-6..6e-6).contains(&forward(2)), "{profile}");
    // Planned as with the profile that is saved.
    let folder = folder();
    let file = path(&folder, "profile.json");
    let workers = ["--workers", "2", "--bandwidth", "1e9"];
    let mut planned = run("plan", &[&workers[..], &["--save-profile", &file]].concat());
    let again = json(&[&["plan", "--profile", &file, "--json"][..], &model, &workers].concat());
    planned["planning_s"] = again["planning_s"].clone();
    assert_eq!(planned, again);
    let simulate = ["--kind", "1f1b", "--plan", "1-1", "--micro-batches", "4"];
    let slow = json(&[&["simulate", "--deterministic", "--json"][..], &model, &simulate].concat());
    assert_ne!(run("simulate", &simulate)["makespan"], slow["makespan"]);
}

#[test]
fn devices_that_cannot_be_are_refused_by_name() {
    let with = |more: &[&str], words: &[&str]| {
        fails(&[&["profile", "--model", "mlp", "--data", DATA, "--micro-batch", "8"], more].concat(), words);
    };
    for wrong in ["0", "-1", "NaN", "inf", "1e300"] {
        with(
            &[&format!("--device-flops={wrong}"), "--device-bandwidth", "1e9"],
            &["flops of a device", "operations/s"],
        );
        with(&["--device-flops", "1e9", &format!("--device-bandwidth={wrong}")], &["bandwidth of a device", "bytes/s"]);
    }
    for wrong in ["-1e-6", "NaN", "inf", "1e9"] {
        let latency = ["--device-flops", "1e9", "--device-bandwidth", "1e9", &format!("--device-latency={wrong}")];
        with(&latency, &["latency of a device", "expected, got"]);
    }
    with(&["--device-flops", "1e9"], &["--device-bandwidth"]);
    with(&["--device-bandwidth", "1e9"], &["--device-flops"]);
    with(&["--device-flops", "1e9", "--device-bandwidth", "1e9", "--deterministic"], &["--deterministic"]);
    fails(
        &["plan", "--profile", "p.json", "--device-flops", "1e9", "--device-bandwidth", "1e9"],
        &["--profile", "--device-flops"],
    );
}
