//! Runs of small models on threads.
use pipewright::{
    Result,
    data::Batch,
    layers::*,
    optim::{Optimizer, Sgd},
    pipeline::{
        plan::Plan,
        schedule::Kind,
        transport::{
            Transport,
            threads::{self, Options},
        },
    },
    tensor::{DType, Device, Philox, Tensor},
    train::{Engine, Minibatch, Recipe, Settings, StepLoss},
};
use std::sync::Arc;

/// The tokens of a sample of a minibatch, and the least number that none of them is.
pub const TOKENS: usize = 5;
pub const VOCABULARY: usize = 11;

/// Minibatch `number` of `n` samples: images with labels, and tokens with those that follow.
pub fn minibatch(number: u64, n: usize, dtype: DType, device: &Device) -> Result<Minibatch> {
    let rng = Philox::new(99, number, "test data");
    let x = device.normal(rng, 1.0, &[n, 6, 6, 2], dtype)?;
    let label: Vec<i64> = (0..n).map(|i| rng.below(1, i as u64, 3) as i64).collect();
    let label = Tensor::from_host(&label, &[n], device)?;
    let text = |lane: u64| -> Result<Tensor> {
        let token = |i: usize| rng.below(lane, i as u64, VOCABULARY as u64) as i64;
        Tensor::from_host(&(0..n * TOKENS).map(token).collect::<Vec<_>>(), &[n, TOKENS], device)
    };
    let text = [("tokens".into(), text(2)?), ("target".into(), text(3)?)];
    let ids: Vec<u64> = (0..n as u64).map(|i| number * 1000 + i).collect();
    let fields = [vec![("x".into(), x), ("label".into(), label)], text.to_vec()].concat();
    let batch = Batch { ids: ids.clone(), fields };
    Ok(Minibatch { number, ids, batch: Some(batch) })
}

/// Cuts before the nodes with these names.
pub fn cut(g: &Graph, names: &[&str]) -> Result<Plan> {
    cut_on(g, names, &vec![1; names.len() + 1])
}

/// The same on so many workers for each stage.
pub fn cut_on(g: &Graph, names: &[&str], replicas: &[usize]) -> Result<Plan> {
    let cuts: Vec<NodeId> = names.iter().map(|n| g.find(n).unwrap_or_else(|| panic!("no node {n}"))).collect();
    Plan::replicated(g, &cuts, replicas)
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
    let outcomes = threads::run(plan.workers(), options, |t| train_on(t, recipe, plan, sizes, drains))?;
    assert!(outcomes.windows(2).all(|o| o[0] == o[1]), "every worker sees the same");
    Ok(outcomes[0].clone())
}

/// One worker's side of [`train`].
pub fn train_on(
    t: &mut dyn Transport,
    recipe: &Recipe,
    plan: &Plan,
    sizes: &[usize],
    drains: &[usize],
) -> Result<Outcome> {
    let device = Device::cpu(1)?;
    let mut engine = Engine::new(recipe.clone(), plan.clone(), device.clone(), t)?;
    for (i, &n) in sizes.iter().enumerate() {
        let mut m = minibatch(i as u64, n, recipe.settings.dtype, &device)?;
        if !engine.reads_data() {
            m.batch = None;
        }
        engine.train(&m)?;
        if drains.contains(&i) {
            engine.drain()?;
        }
    }
    engine.drain()?;
    let losses = engine.take_losses();
    let losses = engine.gather(&losses)?.into_iter().find(|l| !l.is_empty()).unwrap_or_default();
    let versions: Vec<usize> = engine.worker().stages().map(|s| s.most_versions()).collect();
    let versions = engine.gather(&versions)?.concat();
    Ok(Outcome { losses, sha: engine.weights_sha256()?, versions })
}
