//! The straight planner against exhaustive search, and the files of plans and profiles.
use pipewright::{
    Result,
    layers::*,
    optim::Sgd,
    pipeline::{
        plan::Plan,
        planner::{Link, Planned, plan_straight, replicas_of_shape},
        profile::{NodeCost, Profile},
    },
    tensor::{DType, Device},
};
use proptest::prelude::*;
use std::{collections::BTreeMap, fs, time::Instant};

/// Samples of a micro-batch.
const SAMPLES: usize = 4;

/// A small graph with skips and tied layers: for each layer its kind and which earlier values it reads.
fn random_graph(layers: &[(u8, usize, usize)]) -> Result<Graph> {
    let mut g = Graph::new();
    // All values x[n,2], or wider where they were joined.
    let mut values = vec![(g.input("x", [2]), 2)];
    let mut linear: Option<Value> = None;
    for &(kind, a, b) in layers {
        let ((x, width), (y, other)) = (values[values.len() - 1 - a % values.len()], values[b % values.len()]);
        values.push(match (kind, linear) {
            (0, _) => (g.add(Concat::new(1), [x, y])?, width + other),
            (1, Some(with)) if width == 2 => (g.add_tied(Linear::new(2, 2), [x], with)?, 2),
            (1..=3, _) if width == 2 => {
                let v = g.add(Linear::new(2, 2), [x])?;
                linear.get_or_insert(v);
                (v, 2)
            }
            (1..=3, _) => (g.add(Linear::new(width, 2), [x])?, 2),
            _ => (g.add(Relu, [x])?, width),
        });
    }
    let target = g.input("target", [values.last().expect("values").1]);
    let loss = g.add(Mse, [values.last().expect("values").0, target])?;
    g.with_loss(loss)
}

fn layer_ids(g: &Graph) -> Vec<NodeId> {
    (0..g.nodes().len()).filter(|&n| matches!(g.nodes()[n].kind, NodeKind::Layer(_))).collect()
}

fn costs(g: &Graph, seconds: impl Fn(usize) -> f64) -> Vec<NodeCost> {
    let cost = |(i, n): (usize, &Node)| {
        let forward = if matches!(n.kind, NodeKind::Layer(_)) { seconds(i) } else { 0.0 };
        NodeCost { node: n.name.clone(), forward, ..NodeCost::default() }
    };
    g.nodes().iter().enumerate().map(cost).collect()
}

/// Bottleneck, bytes moved and evenness of a plan, from its stages and edges.
fn judge(g: &Graph, plan: &Plan, costs: &[NodeCost], link: Link) -> (f64, usize, f64) {
    let stages: Vec<f64> = plan.stages().iter().map(|s| s.nodes.iter().map(|&n| costs[n].seconds()).sum()).collect();
    let (mut slowest, mut moved) = (stages.iter().copied().fold(0.0, f64::max), 0);
    for s in 1..stages.len() {
        // A value that crosses to several later stages passes a cut once.
        let crossing: BTreeMap<Value, bool> =
            plan.edges().iter().filter(|e| e.from < s && s <= e.to).map(|e| (e.value, e.needs_grad)).collect();
        let bytes = |(&v, _): (&Value, &bool)| {
            let (d, shape) = g.shape(v, SAMPLES, DType::F32);
            shape.iter().product::<usize>() * d.size()
        };
        let forward: usize = crossing.iter().map(bytes).sum();
        let backward: usize = crossing.iter().filter(|(_, grad)| **grad).map(bytes).sum();
        let time = |n: usize| link.latency + n as f64 / link.bandwidth;
        slowest = slowest.max(time(forward) + if backward > 0 { time(backward) } else { 0.0 });
        moved += forward + backward;
    }
    (slowest, moved, stages.iter().map(|t| t * t).sum())
}

/// The best of all plans, by bottleneck, bytes and evenness.
fn exhaustive(g: &Graph, costs: &[NodeCost], link: Link, stages: usize) -> Option<(f64, usize, f64)> {
    let layers = layer_ids(g);
    let n = layers.len();
    let mut best: Option<(f64, usize, f64)> = None;
    for mask in (0u32..1 << (n - 1)).filter(|m| m.count_ones() as usize == stages - 1) {
        let cuts: Vec<NodeId> = (1..n).filter(|i| mask >> (i - 1) & 1 == 1).map(|i| layers[i]).collect();
        // Those that tear tied layers apart are refused.
        let Ok(plan) = Plan::straight(g, &cuts) else { continue };
        let found = judge(g, &plan, costs, link);
        if best.is_none_or(|b| found.partial_cmp(&b) == Some(std::cmp::Ordering::Less)) {
            best = Some(found);
        }
    }
    best
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Times are whole numbers, so that sums are exact and ties are ties.
    #[test]
    fn no_plan_is_better(
        layers in prop::collection::vec((0u8..6, 0usize..3, 0usize..9), 1..8),
        seconds in prop::collection::vec(0u32..40, 12),
        stages in 1usize..6,
        latency in 0u32..8,
        bandwidth in prop::sample::select(vec![0.5, 8.0, 64.0, f64::INFINITY]),
    ) {
        let g = random_graph(&layers)?;
        let costs = costs(&g, |i| f64::from(seconds[i % seconds.len()]));
        let link = Link { latency: f64::from(latency), bandwidth };
        let planned = plan_straight(&g, &costs, link, stages, SAMPLES, DType::F32);
        if stages > layer_ids(&g).len() {
            prop_assert!(planned.unwrap_err().to_string().contains("stages asked for"));
            return Ok(());
        }
        match exhaustive(&g, &costs, link, stages) {
            None => prop_assert!(planned.unwrap_err().to_string().contains("share parameters")),
            Some(best) => {
                let planned: Planned = planned?;
                prop_assert_eq!(judge(&g, &planned.plan, &costs, link), best);
                prop_assert_eq!(planned.bottleneck(), best.0);
                prop_assert_eq!(planned.stage_seconds.len(), stages);
                prop_assert_eq!(planned.edge_seconds.len(), planned.plan.edges().len());
                // As text and back it is the same plan.
                let text = planned.plan.to_text_with(&g, &planned.stage_seconds);
                prop_assert_eq!(Plan::from_text(&g, &text)?, planned.plan);
            }
        }
    }
}

fn chain(layers: usize) -> Result<Graph> {
    let mut g = Graph::new();
    let mut x = g.input("x", [2]);
    for _ in 0..layers {
        x = g.add(Relu, [x])?;
    }
    Ok(g)
}

#[test]
fn thousands_of_layers_take_less_than_a_second() -> Result<()> {
    let g = chain(3000)?;
    let uneven = costs(&g, |i| 1e-3 * (i * 7919 % 101) as f64);
    // A slow link makes every cut the bottleneck: the worst case, since any stage is then short enough.
    for bandwidth in [1e9, 1e-3] {
        let start = Instant::now();
        plan_straight(&g, &uneven, Link { latency: 1e-6, bandwidth }, 16, SAMPLES, DType::F32)?;
        let seconds = start.elapsed().as_secs_f64();
        println!("{seconds:.3} s at {bandwidth} bytes/s");
        assert!(seconds < 1.0, "{seconds} s at {bandwidth} bytes/s");
    }
    Ok(())
}

#[test]
fn even_plans_are_even() -> Result<()> {
    let sizes = |plan: Plan, g: &Graph| -> Vec<usize> {
        let layers = |n: &&NodeId| matches!(g.nodes()[**n].kind, NodeKind::Layer(_));
        plan.stages().iter().map(|s| s.nodes.iter().filter(layers).count()).collect()
    };
    let g = chain(10)?;
    let mut four = sizes(Plan::even(&g, 4)?, &g);
    four.sort_unstable();
    assert_eq!(four, [2, 2, 3, 3]);
    assert_eq!(sizes(Plan::even(&g, 10)?, &g), [1; 10]);
    assert!(Plan::even(&g, 11).unwrap_err().to_string().contains("1 to 10 are possible"));
    assert!(Plan::even(&g, 0).is_err());
    Ok(())
}

fn sgd() -> Sgd {
    Sgd::new(0.1).momentum(0.9)
}

fn model() -> Result<Graph> {
    let mut g = Graph::new();
    let (x, label) = (g.input("x", [4]), g.label("label"));
    let h = g.add(Linear::new(4, 8), [x])?;
    let h = g.add(Relu, [h])?;
    let y = g.add(Linear::new(8, 3), [h])?;
    let loss = g.add(CrossEntropy::new(), [y, label])?;
    g.with_loss(loss)
}

fn expect<T>(result: Result<T>, words: &[&str]) {
    let error = result.err().expect("an error").to_string();
    words.iter().for_each(|w| assert!(error.contains(w), "{w:?} is not in {error}"));
}

#[test]
fn impossible_costs_and_links_are_refused() -> Result<()> {
    let g = model()?;
    let plan = |costs: &[NodeCost], latency, bandwidth| {
        plan_straight(&g, costs, Link { latency, bandwidth }, 2, SAMPLES, DType::F32)
    };
    let good = costs(&g, |_| 1.0);
    expect(plan(&good[1..], 0.0, 1.0), &["costs of"]);
    for bad in [f64::NAN, -1.0, f64::INFINITY] {
        expect(plan(&costs(&g, |i| if i == 3 { bad } else { 1.0 }), 0.0, 1.0), &["relu1"]);
        expect(plan(&good, bad, 1.0), &["latency"]);
    }
    for bandwidth in [0.0, -1.0, f64::NAN] {
        expect(plan(&good, 0.0, bandwidth), &["bytes/s"]);
    }
    Ok(())
}

#[test]
fn plan_files_say_what_is_wrong() -> Result<()> {
    let g = model()?;
    let short = Plan::from_text(&g, "cuts = [\"linear2\"]")?;
    let long = "[[stage]]\nworker = 0\nnodes = [\"linear1\", \"relu1\"]\n[[stage]]\nworker = 1\nnodes = [\"linear2\", \"cross_entropy1\"]";
    assert_eq!(short, Plan::from_text(&g, long)?);
    let swapped = long.replace("worker = 1", "worker = 9").replace("worker = 0", "worker = 1").replace("9", "0");
    assert_eq!(Plan::from_text(&g, &swapped)?.stages()[0].workers, [1]);
    let cases: &[(&str, &[&str])] = &[
        ("cuts = [\"linear3\"]", &["linear3", "did you mean \"linear"]),
        ("cuts = [\"zzzzzzzzzzzzzzzz\"]", &["zzzz", "does not have"]),
        ("cuts = [\"label\"]", &["label", "a layer expected"]),
        ("cuts = [\"linear2\", \"relu1\"]", &["relu1", "linear2", "order"]),
        ("cuts = [\"linear2\", \"linear2\"]", &["linear2", "order"]),
        ("cuts = [\"linear1\"]", &["stage 0 has no layer"]),
        ("", &["[[stage]]", "cuts"]),
        ("cuts = []\nstage = []", &["either"]),
        ("stage = []", &["at least one stage"]),
        ("colour = 1", &["line 1", "colour"]),
        ("\ncuts = [\"linear2\"", &["line 2"]),
        ("[[stage]]\nworker = -1\nnodes = []", &["line 2", "-1"]),
        (&long.replace("worker = 1", "worker = 2"), &["workers 0 to 1", "[0, 2]"]),
        (&long.replace("\"linear2\", ", ""), &["linear2", "in no stage"]),
        (&long.replace("\"linear2\"", "\"relu1\""), &["relu1", "stage 0", "stage 1"]),
        (&long.replace("\"linear2\"", "\"linear7\""), &["stage 1 names \"linear7\""]),
    ];
    for (text, words) in cases {
        expect(Plan::from_text(&g, text), words);
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("plan.toml");
    expect(Plan::load(&g, &file), &["plan.toml"]);
    fs::write(&file, "cuts = [\"linaer2\"]").expect("a file");
    expect(Plan::load(&g, &file), &["plan.toml", "did you mean \"linear2\"?"]);
    fs::write(&file, short.to_text(&g)).expect("a file");
    assert_eq!(Plan::load(&g, &file)?, short);
    Ok(())
}

#[test]
fn shapes_are_told_from_files() -> Result<()> {
    let replicas = |text| replicas_of_shape(text).expect("a shape");
    assert_eq!((replicas("1-1-1-1")?, replicas("1")?, replicas("15-1")?), (vec![1; 4], vec![1], vec![15, 1]));
    expect(replicas("1-0"), &["stage 1 has no worker"]);
    expect(replicas("1-99999999999999999999"), &["stage 1 has 99999999999999999999 workers, at most 65536"]);
    for file in ["plan.toml", "", "1-", "-1", "1-a", "4x"] {
        assert!(replicas_of_shape(file).is_none(), "{file:?} is no shape");
    }
    Ok(())
}

#[test]
fn profiles_are_measured_merged_and_interpolated() -> Result<()> {
    let g = model()?;
    let mut calls = 0;
    let mut together = || {
        calls += 1;
        Ok(())
    };
    let measured = Profile::measure(&g, &sgd(), &Device::cpu(1)?, DType::F32, &[8, 2, 4, 8], 1.0, &mut together)?;
    assert_eq!(measured.samples.iter().map(|s| s.micro_batch).collect::<Vec<_>>(), [2, 4, 8]);
    assert_eq!(calls, 3, "all workers meet at each size");
    let estimated = Profile::estimate(&g, &sgd(), DType::F32, &[2, 4, 8])?;
    assert_eq!(estimated, Profile::estimate(&g, &sgd(), DType::F32, &[2, 4, 8])?);
    let linear = g.find("linear1").expect("a node");
    for profile in [&measured, &estimated] {
        let at = &profile.at(6)?[linear];
        assert_eq!((at.param_bytes, at.output_bytes), ((4 * 8 + 8) * 4, 6 * 8 * 4));
        assert!(at.forward > 0.0 && at.weight_grad > 0.0);
        assert!(profile.at(1)?.iter().chain(&profile.at(1000)?).all(|c| c.forward >= 0.0 && c.input_grad >= 0.0));
    }
    let forward = |size| Ok::<f64, pipewright::Error>(estimated.at(size)?[linear].forward);
    approx::assert_relative_eq!(forward(3)?, (forward(2)? + forward(4)?) / 2.0, max_relative = 1e-12);
    approx::assert_relative_eq!(forward(12)?, 2.0 * forward(8)? - forward(4)?, max_relative = 1e-12);
    let mut slow = estimated.clone();
    slow.samples[0].nodes[linear].forward = 9.0;
    let median = Profile::merge(&[slow.clone(), estimated.clone(), estimated.clone()])?;
    assert_eq!(median, estimated);
    expect(Profile::merge(&[]), &["no profile"]);
    expect(
        Profile::merge(&[estimated, Profile::estimate(&chain(7)?, &sgd(), DType::F32, &[2, 4, 8])?]),
        &["different graphs"],
    );
    Ok(())
}

#[test]
fn profile_files_say_what_is_wrong() -> Result<()> {
    let g = model()?;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("profile.json");
    let good = Profile::estimate(&g, &sgd(), DType::F32, &[2, 4])?;
    good.save(&file)?;
    assert_eq!(Profile::load(&file, &g)?, good);
    let text = fs::read_to_string(&file).expect("the file");
    type Change = fn(&mut serde_json::Value);
    let cases: &[(Change, &[&str])] = &[
        (|v| v["colour"] = 1.into(), &["colour"]),
        (|v| v["crowding"] = 0.5.into(), &["crowding", "0.5"]),
        (|v| v["samples"] = serde_json::json!([]), &["samples"]),
        (|v| v["samples"][1]["micro_batch"] = 2.into(), &["ascend"]),
        (|v| v["samples"][0]["nodes"][2]["forward"] = (-1.0).into(), &["linear1", "forward", "-1", "micro-batch 2"]),
        (|v| v["samples"][1]["nodes"][3]["weight_grad"] = 1e300.into(), &["relu1", "weight_grad"]),
        (|v| v["samples"][0]["nodes"][2]["forward"] = serde_json::Value::Null, &["not a profile"]),
        (|v| v["samples"][0]["nodes"][2]["colour"] = 1.into(), &["colour"]),
        (|v| v["samples"][0]["nodes"][2]["node"] = "conv9".into(), &["conv9", "not in the model"]),
        (|v| v["samples"][0]["nodes"][2]["node"] = "relu1".into(), &["relu1", "twice"]),
        (|v| drop(v["samples"][0]["nodes"].as_array_mut().map(|n| n.remove(3))), &["relu1", "missing"]),
        (|v| v["samples"][0]["nodes"].as_array_mut().expect("nodes").swap(2, 3), &["linear1", "relu1", "order"]),
    ];
    for (change, words) in cases {
        let mut value = serde_json::from_str(&text).expect("JSON");
        change(&mut value);
        fs::write(&file, value.to_string()).expect("a file");
        expect(Profile::load(&file, &g), &[words, &["profile.json"][..]].concat());
    }
    fs::write(&file, &text[..text.len() / 2]).expect("a file");
    expect(Profile::load(&file, &g), &["profile.json", "not a profile"]);
    Ok(())
}
