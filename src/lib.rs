//! Pipewright: deep learning with the pipeline built in.
pub mod error;
pub mod tensor;
pub use error::{Context, Error, ErrorKind, Result};
