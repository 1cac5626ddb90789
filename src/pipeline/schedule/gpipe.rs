//! GPipe (Huang et al. 2019): all forward passes, then all backward passes.
use super::{Inst, replicas::Place};

/// F0 … F(m−1), B0 … B(m−1) of a worker's own micro-batches, then the update.
pub(super) fn worker(place: Place) -> Vec<Inst> {
    let forward = (0..place.count()).map(|i| place.forward(i));
    let backward = (0..place.count()).map(|i| place.backward(i));
    forward.chain(backward).chain(place.update_at_end()).collect()
}
