//! PipeDream's asynchronous 1F1B (Harlap et al. 2018): no flush, an update after every backward pass.
use super::{Inst, Program, Read, replicas::Place};

/// The warm-up of w forward passes; F(w+k) B(k) and the update, n−w times; the rest of the backward passes, an update after each.
/// Forward passes read the newest weights, so that B(k) computes with weights w updates old: p−1−r at stage r of p.
///
/// On a replicated stage these are the worker's own micro-batches, one of every round, and the update is that of the round. Of the
/// last round it may have none: then it has a part in the update only.
pub(super) fn worker(place: Place) -> Program {
    let backward = |i| [place.backward(i)].into_iter().chain(place.update_of_round(i));
    let (warm_up, count) = (place.warm_up(), place.count());

    // What follows the period is written as if it were not repeated.
    let mut epilogue: Vec<Inst> = (0..warm_up).flat_map(backward).collect();
    if count < place.rounds() {
        epilogue.extend(place.update_of_round(warm_up));
    }
    Program {
        prologue: (0..warm_up).map(|i| place.forward(i)).collect(),
        period: [place.forward(warm_up)].into_iter().chain(backward(0)).collect(),
        repeats: count - warm_up,
        shift: place.replicas,
        version_shift: 1,
        epilogue,
    }
}

/// The same with vertical sync: at every stage F(j) reads version max(0, j−(p−1)), the newest that the first stage has then.
///
/// Stage r reads versions r updates old, so each update keeps the old one, until its last forward pass has read it (backward
/// passes have theirs from the tape); those for which none came are freed at the end.
pub(super) fn vertical(stage: usize, stages: usize, micro_batches: usize) -> Program {
    let lag = stages - 1;
    let keep = stage > 0;
    let free = |version| keep.then_some(Inst::Free { stage, version });
    let forward = |mb: usize| {
        let read = Read::At(mb.saturating_sub(lag));
        let last_use = mb.checked_sub(lag).and_then(free);
        [Inst::F { stage, mb, read }].into_iter().chain(last_use)
    };
    let backward = |mb| [Inst::B { stage, mb }, Inst::Step { stage, keep }];
    let warm_up = micro_batches.min(lag - stage);
    // Up to F(p−2) the version stays 0 while the micro-batches count up; from F(p−1) on both do.
    let aligned = (micro_batches - warm_up).min(stage);
    let repeats = micro_batches - warm_up - aligned;

    let mut prologue: Vec<Inst> = (0..warm_up).flat_map(forward).collect();
    for k in 0..aligned {
        prologue.extend(forward(warm_up + k).chain(backward(k)));
    }
    let mut epilogue: Vec<Inst> = (aligned..aligned + warm_up).flat_map(backward).collect();
    // Versions from n−(p−1) on were kept and not read again.
    epilogue.extend((micro_batches.saturating_sub(lag)..micro_batches).map(|v| v - repeats).filter_map(free));
    Program {
        prologue,
        period: forward(warm_up + aligned).chain(backward(aligned)).collect(),
        repeats,
        shift: 1,
        version_shift: 1,
        epilogue,
    }
}
