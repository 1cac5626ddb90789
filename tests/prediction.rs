//! Profiles as rehearsals of a training step, and the throughput that is promised from them.
mod demanding;

use demanding::model;
use pipewright::{
    Result,
    layers::Graph,
    models::{self, Input, ModelConfig},
    optim::{Adam, Sgd},
    pipeline::{
        handling::of_sums,
        plan::Plan,
        planner::Link,
        predict::{costs, run_of, seconds_per_minibatch},
        profile::{NodeCost, Profile},
        schedule::{
            Kind,
            simulate::{Costs, StageCost},
        },
        transport::threads::{self, Options},
    },
    tensor::{DType, Device},
    train::{Recipe, Settings},
};
use std::sync::Arc;

/// A plan of `n` stages with free edges whose costs are whole numbers.
fn staged(n: usize) -> Result<(Plan, Costs)> {
    let plan = Plan::even(&model()?, n)?;
    let stage = |s: usize| StageCost {
        forward: 1.0 + s as f64,
        input_grad: 2.0,
        weight_grad: 3.0,
        step: 4.0,
        ..Default::default()
    };
    let edges = vec![Default::default(); plan.edges().len()];
    Ok((plan, Costs { stages: (0..n).map(stage).collect(), edges, ..Costs::default() }))
}

#[test]
fn without_messages_the_closed_forms_hold() -> Result<()> {
    for n in 1..=4 {
        let (plan, costs) = staged(n)?;
        let slowest = n as f64 + 5.0;
        let sum: f64 = (1..=n).map(|s| s as f64 + 5.0).sum();
        for m in [1, 2, 8] {
            let seconds = |kind, crowding| seconds_per_minibatch(kind, &plan, &costs, m, crowding);
            let every = m as f64;
            let flushed = (every - 1.0) * slowest + sum + 4.0;
            // The first stages begin with the next minibatch while the last ones still work.
            assert!(seconds(Kind::GPipe, 1.0)? <= flushed + 1e-9 && seconds(Kind::OneFOneB, 1.0)? <= flushed + 1e-9);
            assert!(seconds(Kind::GPipe, 1.0)? >= every * slowest);
            assert_eq!(seconds(Kind::Sequential, 1.0)?, every * sum + 4.0, "{n} {m}");
            if m == 1 {
                approx::assert_relative_eq!(seconds(Kind::PipeDream, 1.0)?, slowest + 4.0, max_relative = 1e-9);
                // All workers share one core: they take what they take together.
                let shared = seconds(Kind::PipeDream, n as f64)?;
                approx::assert_relative_eq!(shared, sum + 4.0 * n as f64, max_relative = 1e-9);
            }
        }
    }
    Ok(())
}

#[test]
fn runs_fill_and_drain_the_pipeline_once() -> Result<()> {
    for stages in 1..=3 {
        let (plan, costs) = staged(stages)?;
        let sum: f64 = (1..=stages).map(|s| s as f64 + 5.0).sum();
        let run = |kind, n| run_of(kind, &plan, &costs, 1, 1.0, n);
        for n in [1, 2, 7, 256, 257, 5000] {
            let (seconds, workers) = run(Kind::Sequential, n)?;
            // One after the other.
            approx::assert_relative_eq!(seconds, n as f64 * (sum + 4.0), max_relative = 1e-9);
            for (stage, worker) in workers.iter().enumerate() {
                approx::assert_relative_eq!(worker.elapsed, n as f64 * (stage as f64 + 10.0), max_relative = 1e-9);
            }
            let (seconds, workers) = run(Kind::PipeDream, n)?;
            // The values of the first minibatch fill the pipeline and the gradients of the last one drain it; between these the last
            // stage, the slowest, never waits.
            let forward: f64 = (1..stages).map(|s| s as f64).sum();
            let backward = 5.0 * (stages - 1) as f64;
            let whole = forward + n as f64 * (stages as f64 + 9.0) + backward;
            assert!((whole - seconds).abs() <= 4.0 * 1.0000001, "{stages} {n}: {whole} {seconds}");
            assert!(n > 1 || stages > 1 || seconds == whole);
            assert!(workers.iter().all(|w| w.elapsed + w.blocked <= w.end + 1e-6 && w.end <= seconds + 1e-6));
        }
    }
    Ok(())
}

#[test]
fn costs_are_the_sums_of_the_nodes_and_the_bytes_over_the_links() -> Result<()> {
    let g = model()?;
    let plan = Plan::even(&g, 3)?;
    let node = |n: usize| NodeCost { forward: n as f64, update: 1.0, ..NodeCost::default() };
    let nodes: Vec<NodeCost> = (0..g.nodes().len()).map(node).collect();
    let link = |a: usize, b: usize| Link { latency: (a + 10 * b) as f64, bandwidth: 2.0 };
    let found = costs(&g, &plan, &nodes, &link, 5, 1, [DType::F32; 2], None)?;
    for (stage, cost) in plan.stages().iter().zip(&found.stages) {
        assert_eq!(cost.forward, stage.nodes.iter().sum::<usize>() as f64);
        assert_eq!(cost.step, stage.nodes.len() as f64);
    }
    for (edge, cost) in plan.edges().iter().zip(&found.edges) {
        let [forward, backward] = plan.message_bytes(&g, edge, 5, [DType::F32; 2]);
        assert_eq!((cost.forward, cost.backward), (forward as f64 / 2.0, backward as f64 / 2.0));
        assert_eq!(cost.latency, (edge.from + 10 * edge.to) as f64);
    }
    assert!(costs(&g, &plan, &nodes[1..], &link, 5, 1, [DType::F32; 2], None).is_err());
    Ok(())
}

#[test]
fn sums_travel_and_are_added_up_beside_the_backward_pass() -> Result<()> {
    let g = model()?;
    let plan = Plan::replicated(&g, &[], &[2])?;
    // The last of two nodes with parameters is the first that B comes to.
    let learned: Vec<usize> = (0..g.nodes().len()).filter(|&n| !g.nodes()[n].params.is_empty()).collect();
    let (first, last) = (learned[0], learned[learned.len() - 1]);
    let mut nodes = vec![NodeCost { update: 0.5, ..NodeCost::default() }; g.nodes().len()];
    (nodes[last].weight_grad, nodes[last].param_bytes) = (2.0, 300);
    (nodes[first].weight_grad, nodes[first].param_bytes) = (1.0, 100);
    let updates = 0.5 * g.nodes().len() as f64;
    let stage = |bandwidth: f64, sums: Option<&[f64]>| {
        let link = Link { latency: 0.125, bandwidth };
        costs(&g, &plan, &nodes, &|_, _| link, 5, 1, [DType::F32; 2], sums)
            .map(|c| (c.stages[0].sum, c.stages[0].reduce))
    };
    // Each worker sends and gets as many bytes as there are. The last node's gradients leave at 2 and are there at 5, those of the first
    // at 6; adding ends at 2 + 3/4 · 0.8 + 1 + 1/4 · 0.8 = 3.8.
    let (sum, reduce) = stage(100.0, Some(&[0.8]))?;
    assert_eq!(sum, 0.8);
    approx::assert_relative_eq!(reduce, 6.0 - 3.8 + 0.25, max_relative = 1e-12);
    // Nothing is left to wait for on a fast link, or where adding takes longer than that.
    approx::assert_relative_eq!(stage(1e12, Some(&[0.8]))?.1, 0.25, max_relative = 1e-6);
    assert_eq!(stage(100.0, Some(&[9.0]))?, (9.0, 0.25));
    // What was not measured is taken for an update.
    assert_eq!(stage(100.0, None)?.0, updates);
    Ok(())
}

#[test]
fn sums_are_tried_by_the_workers_of_their_stages() -> Result<()> {
    let graph = Arc::new(model()?);
    let plan = Plan::replicated(&graph, &[Plan::even(&graph, 2)?.stages()[1].nodes[0]], &[2, 1])?;
    let recipe = Recipe { graph, optimizer: Arc::new(Sgd::new(0.1)), settings: Settings::default() };
    let setup = recipe.setup(vec![0; 3]);
    // All of it, and a part that stands for all.
    for bandwidth in [1e12, 1e3] {
        let link = |_, _| Link { latency: 1e-6, bandwidth };
        let all = threads::run(3, Options::default(), |t| of_sums(&setup, &plan, &link, true, t, &Device::cpu(1)?))?;
        assert!(all.iter().all(|sums| *sums == all[0]));
        assert!((1e-7..1.0).contains(&all[0][0]) && all[0][1] == 0.0, "{all:?}");
    }
    Ok(())
}

fn profiled(g: &Graph) -> Result<[Profile; 2]> {
    let (sgd, cpu) = (Sgd::new(0.1).momentum(0.9), Device::cpu(1)?);
    let measured = Profile::measure(g, &sgd, &cpu, DType::F32, &[2, 4], 1.0, &mut || Ok(()))?;
    Ok([measured, Profile::estimate(g, &sgd, DType::F32, &[2, 4])?])
}

#[test]
fn every_model_is_rehearsed() -> Result<()> {
    let mut graphs = vec![model()?];
    for name in models::NAMES.iter().filter(|n| **n != "vgg16") {
        let input = if ["gpt", "lstm"].contains(name) { Input::Tokens(9) } else { Input::Image([32, 32, 3]) };
        graphs.push(models::by_name(name, &ModelConfig { input, classes: 10, width: Some(16) })?.graph);
    }
    for g in graphs {
        let [measured, estimated] = profiled(&g)?;
        for (m, e) in measured.samples.iter().zip(&estimated.samples) {
            for (m, e) in m.nodes.iter().zip(&e.nodes) {
                assert_eq!(m.node, e.node);
                let bytes = |c: &NodeCost| (c.output_bytes, c.param_bytes, c.saved_bytes);
                assert_eq!(bytes(m), bytes(e), "{}", m.node);
                for c in [m, e] {
                    let learns = c.param_bytes > 0;
                    assert_eq!([c.fold, c.update].map(|t| t > 0.0), [learns; 2], "{c:?}");
                    assert!(!learns || c.forward > 0.0 && c.passes() > c.forward, "{c:?}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn an_update_costs_what_its_optimizer_does() -> Result<()> {
    let g = model()?;
    let updates = |p: Profile| p.samples[0].nodes.iter().map(|c| c.update).sum::<f64>();
    let sgd = updates(Profile::estimate(&g, &Sgd::new(0.1), DType::F32, &[2])?);
    let momentum = updates(Profile::estimate(&g, &Sgd::new(0.1).momentum(0.9), DType::F32, &[2])?);
    let adam = updates(Profile::estimate(&g, &Adam::new(0.1), DType::F32, &[2])?);
    assert!(0.0 < sgd && sgd < momentum && momentum < adam, "{sgd} {momentum} {adam}");
    let cost = NodeCost { weight_grad: 1.0, fold: 0.5, ..NodeCost::default() };
    assert_eq!([1, 2, 5].map(|m| cost.per_micro_batch(m).weight_grad), [1.0, 1.25, 1.4]);
    Ok(())
}

#[test]
fn profiles_of_before_updates_were_measured_are_read() -> Result<()> {
    let g = model()?;
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("profile.json");
    let profile = Profile::estimate(&g, &Sgd::new(0.1), DType::F32, &[2])?;
    profile.save(&file)?;
    assert_eq!(Profile::load(&file, &g)?, profile);
    let text = std::fs::read_to_string(&file).expect("the file");
    let is_old = |l: &&str| !l.contains("\"update\"") && !l.contains("\"fold\"");
    let old: Vec<&str> = text.lines().filter(is_old).collect();
    std::fs::write(&file, old.join("\n")).expect("a file");
    assert!(Profile::load(&file, &g)?.samples[0].nodes.iter().all(|c| c.update == 0.0));
    Ok(())
}
