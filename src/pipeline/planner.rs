//! Planners: how a model is cut into stages, and how many workers hold each.
//!
//! `straight` cuts a model of this crate into stages of one worker each. `replicated` is the planner of stages on several workers, whose
//! costs `cost` defines; `compat` is the published recurrence of PipeDream's partitioner.
mod bits;
mod compat;
mod cost;
mod cuts;
mod replicated;
mod states;
mod straight;
mod sweep;

pub use compat::{Compat, plan_compat};
pub use cost::{Judged, Part, judge, warm_up};
pub use replicated::{Limits, Proposal, plan_replicated};
pub(in crate::pipeline) use straight::allowed_cuts;
pub use straight::{Planned, plan_straight, stages_of_shape};

pub use super::topology::Link;
