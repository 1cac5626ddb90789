//! Training: the loop around the pipeline.
mod engine;
mod feed;
mod settings;

pub use engine::{Engine, Evaluation, StepLoss};
pub use feed::{Minibatch, Pieces};
pub use settings::{PlanChoice, Recipe, Settings};
