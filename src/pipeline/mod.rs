//! The pipeline: profile, plan, schedule, run.
pub mod faults;
pub mod plan;
mod plan_text;
pub mod planner;
pub mod profile;
pub mod schedule;
pub mod stage;
pub mod transport;
pub mod weights;
pub mod worker;
