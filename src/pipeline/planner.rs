//! Planners: how a model is cut into stages, and how many workers hold each.
//!
//! `straight` cuts a model of this crate into stages of one worker each, `compat` is the published recurrence of PipeDream's
//! partitioner.
mod bits;
mod compat;
mod cost;
mod states;
mod straight;

pub use compat::{Compat, plan_compat};
pub use cost::{Judged, Part, judge, warm_up};
pub(in crate::pipeline) use straight::allowed_cuts;
pub use straight::{Planned, plan_straight, stages_of_shape};

pub use super::topology::Link;
