//! The pipeline: profile, plan, schedule, run.
pub mod checkpoint;
pub mod faults;
pub mod lead;
mod monitor;
pub mod plan;
mod plan_text;
pub mod planner;
pub mod predict;
pub mod profile;
pub mod ranks;
pub mod reduce;
pub mod schedule;
pub mod stage;
pub mod status;
pub mod topology;
pub mod transport;
pub mod weights;
pub mod worker;
