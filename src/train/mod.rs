//! Training: the loop around the pipeline.
mod crowding;
mod engine;
mod feed;
mod files;
mod gather;
mod log;
mod planning;
mod report;
mod saving;
mod session;
mod settings;
mod split;
mod tally;
mod trainer;

pub use engine::{Engine, Evaluation, StepLoss};
pub use feed::{Minibatch, Pieces};
pub use files::{CONFIG, Every, Files};
pub use report::{EpochReport, Report, StageReport, WorkerReport};
pub use session::Session;
pub use settings::{PlanChoice, Recipe, Settings};
pub use split::{Comparison, Split};
pub use trainer::{Control, Trainer};
