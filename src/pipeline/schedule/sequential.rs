//! Model parallelism without pipelining: one micro-batch in flight, the baseline.
use super::{Inst, replicas::Place};

/// F0 B0 F1 B1 … of a worker's own micro-batches, then the update. It waits for a micro-batch to come back before it takes the
/// next.
pub(super) fn worker(place: Place) -> Vec<Inst> {
    let both = |i| [place.forward(i), place.backward(i)];
    (0..place.count()).flat_map(both).chain(place.update_at_end()).collect()
}
