//! Model parallelism without pipelining: one micro-batch in flight, the baseline.
use super::{Inst, Read};

/// Stage r: F0 B0 F1 B1 …, then the update. Every stage waits for the micro-batch to come back before it takes the next.
pub(super) fn stage(stage: usize, micro_batches: usize) -> Vec<Inst> {
    let both = |mb| [Inst::F { stage, mb, read: Read::Current }, Inst::B { stage, mb }];
    (0..micro_batches).flat_map(both).chain([Inst::Step { stage, keep: false }]).collect()
}
