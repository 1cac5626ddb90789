//! PipeDream's weight stashing means what its closed form says, bit for bit.
//!
//! Minibatch t reads, on stage r of p, version max(t_d, t − (p−1−r)) of that stage's weights, t_d the last drain; with vertical
//! sync version max(t_d, t − (p−1)) on every stage. Its gradient makes version t + 1.
mod small;

use pipewright::{
    Result,
    autograd::{Cx, Grads, Mode, ParamRef, RunKey, Scope, Var},
    layers::*,
    optim::{Optimizer, Sgd},
    pipeline::{plan::Plan, schedule::Kind, transport::threads::Options},
    tensor::{DType, Device, Tensor},
    train::StepLoss,
};
use small::*;
use std::{collections::HashMap, sync::Arc};

const SIZE: usize = 6;

/// Dropout, a skip edge, and no state, so that a plain loop of a few lines can run it.
fn small() -> Result<Graph> {
    let mut g = Graph::new();
    let (x, label) = (g.input("x", [6, 6, 2]), g.label("label"));
    let a = g.add(Flatten, [x])?;
    let a = g.add(Linear::new(72, 9), [a])?;
    let skip = g.add(Relu, [a])?;
    let b = g.add(Linear::new(9, 7), [skip])?;
    let b = g.add(Tanh, [b])?;
    let b = g.add(Dropout::new(0.2), [b])?;
    let c = g.add(Linear::new(7, 9), [b])?;
    let c = g.add(Add, [c, skip])?;
    let y = g.add(Linear::new(9, 3), [c])?;
    let loss = g.add(CrossEntropy::new(), [y, label])?;
    g.with_loss(loss)
}

/// What a closed form is of.
struct Case<'a> {
    plan: &'a Plan,
    opt: &'a dyn Optimizer,
    /// Samples of each minibatch.
    sizes: &'a [usize],
    /// The minibatches after which the pipeline drains.
    drains: &'a [usize],
    /// Which version of stage r's weights minibatch j reads, both counted since the last drain.
    reads: &'a dyn Fn(usize, usize) -> usize,
}

/// The gradients of a round of a stage so far, each with the samples that it is the mean of.
type Round = Vec<(usize, Vec<Tensor>)>;

/// The closed form as a plain loop over the whole graph: a stage on R workers makes an update for R minibatches, with their mean
/// gradient and R / R₀ times the learning rate.
fn closed_form(g: &Graph, case: &Case) -> Result<(Vec<f64>, Vec<Tensor>)> {
    let Case { plan, opt, sizes, drains, reads } = *case;
    let device = Device::cpu(1)?;
    let stages = plan.stages();
    let stage_of = |node: NodeId| stages.iter().position(|s| s.nodes.contains(&node)).unwrap();
    let stage_of_param: Vec<usize> = (0..g.params().len())
        .map(|p| stage_of((0..g.nodes().len()).find(|&i| g.nodes()[i].params.contains(&p)).unwrap()))
        .collect();
    let replicas = |stage: usize| stages[stage].workers.len();
    let first: Vec<Tensor> =
        (0..g.params().len()).map(|p| g.init_param(p, 7, DType::F64, &device)).collect::<Result<_>>()?;
    let mut state: Vec<Vec<Tensor>> = first
        .iter()
        .map(|w| opt.state().iter().map(|_| Tensor::zeros(w.shape(), DType::F64, &device)).collect::<Result<_>>())
        .collect::<Result<_>>()?;
    // By parameter: all versions since the last drain.
    let mut versions: Vec<Vec<Tensor>> = first.into_iter().map(|w| vec![w]).collect();
    let mut rounds: Vec<Round> = stages.iter().map(|_| Round::new()).collect();
    let mut done = vec![0u64; stages.len()];
    let (mut losses, mut drained) = (Vec::new(), 0);
    for (t, &size) in sizes.iter().enumerate() {
        let read = |p: usize| &versions[p][reads(stage_of_param[p], t - drained)];
        let data = minibatch(t as u64, size, DType::F64, &device)?;
        let batch = data.batch.as_ref().unwrap();
        let mut cx = Cx::recording(Mode::Train, RunKey { seed: 7, step: t as u64, samples: Arc::from(&data.ids[..]) });
        let params: Vec<Vec<ParamRef>> = g
            .nodes()
            .iter()
            .map(|n| {
                n.params
                    .iter()
                    .map(|&p| ParamRef { tensor: read(p).clone(), id: p, slot: p, trainable: true })
                    .collect()
            })
            .collect();
        let mut values: HashMap<Value, Var> = HashMap::new();
        for (i, node) in g.nodes().iter().enumerate() {
            let outputs = match &node.kind {
                NodeKind::Input => vec![cx.input(batch.field(&node.name)?.clone(), false)],
                NodeKind::Total => continue,
                NodeKind::Layer(layer) => {
                    cx.enter(Scope { node: &node.name, index: i, params: &params[i], state: &[] });
                    let x: Vec<Var> = node.inputs.iter().map(|v| values[v].clone()).collect();
                    layer.forward(&mut cx, &x)?.all()
                }
            };
            values.extend(outputs.into_iter().enumerate().map(|(output, v)| (Value { node: i, output }, v)));
        }
        let loss = values[&Value { node: g.loss_node().unwrap(), output: 0 }].clone();
        losses.push(loss.value().item()? / size as f64);
        let seed = Tensor::full(1.0 / size as f64, &[], DType::F64, &device)?;
        let mut grads = Grads::default();
        cx.finish().0.unwrap().backward(&[(&loss, seed)], &mut grads)?;
        let grads: Vec<Tensor> = (0..g.params().len()).map(|p| grads.take(p).unwrap()).collect();
        let is_last = t + 1 == sizes.len() || drains.contains(&t);
        for stage in 0..stages.len() {
            rounds[stage].push((size, grads.clone()));
            if rounds[stage].len() < replicas(stage) && !is_last {
                continue;
            }
            let round = std::mem::take(&mut rounds[stage]);
            let samples: usize = round.iter().map(|(n, _)| n).sum();
            let rate = opt.rate(done[stage]) * (replicas(stage) as f64 / replicas(0) as f64);
            let update = done[stage].div_ceil(replicas(stage) as u64);
            for p in (0..g.params().len()).filter(|&p| stage_of_param[p] == stage) {
                let mut mean: Option<Tensor> = None;
                for (n, grads) in &round {
                    let part = grads[p].affine(*n as f64 / samples as f64, 0.0)?;
                    mean = Some(mean.map_or(Ok(part.clone()), |sum| sum.add(&part))?);
                }
                let mut w = versions[p].last().unwrap().clone();
                // A stage of one worker takes its gradient as it is.
                let mean = if replicas(stage) == 1 { grads[p].clone() } else { mean.unwrap() };
                opt.update(update, rate, &mut w, &mean, &mut state[p])?;
                versions[p].push(w);
            }
            done[stage] += round.len() as u64;
        }
        if is_last {
            versions.iter_mut().for_each(|v| *v = v.split_off(v.len() - 1));
            drained = t + 1;
        }
    }
    Ok((losses, versions.into_iter().map(|mut v| v.pop().unwrap()).collect()))
}

fn sha(g: &Graph, weights: &[Tensor]) -> Result<String> {
    use sha2::{Digest, Sha256};
    let hex = |b: &[u8]| b.iter().map(|b| format!("{b:02x}")).collect::<String>();
    let mut lines: Vec<String> = Vec::new();
    for (p, w) in g.params().iter().zip(weights) {
        let bytes: Vec<u8> = w.to_host::<f64>()?.iter().flat_map(|v| v.to_le_bytes()).collect();
        lines.push(format!("{} {}\n", p.name, hex(&Sha256::digest(bytes))));
    }
    lines.sort();
    Ok(hex(&Sha256::digest(lines.concat())))
}

const CUTS: &[&[&str]] = &[&[], &["linear2"], &["linear2", "linear3"], &["relu1", "tanh1", "add1"]];

type Made = (Vec<f64>, String);

/// The closed form and the pipeline's result for one case.
fn both(kind: Kind, cuts: &[&str], opt: Sgd, n: usize, drains: &[usize]) -> Result<(Made, Made, Vec<usize>)> {
    let g = small()?;
    let plan = cut(&g, cuts)?;
    let p = plan.workers();
    let vertical = kind == Kind::PipeDreamVertical;
    let reads = |r: usize, j: usize| j.saturating_sub(if vertical { p - 1 } else { p - 1 - r });
    let sizes = vec![SIZE; n];
    let (losses, weights) = closed_form(&g, &Case { plan: &plan, opt: &opt, sizes: &sizes, drains, reads: &reads })?;
    let expected = (losses, sha(&g, &weights)?);
    let recipe = recipe(g, opt, kind, SIZE, 8);
    let got = train(&recipe, &plan, &sizes, drains, Options::default())?;
    let numbers = |l: &StepLoss| l.loss;
    assert!(got.losses.iter().enumerate().all(|(i, l)| l.minibatch == i as u64));
    Ok((expected, (got.losses.iter().map(numbers).collect(), got.sha), got.versions))
}

#[test]
fn stashing_and_vertical_sync_equal_their_closed_forms() -> Result<()> {
    for kind in [Kind::PipeDream, Kind::PipeDreamVertical] {
        for cuts in CUTS {
            for opt in [Sgd::new(0.3), sgd()] {
                // Fewer minibatches than stages, too; and drains in the middle.
                for (n, drains) in [(1, &[][..]), (2, &[]), (13, &[]), (13, &[4, 5, 8])] {
                    let (expected, got, _) = both(kind, cuts, opt.clone(), n, drains)?;
                    assert_eq!(expected, got, "{kind} cut before {cuts:?}, {n} minibatches, drains after {drains:?}");
                }
            }
        }
    }
    Ok(())
}

/// Cuts and the workers of each stage.
const REPLICATED: &[(&[&str], &[usize])] = &[
    (&[], &[2]),
    (&[], &[3]),
    (&["linear2"], &[2, 1]),
    (&["linear2"], &[1, 2]),
    (&["relu1"], &[3, 1]),
    (&["linear2"], &[2, 3]),
    (&["linear2", "linear3"], &[2, 1, 1]),
    (&["relu1", "linear3"], &[1, 3, 2]),
];

/// Forward j of a stage on R workers reads version max(0, ⌊j/R⌋ − w), and R minibatches make one update.
#[test]
fn replicated_stages_equal_their_closed_form() -> Result<()> {
    for &(cuts, replicas) in REPLICATED {
        let g = small()?;
        let plan = cut_on(&g, cuts, replicas)?;
        let longer: Vec<usize> = plan.shape()?.warm_up().iter().map(|w| w + 1).collect();
        for plan in [plan.clone(), plan.warmed_up(&longer)] {
            let shape = plan.shape()?;
            let reads = |r: usize, j: usize| (j / replicas[r]).saturating_sub(shape.warm_up()[r]);
            // Also numbers of minibatches that no number of workers divides, fewer than workers, drains within rounds, and
            // minibatches of several sizes.
            for (n, drains) in [(1, &[][..]), (2, &[]), (13, &[]), (13, &[4, 5, 8])] {
                let sizes: Vec<usize> = (0..n).map(|j| SIZE - j % 3).collect();
                for opt in [Box::new(sgd()) as Box<dyn Optimizer>, Box::new(pipewright::optim::Adam::new(0.01))] {
                    let case = Case { plan: &plan, opt: &*opt, sizes: &sizes, drains, reads: &reads };
                    let (losses, weights) = closed_form(&g, &case)?;
                    let name = opt.describe();
                    let mut recipe = recipe(g.clone(), sgd(), Kind::PipeDream, SIZE, 8);
                    recipe.optimizer = opt.into();
                    for synchronous in [false, true] {
                        let got = train(&recipe, &plan, &sizes, drains, Options { synchronous })?;
                        let case =
                            format!("{replicas:?} warm-up {:?}, {n} minibatches, {drains:?}, {name}", shape.warm_up());
                        assert_eq!(losses, got.losses.iter().map(|l| l.loss).collect::<Vec<_>>(), "{case}");
                        assert_eq!(sha(&g, &weights)?, got.sha, "{case}");
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn without_stashing_the_closed_form_fails() -> Result<()> {
    let (expected, got, _) = both(Kind::PipeDreamNoStash, &["linear2", "linear3"], sgd(), 13, &[])?;
    assert_ne!(expected.1, got.1);
    let (expected, got, _) = both(Kind::PipeDreamNoStash, &[], sgd(), 13, &[])?;
    assert_eq!(expected, got, "with one stage there is nothing to stash");
    Ok(())
}

#[test]
fn stage_r_of_p_holds_at_most_p_minus_r_versions() -> Result<()> {
    for cuts in CUTS {
        let p = cuts.len() + 1;
        let (.., versions) = both(Kind::PipeDream, cuts, sgd(), 13, &[])?;
        for (r, &held) in versions.iter().enumerate() {
            assert!(held <= p - r, "stage {r} of {p} held {held} versions");
        }
        let (.., versions) = both(Kind::PipeDreamVertical, cuts, sgd(), 13, &[])?;
        assert!(versions.iter().all(|&held| held <= p), "{versions:?} of {p}");
    }
    Ok(())
}
