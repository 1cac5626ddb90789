//! Asynchronous data parallelism: no gradient is lost, whenever it comes, and all workers end with the same weights.
mod demanding;
mod small;

use pipewright::{
    Error, Result,
    autograd::{Cx, Mask, Op, Outputs, Saved, Sink, Var},
    layers::*,
    optim::{Optimizer, Sgd},
    pipeline::{
        reduce::{AllReduce, Compression, SLACK},
        schedule::Kind,
        transport::{
            Transport,
            threads::{self, Options},
        },
    },
    tensor::{DType, Device, Tensor},
    train::{Engine, Recipe, StepLoss},
};
use small::*;
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    thread,
    time::Duration,
};

/// The sum of its first input, whatever the labels: its gradient does not depend on the weights.
struct Total;

impl Op for Total {
    fn name(&self) -> &'static str {
        "total"
    }
    fn backward(&self, saved: &mut Saved, dy: &[Option<Tensor>], _: Mask, dx: &mut Sink) -> Result<()> {
        let (Some(dy), x) = (&dy[0], saved.get(0)?) else { return Ok(()) };
        dx.put(0, Tensor::full(dy.item()?, x.shape(), x.dtype(), x.device())?)
    }
}

impl Layer for Total {
    fn kind(&self) -> &'static str {
        "total"
    }
    fn forward(&self, cx: &mut Cx, x: &[Var]) -> Result<Outputs> {
        cx.record(Total, &[&x[0]], vec![x[0].value().sum()?], &[(x[0].value(), Mask::only(0))])
    }
    fn loss(&self) -> Option<&dyn Loss> {
        Some(self)
    }
    fn examples() -> Vec<Example> {
        Vec::new()
    }
}

impl Loss for Total {
    fn weight(&self, target: &Tensor) -> Result<f64> {
        Ok(target.len() as f64)
    }
}

/// Sleeps in every forward pass.
struct Slow(Duration);

impl Layer for Slow {
    fn kind(&self) -> &'static str {
        "slow"
    }
    fn forward(&self, cx: &mut Cx, x: &[Var]) -> Result<Outputs> {
        thread::sleep(self.0);
        Ok(cx.scale(single(x)?, 1.0)?.into())
    }
    fn examples() -> Vec<Example> {
        Vec::new()
    }
}

/// One layer, with `loss` at its end.
fn line(loss: impl Layer + 'static, delay: Duration) -> Result<Graph> {
    let mut g = Graph::new();
    let (x, label) = (g.input("x", [6, 6, 2]), g.label("label"));
    let a = g.add(Flatten, [x])?;
    let a = g.add(Slow(delay), [a])?;
    let y = g.add(Linear::new(72, 3), [a])?;
    let loss = g.add(loss, [y, label])?;
    g.with_loss(loss)
}

fn asp(graph: Graph, optimizer: impl Optimizer + 'static, batch: usize) -> Recipe {
    let mut recipe = recipe(graph, optimizer, Kind::PipeDream, batch, 8);
    recipe.settings.asp = true;
    recipe
}

/// What each worker ends with: losses, weights with the optimizer's tensors, running statistics, staleness.
type Ended = (Vec<StepLoss>, Vec<Vec<f64>>, usize);

/// Trains each worker by its own recipe, draining where `drains` says, and compares what all hold there.
fn run(recipes: &[Recipe], sizes: &[usize], drains: &[usize]) -> Result<Vec<Ended>> {
    threads::run(recipes.len(), Options::default(), |t| {
        let (device, recipe) = (Device::cpu(1)?, &recipes[t.rank()]);
        let all = recipes.len();
        let plan = if all > 1 { cut_on(&recipe.graph, &[], &[all])? } else { cut(&recipe.graph, &[])? };
        let mut engine = Engine::new(recipe.clone(), plan, device.clone(), t)?;
        for (i, &n) in sizes.iter().enumerate() {
            assert!(engine.goes_on(false)?);
            let mut m = minibatch(i as u64, n, DType::F64, &device)?;
            if engine.reads_from(i as u64).is_none_or(|(first, _)| first != i as u64) {
                m.batch = None;
            }
            engine.train(&m)?;
            if drains.contains(&i) {
                engine.drain()?;
                let mine = held(&engine)?;
                let all = engine.gather(&mine)?;
                assert!(all.windows(2).all(|w| w[0] == w[1]), "after minibatch {i} all workers hold the same");
            }
        }
        engine.drain()?;
        let staleness = engine.worker().stages().map(|s| s.staleness()).max().unwrap_or(0);
        let (losses, mine) = (engine.take_losses(), held(&engine)?);
        engine.finish()?;
        Ok((losses, mine, staleness))
    })
}

fn held(engine: &Engine) -> Result<Vec<Vec<f64>>> {
    let stage = engine.worker().stages().next().expect("a stage");
    let weights = stage.weights().held().iter().flat_map(|w| [&w.tensor].into_iter().chain(&w.state));
    weights.chain(stage.states().map(|(_, t)| t)).map(Tensor::to_f64).collect()
}

#[test]
fn every_gradient_is_an_update() -> Result<()> {
    for workers in [2, 3, 4] {
        // Also numbers of minibatches that the number of workers does not divide, and drains within rounds.
        for (n, drains) in [(1, &[][..]), (13, &[]), (14, &[4, 5, 8])] {
            let sizes: Vec<usize> = (0..n).map(|j| 6 - j % 3).collect();
            let recipe = asp(line(Total, Duration::ZERO)?, Sgd::new(0.3), 6);
            let ended = run(&vec![recipe.clone(); workers], &sizes, drains)?;
            // w(n) = w(0) − rate · Σ of the gradients: the mean over samples of x, for every column of the weight.
            let device = Device::cpu(1)?;
            let mut expected = vec![0.0; 72];
            for (j, &size) in sizes.iter().enumerate() {
                let m = minibatch(j as u64, size, DType::F64, &device)?;
                let x = m.batch.expect("data").field("x")?.to_f64()?;
                x.iter().enumerate().for_each(|(i, v)| expected[i % 72] += 0.3 * v / size as f64);
            }
            let first = recipe.graph.init_param(0, 7, DType::F64, &device)?.to_f64()?;
            let biases = recipe.graph.init_param(1, 7, DType::F64, &device)?.to_f64()?;
            let case = format!("{workers} workers, {n} minibatches");
            for (worker, (losses, held, _)) in ended.iter().enumerate() {
                assert_eq!(held, &ended[0].1, "{case}: worker {worker} has the weights of the first");
                assert_eq!(losses.iter().map(|l| l.minibatch).collect::<Vec<_>>(), (0..n as u64).collect::<Vec<_>>());
                for (at, (before, after)) in first.iter().zip(&held[0]).enumerate() {
                    let input = if recipe.graph.params()[0].spec.shape == [72, 3] { at / 3 } else { at % 72 };
                    assert!((before - expected[input] - after).abs() < 1e-12, "{case}: weight {at}");
                }
                // Its gradient is 1 for every sample.
                for (before, after) in biases.iter().zip(&held[1]) {
                    assert!((before - 0.3 * n as f64 - after).abs() < 1e-12, "{case}: bias {after}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn one_worker_trains_as_without() -> Result<()> {
    let g = demanding::model()?;
    let mut plain = recipe(g.clone(), sgd(), Kind::PipeDream, 12, 8);
    let sizes = [12, 12, 7, 12];
    let expected = run(std::slice::from_ref(&plain), &sizes, &[1])?;
    plain.settings.asp = true;
    let got = run(&[plain], &sizes, &[1])?;
    assert_eq!((&expected[0].0, &expected[0].1), (&got[0].0, &got[0].1));
    Ok(())
}

/// With momentum, running statistics and several layers: what all hold is the same after each drain, and the loss falls.
#[test]
fn workers_agree_and_learn() -> Result<()> {
    for workers in [2, 3] {
        let recipe = asp(demanding::model()?, Sgd::new(0.01).momentum(0.9), 12);
        let ended = run(&vec![recipe; workers], &[12; 40], &[3, 10, 11])?;
        for (losses, held, _) in &ended {
            assert_eq!((losses, held), (&ended[0].0, &ended[0].1));
            let mean = |of: &[StepLoss]| of.iter().map(|l| l.loss).sum::<f64>() / of.len() as f64;
            assert!(losses.iter().all(|l| l.loss.is_finite()) && losses.len() == 40);
            assert!(mean(&losses[30..]) < 1.5 * mean(&losses[..10]), "{losses:?}");
        }
    }
    Ok(())
}

/// A worker that others wait for, first or last: nobody is too far ahead, nobody waits for ever.
#[test]
fn slow_workers_are_not_left_behind() -> Result<()> {
    let delay = |slow: bool| Duration::from_millis(if slow { 8 } else { 0 });
    for slow in 0..3 {
        let recipes = (0..3).map(|w| Ok(asp(line(CrossEntropy::new(), delay(w == slow))?, sgd(), 6)));
        let ended = run(&recipes.collect::<Result<Vec<_>>>()?, &[6; 60], &[40])?;
        assert!(ended.iter().all(|e| e.1 == ended[0].1));
        let stalest = ended.iter().map(|e| e.2).max().unwrap_or(0);
        // Others have pushed at most so many while it made one gradient, and the one before waited for its answer.
        assert!(stalest > 0 && stalest as u64 <= 2 * 2 * (SLACK + 2), "worker {slow} slow: staleness {stalest}");
    }
    Ok(())
}

/// Fails on one worker.
struct Failing(bool);

impl Layer for Failing {
    fn kind(&self) -> &'static str {
        "failing"
    }
    fn forward(&self, cx: &mut Cx, x: &[Var]) -> Result<Outputs> {
        if self.0 && x[0].value().device().backend().has_data() {
            return Err(Error::numeric("told to fail"));
        }
        Ok(cx.scale(single(x)?, 1.0)?.into())
    }
    fn examples() -> Vec<Example> {
        Vec::new()
    }
}

#[test]
fn a_failing_worker_ends_all() -> Result<()> {
    for bad in 0..2 {
        let model = |fails: bool| -> Result<Graph> {
            let mut g = Graph::new();
            let (x, label) = (g.input("x", [6, 6, 2]), g.label("label"));
            let a = g.add(Flatten, [x])?;
            let a = g.add(Failing(fails), [a])?;
            let y = g.add(Linear::new(72, 3), [a])?;
            let loss = g.add(CrossEntropy::new(), [y, label])?;
            g.with_loss(loss)
        };
        let recipes = [asp(model(bad == 0)?, sgd(), 6), asp(model(bad == 1)?, sgd(), 6)];
        let said = run(&recipes, &[6; 20], &[]).expect_err("a worker fails").to_string();
        assert!(said.contains("told to fail") && said.contains(&format!("rank {bad}, stage 0")), "{said}");
    }
    Ok(())
}

#[test]
fn what_cannot_be_is_refused() -> Result<()> {
    let refused = |change: &dyn Fn(&mut Recipe), cuts: &[&str], replicas: &[usize]| -> Result<String> {
        let mut recipe = asp(demanding::model()?, sgd(), 12);
        change(&mut recipe);
        let plan = cut_on(&recipe.graph, cuts, replicas)?;
        Ok(train(&recipe, &plan, &[12; 4], &[], Options::default()).expect_err("refused").to_string())
    };
    for (said, words) in [
        (refused(&|r| r.settings.schedule = Kind::OneFOneB, &[], &[2])?, "pipedream expected, got 1f1b"),
        (refused(&|r| r.settings.deterministic = true, &[], &[2])?, "depends on the clock"),
        (refused(&|r| r.settings.compress_gradients = Compression::Bf16, &[], &[2])?, "not compressed"),
        (refused(&|r| r.settings.all_reduce = AllReduce::Direct, &[], &[2])?, "no all_reduce"),
        (refused(&|_| (), &["conv2d2"], &[2, 1])?, "one stage on all workers expected, the plan has 2 stages"),
    ] {
        assert!(said.contains(words), "{words:?} expected in {said:?}");
    }
    Ok(())
}

/// An optimizer that does not work element by element: each parameter is updated as a whole by its owner.
struct Normed;

impl Optimizer for Normed {
    fn describe(&self) -> String {
        "normed".into()
    }
    fn rate(&self, _: u64) -> f64 {
        0.1
    }
    fn update(&self, _: u64, lr: f64, weight: &mut Tensor, grad: &Tensor, _: &mut [Tensor]) -> Result<()> {
        let norm = grad.to_f64()?.iter().map(|g| g * g).sum::<f64>().sqrt();
        weight.axpy(-lr / norm, grad)
    }
}

#[test]
fn parameters_are_updated_as_a_whole() -> Result<()> {
    let recipe = asp(line(Total, Duration::ZERO)?, Normed, 6);
    let ended = run(&vec![recipe.clone(); 2], &[6; 7], &[])?;
    // Each update of the bias is a step of length 0.1 along (1, 1, 1).
    let first = recipe.graph.init_param(1, 7, DType::F64, &Device::cpu(1)?)?.to_f64()?;
    for (before, after) in first.iter().zip(&ended[0].1[1]) {
        assert!((before - 7.0 * 0.1 / 3f64.sqrt() - after).abs() < 1e-12, "{before} {after}");
    }
    Ok(())
}

#[test]
fn a_trainer_plans_one_stage() -> Result<()> {
    use pipewright::{
        data,
        models::{self, Input, ModelConfig},
        train::{Settings, Trainer},
    };
    let data = data::by_name("synthetic:8x8x1:4:512:50")?;
    let config = ModelConfig { input: Input::Image([8, 8, 1]), classes: 4, width: Some(48) };
    let model = models::by_name("mlp", &config)?;
    let settings = Settings { asp: true, batch: 16, ..Settings::default() };
    let trainer = Trainer::new(model.graph, model.loss, data).settings(settings).epochs(2).workers(3).quiet(true);
    let report = trainer.run()?;
    assert_eq!((report.stages.len(), report.steps, report.stages[0].workers.len()), (1, 64, 3));
    assert!(report.train_loss[1] < report.train_loss[0] && report.test_accuracy.is_some_and(|a| a > 0.3), "{report:?}");
    Ok(())
}

/// Notes how many forward passes each worker has begun, and by how many the foremost is ahead of this one during a pass.
struct Lag {
    begun: Arc<Vec<AtomicU64>>,
    most: Arc<AtomicU64>,
    worker: usize,
    delay: Duration,
}

impl Layer for Lag {
    fn kind(&self) -> &'static str {
        "lag"
    }
    fn forward(&self, cx: &mut Cx, x: &[Var]) -> Result<Outputs> {
        if x[0].value().device().backend().has_data() {
            let mine = self.begun[self.worker].fetch_add(1, SeqCst) + 1;
            thread::sleep(self.delay);
            let first = self.begun.iter().map(|n| n.load(SeqCst)).max().unwrap_or(0);
            self.most.fetch_max(first - mine, SeqCst);
        }
        Ok(cx.scale(single(x)?, 1.0)?.into())
    }
    fn examples() -> Vec<Example> {
        Vec::new()
    }
}

/// While one worker makes a gradient, others that are faster get ahead of it by as many minibatches as they may, and not by one more.
#[test]
fn nobody_is_further_ahead_than_allowed() -> Result<()> {
    for slow in 0..3 {
        let begun: Arc<Vec<AtomicU64>> = Arc::new((0..3).map(|_| AtomicU64::new(0)).collect());
        let most = Arc::new(AtomicU64::new(0));
        let model = |worker: usize| {
            let delay = Duration::from_millis(if worker == slow { 60 } else { 0 });
            let mut g = Graph::new();
            let (x, label) = (g.input("x", [6, 6, 2]), g.label("label"));
            let a = g.add(Flatten, [x])?;
            let a = g.add(Lag { begun: begun.clone(), most: most.clone(), worker, delay }, [a])?;
            let y = g.add(Linear::new(72, 3), [a])?;
            let loss = g.add(CrossEntropy::new(), [y, label])?;
            g.with_loss(loss)
        };
        let recipes = (0..3).map(|w| Ok(asp(model(w)?, sgd(), 6))).collect::<Result<Vec<_>>>()?;
        run(&recipes, &[6; 36], &[])?;
        let most = most.load(SeqCst);
        assert!(most <= SLACK, "worker {slow} slow: {most} ahead");
        // The last worker owns neither of the two parameters: nothing else holds the others back.
        assert!(slow < 2 || most == SLACK, "worker {slow} slow: {most} ahead");
    }
    Ok(())
}

/// Plain updates, all but the first of which fail.
struct Once(bool);

impl Optimizer for Once {
    fn describe(&self) -> String {
        "once".into()
    }
    fn rate(&self, _: u64) -> f64 {
        0.1
    }
    fn update(&self, number: u64, lr: f64, weight: &mut Tensor, grad: &Tensor, _: &mut [Tensor]) -> Result<()> {
        if self.0 && number > 0 {
            return Err(Error::numeric("told to fail"));
        }
        weight.axpy(-lr, grad)
    }
}

/// The gradient of a slow worker is the last one, and comes to its owner while that waits for the end.
#[test]
fn what_fails_at_the_end_says_where() -> Result<()> {
    let recipe = |worker: usize| {
        let delay = Duration::from_millis(if worker == 0 { 0 } else { 100 });
        Ok(asp(line(CrossEntropy::new(), delay)?, Once(worker == 0), 6))
    };
    let recipes = (0..2).map(recipe).collect::<Result<Vec<_>>>()?;
    let said = run(&recipes, &[6; 2], &[]).expect_err("an update fails").to_string();
    assert!(said.contains("told to fail") && said.contains("rank 0, stage 0, wait for the last updates"), "{said}");
    Ok(())
}
