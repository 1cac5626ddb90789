//! 1F1B with flush (PipeDream-Flush, DAPPLE, Megatron): GPipe's bubble, but at most p−r micro-batches in flight at stage r.
use super::{Inst, Read};

/// Stage r of p: w = min(m, p−1−r) forward passes; F(w+k) B(k) while there are any; the rest of the backward passes; the update.
pub(super) fn stage(stage: usize, stages: usize, micro_batches: usize) -> Vec<Inst> {
    let forward = |mb| Inst::F { stage, mb, read: Read::Current };
    let backward = |mb| Inst::B { stage, mb };
    let warm_up = micro_batches.min(stages - 1 - stage);
    let steady = micro_batches - warm_up;

    let mut insts: Vec<Inst> = (0..warm_up).map(forward).collect();
    insts.extend((0..steady).flat_map(|k| [forward(warm_up + k), backward(k)]));
    insts.extend((steady..micro_batches).map(backward));
    insts.push(Inst::Step { stage, keep: false });
    insts
}
