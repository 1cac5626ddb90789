//! GPipe (Huang et al. 2019): all forward passes, then all backward passes.
use super::{Inst, Read};

/// Stage r: F0 … F(m−1), B0 … B(m−1), then the update.
pub(super) fn stage(stage: usize, micro_batches: usize) -> Vec<Inst> {
    let forward = (0..micro_batches).map(|mb| Inst::F { stage, mb, read: Read::Current });
    let backward = (0..micro_batches).map(|mb| Inst::B { stage, mb });
    forward.chain(backward).chain([Inst::Step { stage, keep: false }]).collect()
}
