//! Planners: how a model is cut into stages, and how many workers hold each.
//!
//! `straight` cuts a model of this crate into stages of a given number of workers each. `replicated` is the planner of stages on several workers, whose
//! costs `cost` defines; `joint` also chooses the schedule, and judges by the simulator; `compat` is the published recurrence of PipeDream's partitioner.
mod bits;
mod compat;
mod cost;
mod cuts;
mod joint;
mod mode;
mod replicated;
mod states;
mod straight;
mod sweep;
mod trial;

pub use compat::{Compat, plan_compat};
pub use cost::{Judged, Part, judge, shape_of};
pub use joint::{Choice, Rival, Space, evaluate, plan_jointly};
pub use mode::Mode;
pub use replicated::{Limits, Proposal, plan_replicated};
pub(in crate::pipeline) use straight::allowed_cuts;
pub use straight::{Planned, plan_shape, plan_straight, replicas_of_shape};

pub use super::topology::Link;
