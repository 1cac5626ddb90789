//! Runs of small models on threads.
use pipewright::{
    Result,
    data::Batch,
    layers::*,
    optim::{Optimizer, Sgd},
    pipeline::{
        plan::Plan,
        schedule::Kind,
        transport::threads::{self, Options},
    },
    tensor::{DType, Device, Philox, Tensor},
    train::{Engine, Minibatch, Recipe, Settings, StepLoss},
};
use std::sync::Arc;

/// Minibatch `number` of `n` samples.
pub fn minibatch(number: u64, n: usize, dtype: DType, device: &Device) -> Result<Minibatch> {
    let rng = Philox::new(99, number, "test data");
    let x = device.normal(rng, 1.0, &[n, 6, 6, 2], dtype)?;
    let label: Vec<i64> = (0..n).map(|i| rng.below(1, i as u64, 3) as i64).collect();
    let label = Tensor::from_host(&label, &[n], device)?;
    let ids: Vec<u64> = (0..n as u64).map(|i| number * 1000 + i).collect();
    let batch = Batch { ids: ids.clone(), fields: vec![("x".into(), x), ("label".into(), label)] };
    Ok(Minibatch { number, ids, batch: Some(batch) })
}

/// Cuts before the nodes with these names.
pub fn cut(g: &Graph, names: &[&str]) -> Result<Plan> {
    let cuts: Vec<NodeId> = names.iter().map(|n| g.find(n).unwrap_or_else(|| panic!("no node {n}"))).collect();
    Plan::straight(g, &cuts)
}

/// What a run ends with.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    pub losses: Vec<StepLoss>,
    pub sha: String,
    pub versions: Vec<usize>,
}

/// A recipe for the model.
pub fn recipe(graph: Graph, optimizer: impl Optimizer + 'static, schedule: Kind, batch: usize, m: usize) -> Recipe {
    let settings = Settings { schedule, batch, micro_batches: m, seed: 7, dtype: DType::F64, ..Settings::default() };
    Recipe { graph: Arc::new(graph), optimizer: Arc::new(optimizer), settings }
}

pub fn sgd() -> Sgd {
    Sgd::new(0.05).momentum(0.9).decay(0.01)
}

/// Trains on minibatches of the given sizes on threads, draining where `drains` says.
pub fn train(recipe: &Recipe, plan: &Plan, sizes: &[usize], drains: &[usize], options: Options) -> Result<Outcome> {
    let results = threads::run(plan.workers(), options, |t| {
        let device = Device::cpu(1)?;
        let mut engine = Engine::new(recipe.clone(), plan.clone(), device.clone(), t)?;
        for (i, &n) in sizes.iter().enumerate() {
            let mut m = minibatch(i as u64, n, recipe.settings.dtype, &device)?;
            if !engine.reads_data() {
                m.batch = None;
            }
            engine.train(m)?;
            if drains.contains(&i) {
                engine.drain()?;
            }
        }
        engine.drain()?;
        let sha = engine.weights_sha256()?;
        let versions: Vec<usize> = engine.worker().stages().map(|s| s.most_versions()).collect();
        Ok((engine.take_losses(), sha, versions))
    })?;
    let losses = results.iter().find(|r| !r.0.is_empty()).map(|r| r.0.clone()).unwrap_or_default();
    let sha = results[0].1.clone();
    assert!(results.iter().all(|r| r.1 == sha), "every worker sees the same hash");
    Ok(Outcome { losses, sha, versions: results.into_iter().flat_map(|r| r.2).collect() })
}
