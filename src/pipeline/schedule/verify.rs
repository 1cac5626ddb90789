//! Proves lowered programs safe before anything runs.
//!
//! # The rules
//! Every instruction of every worker is gone through in order. [`Rule`] names what is proven:
//! - `place`: compute instructions stand on the worker of their stage, messages at their end of the edge.
//! - `once`: each (stage, micro-batch) has one F, and one B or one I and one W; F only if `step_every` is 0.
//! - `order`: F after the values of all edges that lead to its stage, skip edges included; B and I after their own F and the
//!   gradients of all edges that lead from it; W after I; `Send` after what it sends.
//! - `message`: every message has one `Post`, then one `Recv`, then its use; one `Send`, then one `Wait`.
//! - `channel`: a channel (edge and direction) delivers its messages in order, so that its sends and its posts are in one order.
//! - `deadlock`: all workers come to their ends, with each kind of [`Sends`]. `Reduce` ends when all workers of its stage have come
//!   to the same one.
//! - `step`: update k folds the gradients of micro-batches k·e … k·e+e−1, all of them and no others (e = `step_every`; the last
//!   update has fewer if there are no more), and none is left at the end. With `each_replica` e is that times the workers of the
//!   stage.
//! - `reduce`: on a stage of several workers `Reduce` stands between the last of these gradients and `Step`, and only there.
//! - `version`: `Read::At` names the newest or a kept version, `Free` a kept one; none is kept at the end.
//! - `length`: a program has at most 2²² instructions, or repeats a state.
//!
//! # How long it takes
//! It is linear in the instructions. Of a period it goes through as many repeats as it takes until the state repeats, relative
//! to the micro-batches and versions that have gone by; as what follows depends on the state alone, the others are skipped.
mod channels;
mod facts;
mod fault;
mod joint;
mod local;
mod repeat;
mod stage;

pub use facts::{Facts, Reading, Reads, StageFacts, WorkerFacts};
pub use fault::Rule;

use super::{Program, Programs, Wiring};
use crate::{Error, Result};
use fault::Broken;
use std::{collections::BTreeMap, fmt};

/// When a `Wait` for a send ends, and when a `Recv` does. `Post` and `Send` never block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Sends {
    /// `Wait` ends at once: the message was copied. `Recv` ends when the message was sent.
    Buffered,
    /// `Wait` ends when the receive was posted: a synchronous send. `Recv` ends when the message was sent.
    Rendezvous,
    /// Sends to one worker that stand directly after one another move as one: `Wait` and `Recv` of any of them end when all of
    /// them were sent and all of their receives were posted.
    Batched,
}

impl Sends {
    /// Every kind.
    pub const ALL: [Sends; 3] = [Sends::Buffered, Sends::Rendezvous, Sends::Batched];
}

impl fmt::Display for Sends {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Sends::Buffered => "buffered",
            Sends::Rendezvous => "rendezvous",
            Sends::Batched => "batched",
        })
    }
}

/// Proves lowered programs safe, and tells what they hold and read.
///
/// # Errors
/// The first broken [`Rule`], with worker, position, instruction and those around it.
pub fn verify(programs: &Programs, wiring: &Wiring) -> Result<Facts> {
    wiring.check(programs.workers.len())?;
    check_size(programs)?;
    let (mut workers, mut stages) = (Vec::new(), BTreeMap::new());
    for (worker, program) in programs.workers.iter().enumerate() {
        let (facts, states) = local::check(worker, program, wiring, programs)?;
        workers.push(facts);
        stages.extend(states.into_iter().map(|(stage, s)| {
            let (weight_versions, staleness) = (s.most_versions, s.staleness);
            ((stage, worker), StageFacts { stage, worker, weight_versions, staleness, reads: s.reads })
        }));
    }
    for sends in Sends::ALL {
        joint::check(programs, wiring, sends)?;
    }
    Ok(Facts { workers, stages: stages.into_values().collect() })
}

/// Whether all numbers that will be met can be counted, with room to add two of them.
fn check_size(programs: &Programs) -> Result<()> {
    const MOST: usize = isize::MAX as usize / 2;
    if programs.micro_batches > MOST {
        return Err(Error::schedule(format!("{} micro-batches cannot be counted", programs.micro_batches)));
    }
    let countable = |program: &Program| {
        let by = |shift: usize| program.repeats.checked_mul(shift).filter(|&n| n <= MOST).map(|n| n as isize);
        let (mbs, versions) = (by(program.shift)?, by(program.version_shift)?);
        let instructions = program.period.len().checked_mul(program.repeats).filter(|&n| n <= MOST);
        let period = program.period.iter().filter(|_| program.repeats > 0);
        let largest = period.chain(&program.epilogue).map(|inst| inst.shifted(mbs, versions));
        instructions.and(largest.collect::<Option<Vec<_>>>())
    };
    for (worker, program) in programs.workers.iter().enumerate() {
        if countable(program).is_none() {
            return Err(Broken::new(Rule::Length, "the numbers of its last instructions cannot be counted")
                .at(worker, program, 0));
        }
    }
    Ok(())
}
