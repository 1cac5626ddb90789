//! What of a stage belongs in a checkpoint, under which names.
use super::Checkpoint;
use crate::{Context, Result, optim::Optimizer, pipeline::stage::Stage, tensor::Tensor};

/// The tensors of `stage`, by global name: `node.param`, the optimizer's `node.param/momentum`, and the nodes' state
/// `node/running_mean`. Nothing may be in flight.
pub fn stage_tensors(stage: &Stage, optimizer: &dyn Optimizer) -> Vec<(String, Tensor)> {
    let mut tensors = Vec::new();
    for w in stage.weights().held() {
        tensors.push((w.name.clone(), w.tensor.clone()));
        let kept = optimizer.state().iter().zip(&w.state);
        tensors.extend(kept.map(|(what, t)| (format!("{}/{what}", w.name), t.clone())));
    }
    tensors.extend(stage.states().map(|(name, t)| (name, t.clone())));
    tensors
}

/// Gives `stage` the weights, optimizer state, node state and update count that `from` holds under its names, whichever stages
/// wrote them. If something is wrong the stage stays as it was.
///
/// # Errors
/// If a tensor is missing or of another type or shape, or a file is damaged.
pub fn load_stage(from: &Checkpoint, stage: &mut Stage, optimizer: &dyn Optimizer) -> Result<()> {
    let place = format!("stage {}", stage.index());
    let read = |name: &str, like: &Tensor| from.read(name, like.dtype(), like.shape(), like.device());
    let wanted = stage_tensors(stage, optimizer);
    let loaded =
        wanted.iter().map(|(name, like)| read(name, like)).collect::<Result<Vec<_>>>().context(|| place.as_str())?;
    let mut loaded = loaded.into_iter();
    for w in stage.weights_mut().held_mut() {
        for (to, t) in [&mut w.tensor].into_iter().chain(&mut w.state).zip(&mut loaded) {
            *to = t;
        }
    }
    for (to, t) in stage.states_mut().zip(loaded) {
        *to = t;
    }
    stage.weights_mut().set_minibatches(from.position().minibatch);
    Ok(())
}
