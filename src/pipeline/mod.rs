//! The pipeline: profile, plan, schedule, run.
pub mod plan;
pub mod schedule;
pub mod transport;
