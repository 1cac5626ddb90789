//! The pipeline: profile, plan, schedule, run.
pub mod schedule;
pub mod transport;
