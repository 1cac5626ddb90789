//! From a kind of schedule and a placement to proven programs.
use super::{Kind, Programs, Shape, Wiring, lower, make_for, verify, verify::Facts};
use crate::Result;

/// The programs of a schedule for a placement, with their messages and proven, and what the proof found.
///
/// # Errors
/// If the schedule cannot be made for the placement, or is not safe there.
pub fn prepare(kind: Kind, shape: &Shape, wiring: &Wiring, micro_batches: usize) -> Result<(Programs, Facts)> {
    prove(make_for(kind, shape, micro_batches)?, wiring)
}

/// The same from programs of compute instructions, of the workers of stage 0, then those of stage 1, ….
///
/// # Errors
/// If they are not for the placement, or not safe there.
pub fn prove(programs: Programs, wiring: &Wiring) -> Result<(Programs, Facts)> {
    let lowered = lower(&programs.placed(wiring)?, wiring)?;
    let facts = verify(&lowered, wiring)?;
    Ok((lowered, facts))
}
