//! Training: the loop around the pipeline.
mod engine;
mod feed;
mod planning;
mod report;
mod settings;
mod trainer;

pub use engine::{Engine, Evaluation, StepLoss};
pub use feed::{Minibatch, Pieces};
pub use report::{EpochReport, Report, StageReport, WorkerReport};
pub use settings::{PlanChoice, Recipe, Settings};
pub use trainer::{Control, Trainer};
