//! The pipeline: profile, plan, schedule, run.
pub mod faults;
pub mod plan;
pub mod planner;
pub mod profile;
pub mod schedule;
pub mod stage;
pub mod transport;
pub mod weights;
pub mod worker;
