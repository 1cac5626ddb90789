//! The weights after a run of an asynchronous pipeline, by a plain loop over the whole graph.
use super::{plainly::pass, small::minibatch};
use pipewright::{
    Result,
    layers::*,
    optim::Optimizer,
    pipeline::plan::Plan,
    tensor::{DType, Device, Tensor},
};

/// Samples of a minibatch.
pub const SIZE: usize = 6;

/// Dropout, a skip edge, and no state, so that a plain loop of a few lines can run it.
pub fn small() -> Result<Graph> {
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

/// What the workers of a stage make of their gradients of a parameter, each the mean of so many samples.
pub type Combine = dyn Fn(usize, &[(usize, Tensor)]) -> Result<Tensor>;

/// What a closed form is of.
pub struct Case<'a> {
    pub plan: &'a Plan,
    pub opt: &'a dyn Optimizer,
    /// Samples of each minibatch.
    pub sizes: &'a [usize],
    /// The minibatches after which the pipeline drains.
    pub drains: &'a [usize],
    /// Which version of stage r's weights minibatch j reads, both counted since the last drain.
    pub reads: &'a dyn Fn(usize, usize) -> usize,
    /// What becomes of the gradients of a round.
    pub combine: &'a Combine,
}

/// The mean over all samples, added up in the order of minibatches.
pub fn mean(_: usize, grads: &[(usize, Tensor)]) -> Result<Tensor> {
    let samples: usize = grads.iter().map(|(n, _)| n).sum();
    let mut sum: Option<Tensor> = None;
    for (n, g) in grads {
        let part = g.affine(*n as f64 / samples as f64, 0.0)?;
        sum = Some(sum.map_or(Ok(part.clone()), |sum| sum.add(&part))?);
    }
    Ok(sum.expect("a round has a minibatch"))
}

/// The gradients of a round of a stage so far, each with the samples that it is the mean of.
type Round = Vec<(usize, Vec<Tensor>)>;

/// The closed form as a plain loop over the whole graph: a stage on R workers makes an update for R minibatches, with their mean
/// gradient and R / R₀ times the learning rate.
pub fn closed_form(g: &Graph, case: &Case) -> Result<(Vec<f64>, Vec<Tensor>)> {
    let Case { plan, opt, sizes, drains, reads, combine } = *case;
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
        let (loss, grads) = pass(g, &data, &|p| read(p).clone())?;
        losses.push(loss);
        let is_last = t + 1 == sizes.len() || drains.contains(&t);
        for stage in 0..stages.len() {
            rounds[stage].push((size, grads.clone()));
            if rounds[stage].len() < replicas(stage) && !is_last {
                continue;
            }
            let round = std::mem::take(&mut rounds[stage]);
            let rate = opt.rate(done[stage]) * (replicas(stage) as f64 / replicas(0) as f64);
            let update = done[stage].div_ceil(replicas(stage) as u64);
            for p in (0..g.params().len()).filter(|&p| stage_of_param[p] == stage) {
                let mut w = versions[p].last().unwrap().clone();
                let of_round: Vec<(usize, Tensor)> = round.iter().map(|(n, grads)| (*n, grads[p].clone())).collect();
                // A stage of one worker takes its gradient as it is.
                let grad = if replicas(stage) == 1 { grads[p].clone() } else { combine(p, &of_round)? };
                opt.update(update, rate, &mut w, &grad, &mut state[p])?;
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

/// As [`Engine::weights_sha256`](pipewright::train::Engine::weights_sha256).
pub fn sha(g: &Graph, weights: &[Tensor]) -> Result<String> {
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
