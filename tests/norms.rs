//! Gradients are means over the samples of a minibatch or of a round, wherever these run: no norm grows with the number of
//! micro-batches or of workers. Exact comparisons of bits would not tell by which factor a sum that should be a mean is off.
mod plainly;

use pipewright::{
    Result,
    data::Batch,
    layers::*,
    optim::Sgd,
    pipeline::{plan::Plan, schedule::Kind, transport::threads},
    tensor::{DType, Device, Philox, Tensor},
    train::{Engine, Minibatch, Recipe, Settings},
};
use plainly::pass;
use std::sync::Arc;

/// Squares of two norms by parameter.
type Squares = Vec<(String, [f64; 2])>;

/// Convolutions, and a loss that is not linear in any weight; nothing that depends on which samples share a micro-batch.
fn model() -> Result<Graph> {
    let mut g = Graph::new();
    let (x, label) = (g.input("x", [6, 6, 2]), g.label("label"));
    let h = g.add(Conv2d::new(2, 4, 3).padding(1), [x])?;
    let h = g.add(Tanh, [h])?;
    let h = g.add(Conv2d::new(4, 3, 3), [h])?;
    let h = g.add(Relu, [h])?;
    let h = g.add(Flatten, [h])?;
    let h = g.add(Linear::new(48, 8), [h])?;
    let h = g.add(Gelu, [h])?;
    let y = g.add(Linear::new(8, 3), [h])?;
    let loss = g.add(CrossEntropy::new(), [y, label])?;
    g.with_loss(loss)
}

fn minibatch(samples: usize) -> Result<Minibatch> {
    let (device, rng) = (Device::cpu(1)?, Philox::new(3, 0, "samples"));
    let label: Vec<i64> = (0..samples).map(|i| rng.below(1, i as u64, 3) as i64).collect();
    let fields = vec![
        ("x".into(), device.normal(rng, 1.0, &[samples, 6, 6, 2], DType::F64)?),
        ("label".into(), Tensor::from_host(&label, &[samples], &device)?),
    ];
    let ids: Vec<u64> = (0..samples as u64).collect();
    Ok(Minibatch { number: 0, ids: ids.clone(), batch: Some(Batch { ids, fields }) })
}

/// Steps along the gradient, as long as it is.
fn recipe(schedule: Kind, batch: usize, micro_batches: usize, deterministic: bool) -> Result<Recipe> {
    let settings =
        Settings { schedule, batch, micro_batches, seed: 7, dtype: DType::F64, deterministic, ..Settings::default() };
    Ok(Recipe { graph: Arc::new(model()?), optimizer: Arc::new(Sgd::new(1.0)), settings })
}

/// One stage, or two, the second from the first activation after the second convolution on.
fn plan(g: &Graph, replicas: &[usize]) -> Result<Plan> {
    let cut = g.find("relu1").expect("a node");
    Plan::replicated(g, &vec![cut; replicas.len() - 1], replicas)
}

fn squares(t: &Tensor) -> Result<f64> {
    Ok(t.to_f64()?.iter().map(|x| x * x).sum())
}

/// The first weights and, by one pass over the whole minibatch, the gradient of its mean loss: parameter by parameter.
fn plainly(g: &Graph, data: &Minibatch) -> Result<Vec<[Tensor; 2]>> {
    let batch = data.batch.as_ref().expect("data");
    let device = batch.field("x")?.device().clone();
    let weights: Vec<Tensor> =
        (0..g.params().len()).map(|p| g.init_param(p, 7, DType::F64, &device)).collect::<Result<_>>()?;
    let (_, grads) = pass(g, data, &|p| weights[p].clone())?;
    Ok(weights.into_iter().zip(grads).map(|(w, grad)| [w, grad]).collect())
}

/// The weights after training on the minibatches, and how far they moved: squares of their norms, by name.
fn trained(recipe: &Recipe, plan: &Plan, data: &[Minibatch]) -> Result<Squares> {
    let all = threads::run(plan.workers(), threads::Options::default(), |t| {
        let device = data[0].batch.as_ref().expect("data").field("x")?.device().clone();
        let mut engine = Engine::new(recipe.clone(), plan.clone(), device.clone(), t)?;
        for minibatch in data {
            let batch = minibatch.batch.clone().filter(|_| engine.reads_data());
            engine.train(&Minibatch { batch, ..minibatch.clone() })?;
        }
        engine.drain()?;
        let mut mine = Vec::new();
        for stage in engine.worker().stages() {
            for w in stage.weights().held() {
                let p = recipe.graph.params().iter().position(|p| p.name == w.name).expect("a parameter");
                let first = recipe.graph.init_param(p, 7, DType::F64, &device)?;
                let moved = w.tensor.affine(-1.0, 0.0)?.add(&first)?;
                mine.push((w.name.clone(), [squares(&w.tensor)?, squares(&moved)?]));
            }
        }
        Ok(mine)
    })?;
    let mut all: Squares = all.concat();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    // Replicas are alike.
    all.dedup();
    assert_eq!(all.len(), recipe.graph.params().len(), "{all:?}");
    Ok(all)
}

/// By name, as `trained` has it, what a step of rate 1 with this part of the gradients comes to.
fn expected(g: &Graph, plain: &[[Tensor; 2]], part: f64) -> Result<Squares> {
    let of = |p: usize| {
        let [w, gradient] = &plain[p];
        let moved = gradient.affine(part, 0.0)?;
        Ok((g.params()[p].name.clone(), [squares(&w.add(&moved.affine(-1.0, 0.0)?)?)?, squares(&moved)?]))
    };
    let mut all = (0..plain.len()).map(of).collect::<Result<Squares>>()?;
    all.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(all)
}

/// The norms of all weights and of all gradients.
fn whole(all: &Squares) -> [f64; 2] {
    [0, 1].map(|i| all.iter().map(|(_, s)| s[i]).sum::<f64>().sqrt())
}

fn assert_same(got: &Squares, want: &Squares, case: &str) {
    let close = |got: [f64; 2], want: [f64; 2], what: &str| {
        let far = (0..2).any(|i| (got[i] - want[i]).abs() > 1e-12 * want[i]);
        assert!(!far, "{case}: {what} has norms {got:?} of weight and gradient, {want:?} expected");
    };
    close(whole(got), whole(want), "the whole model");
    for ((name, got), (_, want)) in got.iter().zip(want) {
        close(got.map(f64::sqrt), want.map(f64::sqrt), name);
    }
}

#[test]
fn no_norm_depends_on_micro_batches_or_replicas() -> Result<()> {
    let g = model()?;
    for samples in [24, 13, 5] {
        let data = minibatch(samples)?;
        let want = expected(&g, &plainly(&g, &data)?, 1.0)?;
        assert!(want.iter().all(|(_, s)| s[1] > 1e-6), "gradients to speak of expected: {want:?}");
        for kind in [Kind::OneFOneB, Kind::GPipe] {
            for deterministic in [false, true] {
                for m in [1, 2, 3, 8] {
                    for replicas in [&[1][..], &[2], &[3], &[2, 1], &[1, 2]] {
                        let recipe = recipe(kind, samples, m, deterministic)?;
                        let got = trained(&recipe, &plan(&g, replicas)?, std::slice::from_ref(&data))?;
                        let case = format!("{kind}, {samples} samples, m = {m}, {replicas:?}, {deterministic}");
                        assert_same(&got, &want, &case);
                    }
                }
            }
        }
    }
    Ok(())
}

/// A round of equal minibatches has the mean gradient of one of them, and updates the weights once. The last stage of 1-2 makes one
/// update where the first makes two, which the published factor of its rate makes up for.
#[test]
fn no_norm_depends_on_the_minibatches_of_a_round() -> Result<()> {
    let (g, data) = (model()?, minibatch(7)?);
    let plain = plainly(&g, &data)?;
    let (once, twice) = (expected(&g, &plain, 1.0)?, expected(&g, &plain, 2.0)?);
    let round =
        |r: usize| -> Vec<Minibatch> { (0..r).map(|j| Minibatch { number: j as u64, ..data.clone() }).collect() };
    for deterministic in [false, true] {
        for scale_rate in [false, true] {
            let mut recipe = recipe(Kind::PipeDream, 7, 1, deterministic)?;
            recipe.settings.scale_rate = scale_rate;
            for r in 1..4 {
                let got = trained(&recipe, &plan(&g, &[r])?, &round(r))?;
                assert_same(&got, &once, &format!("{r} replicas, {deterministic}, {scale_rate}"));
            }
            let plan = plan(&g, &[1, 2])?;
            let last = |all: &Squares| -> Squares {
                let is_last = |name: &str| {
                    let p = g.params().iter().position(|p| p.name == name).expect("a parameter");
                    plan.stages()[1].nodes.iter().any(|&n| g.nodes()[n].params.contains(&p))
                };
                all.iter().filter(|(name, _)| is_last(name)).cloned().collect()
            };
            let got = last(&trained(&recipe, &plan, &round(2))?);
            let want = last(if scale_rate { &twice } else { &once });
            assert_same(&got, &want, &format!("the last stage of 1-2, {deterministic}, {scale_rate}"));
        }
    }
    Ok(())
}
