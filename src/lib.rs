//! Pipewright: deep learning with the pipeline built in.
pub mod autograd;
pub mod cli;
pub mod data;
pub mod error;
pub mod layers;
pub mod models;
pub mod optim;
pub mod pipeline;
pub mod prelude;
pub mod tensor;
pub mod train;
pub use error::{Context, Error, ErrorKind, Result};
