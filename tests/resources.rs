//! What a pipeline holds and how it fails: memory of a stage, versions without copies, numbers that are not finite.
mod small;

use pipewright::{
    Result,
    autograd::{Cx, Outputs, Var},
    data,
    layers::*,
    models::{self, Input, ModelConfig},
    optim::Sgd,
    pipeline::{
        plan::Plan,
        reduce::Compression,
        schedule::Kind,
        transport::threads::{self, Options},
    },
    tensor::{DType, Device, PoolStats},
    train::{Engine, PlanChoice, Recipe, Settings, Trainer},
};
use small::*;
use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

const LAYERS: usize = 8;
const WIDTH: usize = 96;
const BATCH: usize = 8;

/// Its weights are far larger than what is computed with them.
fn heavy() -> Result<Graph> {
    let mut g = Graph::new();
    let (x, label) = (g.input("x", [6, 6, 2]), g.label("label"));
    let mut a = g.add(Flatten, [x])?;
    a = g.add(Linear::new(72, WIDTH), [a])?;
    for _ in 0..LAYERS - 2 {
        a = g.add(Tanh, [a])?;
        a = g.add(Linear::new(WIDTH, WIDTH), [a])?;
    }
    let y = g.add(Linear::new(WIDTH, WIDTH), [a])?;
    let loss = g.add(CrossEntropy::new(), [y, label])?;
    g.with_loss(loss)
}

const CUTS: [&str; 3] = ["linear3", "linear5", "linear7"];

/// For each worker: what its pool counted over all minibatches, and over the last `late` of them.
fn pools(kind: Kind, cuts: &[&str], n: u64, late: u64) -> Result<Vec<(PoolStats, PoolStats)>> {
    let g = heavy()?;
    let plan = cut(&g, cuts)?;
    let settings = Settings { schedule: kind, batch: BATCH, micro_batches: 4, ..Settings::default() };
    let optimizer = Arc::new(Sgd::new(0.01).momentum(0.9));
    let recipe = Recipe { graph: Arc::new(g), optimizer, settings };
    threads::run(plan.workers(), Options::default(), |t| {
        let device = Device::cpu(1)?;
        let mut engine = Engine::new(recipe.clone(), plan.clone(), device.clone(), t)?;
        let mut before = device.memory();
        for number in 0..n {
            if number == n - late {
                before = device.memory();
            }
            let mut m = minibatch(number, BATCH, DType::F32, &device)?;
            if !engine.reads_data() {
                m.batch = None;
            }
            engine.train(&m)?;
        }
        let after = device.memory();
        engine.drain()?;
        Ok((before, after))
    })
}

#[test]
fn a_quarter_of_the_model_needs_less_than_six_tenths_of_its_memory() -> Result<()> {
    for kind in [Kind::GPipe, Kind::OneFOneB, Kind::PipeDream] {
        let whole = pools(kind, &[], 12, 1)?[0].1.peak_bytes;
        for (rank, (_, stats)) in pools(kind, &CUTS, 12, 1)?.into_iter().enumerate() {
            let part = stats.peak_bytes as f64 / whole as f64;
            assert!(part < 0.6, "{kind}: rank {rank} needs {part:.2} of what one worker needs");
        }
    }
    Ok(())
}

#[test]
fn in_steady_state_nothing_is_allocated_and_no_weight_copied() -> Result<()> {
    let late = 10;
    // Between threads a buffer that was sent comes home when its receiver drops it: an order of events that did not occur
    // before may take one more, once. So it must be quiet in one of a few runs, whatever the threads do.
    let missed = |kind| -> Result<Vec<u64>> {
        Ok(pools(kind, &CUTS, 300, late)?.into_iter().map(|(before, after)| after.misses - before.misses).collect())
    };
    for kind in [Kind::Sequential, Kind::OneFOneB, Kind::PipeDream, Kind::PipeDreamVertical] {
        let runs: Vec<Vec<u64>> = (0..3).map(|_| missed(kind)).collect::<Result<_>>()?;
        let quiet = |misses: &Vec<u64>| misses.iter().all(|&n| n == 0);
        assert!(runs.iter().any(quiet), "{kind}: allocations of each rank in three runs: {runs:?}");
    }
    // A buffer is asked for only where a minibatch in flight holds the old version: one for each update of a weight that its
    // backward pass needs (no bias, and not the first layer's weight, since the data have no gradient), and none on the last
    // stage, whose updates are in place. The optimizer fills it in the pass that computes the new version.
    let asked = |kind| -> Result<Vec<u64>> {
        let asked = |(before, after): (PoolStats, PoolStats)| after.hits + after.misses - before.hits - before.misses;
        Ok(pools(kind, &CUTS, 30, late)?.into_iter().map(asked).collect())
    };
    let (stashing, without) = (asked(Kind::PipeDream)?, asked(Kind::PipeDreamNoStash)?);
    let needed = [1, 2, 2, 0];
    for (rank, weights) in needed.into_iter().enumerate() {
        let (with, without) = (stashing[rank], without[rank]);
        assert_eq!(with - without, weights * late, "rank {rank}: {with} buffers, without stashing {without}");
    }
    Ok(())
}

/// Gives numbers that are not finite from a forward pass on.
struct Exploding {
    from: usize,
    passes: AtomicUsize,
}

impl Layer for Exploding {
    fn kind(&self) -> &'static str {
        "exploding"
    }
    fn forward(&self, cx: &mut Cx, x: &[Var]) -> Result<Outputs> {
        let x = single(x)?;
        let real = x.value().device().backend().has_data();
        let explodes = real && self.passes.fetch_add(1, Relaxed) >= self.from;
        Ok(cx.scale(x, if explodes { f64::INFINITY } else { 1.0 })?.into())
    }
    fn examples() -> Vec<Example> {
        Vec::new()
    }
}

fn exploding(from: usize) -> Result<Graph> {
    let mut g = Graph::new();
    let (x, label) = (g.input("x", [6, 6, 2]), g.label("label"));
    let a = g.add(Flatten, [x])?;
    let a = g.add(Linear::new(72, 9), [a])?;
    let a = g.add(Exploding { from, passes: AtomicUsize::new(0) }, [a])?;
    let a = g.add(Relu, [a])?;
    let y = g.add(Linear::new(9, 3), [a])?;
    let loss = g.add(CrossEntropy::new(), [y, label])?;
    g.with_loss(loss)
}

#[test]
fn a_loss_that_is_not_finite_names_minibatch_rank_and_first_layer() -> Result<()> {
    for (kind, cuts, rank) in [
        (Kind::OneFOneB, &["linear1"][..], 1),
        (Kind::PipeDream, &["exploding1", "relu1"], 1),
        (Kind::GPipe, &["linear1", "linear2", "cross_entropy1"], 1),
        (Kind::PipeDream, &[], 0),
    ] {
        // In the second micro-batch of minibatch 3, if there are several.
        let g = exploding(if kind.is_synchronous() { 3 * 4 + 1 } else { 3 })?;
        let plan: Plan = cut(&g, cuts)?;
        let failed = train(&recipe(g, sgd(), kind, 12, 4), &plan, &[12; 6], &[], Options::default());
        let said = failed.expect_err("infinite").to_string();
        for words in [
            "minibatch 3",
            &format!("rank {rank}, stage {rank}, micro-batch {}", if kind.is_synchronous() { 1 } else { 3 }),
            "forward",
            "\"exploding1\" is the first",
        ] {
            assert!(said.contains(words), "{kind} cut before {cuts:?}: {words:?} expected in {said:?}");
        }
    }
    Ok(())
}

/// Also where a run pauses for evaluations and fills up again, whatever the threads do.
#[test]
fn a_run_that_has_warmed_up_allocates_nothing() -> Result<()> {
    for kind in [Kind::GPipe, Kind::OneFOneB, Kind::PipeDream] {
        let data = data::by_name("synthetic:8x8x1:4:1024:50")?;
        let config = ModelConfig { input: Input::Image([8, 8, 1]), classes: 4, width: Some(48) };
        let model = models::by_name("mlp", &config)?;
        let report = Trainer::new(model.graph, model.loss, data)
            .schedule(kind)
            .batch_size(16)
            .micro_batches(4)
            .epochs(3)
            .workers(3)
            .quiet(true)
            .run()?;
        assert_eq!(report.pool_misses_after_warmup, 0, "{kind}");
    }
    Ok(())
}

#[test]
fn sums_of_gradients_allocate_nothing_either() -> Result<()> {
    let (none, power) = (Compression::None, Compression::PowerSgd { rank: 2 });
    for (kind, replicas, compress_gradients, compress_edges) in [
        (Kind::PipeDream, vec![2, 1], none, false),
        (Kind::OneFOneB, vec![1, 2], none, true),
        (Kind::PipeDream, vec![3], none, false),
        (Kind::OneFOneB, vec![2, 1], Compression::Bf16, true),
        (Kind::PipeDream, vec![2], Compression::Bf16, false),
        (Kind::PipeDream, vec![1, 2], power, false),
        (Kind::OneFOneB, vec![3], power, false),
    ] {
        let data = data::by_name("synthetic:8x8x1:4:1024:50")?;
        let config = ModelConfig { input: Input::Image([8, 8, 1]), classes: 4, width: Some(48) };
        let model = models::by_name("mlp", &config)?;
        let settings = Settings {
            schedule: kind,
            batch: 16,
            micro_batches: 4,
            plan: PlanChoice::Replicas(replicas.clone()),
            compress_gradients,
            compress_edges,
            ..Settings::default()
        };
        let report = Trainer::new(model.graph, model.loss, data)
            .settings(settings)
            .epochs(3)
            .workers(replicas.iter().sum())
            .quiet(true)
            .run()?;
        let case = format!("{kind} on {replicas:?}, gradients {compress_gradients}, edges {compress_edges}");
        assert_eq!(report.pool_misses_after_warmup, 0, "{case}");
    }
    Ok(())
}
