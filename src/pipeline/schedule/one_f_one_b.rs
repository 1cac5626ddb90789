//! 1F1B with flush (PipeDream-Flush, DAPPLE, Megatron): GPipe's bubble, but at most p−r micro-batches in flight at stage r.
use super::{Inst, replicas::Place};

/// The warm-up, p−1−r forward passes at stage r of p; F(w+k) B(k) while there are any; the rest of the backward passes; the
/// update.
pub(super) fn worker(place: Place) -> Vec<Inst> {
    let (warm_up, count) = (place.warm_up(), place.count());
    let steady = count - warm_up;

    let mut insts: Vec<Inst> = (0..warm_up).map(|i| place.forward(i)).collect();
    insts.extend((0..steady).flat_map(|i| [place.forward(warm_up + i), place.backward(i)]));
    insts.extend((steady..count).map(|i| place.backward(i)));
    insts.extend(place.update_at_end());
    insts
}
