//! Pipewright: deep learning with the pipeline built in.
//!
//! A tour, from the bottom up:
//!
//! - [`tensor`]: immutable arrays on a device; [`tensor::backend`] lists all kernels.
//! - [`autograd`]: the tape, and every op with its gradient; [`autograd::check`] tests gradients.
//! - [`layers`]: what models are made of, and the [`Graph`](layers::Graph); [`models`] holds published ones.
//! - [`optim`], [`data`]: optimizers and learning rates; data sets and loaders.
//! - [`pipeline`]: profiles, plans, schedules as instruction programs, and the workers that run them over threads or MPI.
//! - [`train`]: the [`Trainer`](train::Trainer); [`cli`]: the command line.
//!
//! `use pipewright::prelude::*;` brings what a training program needs.
mod aloud;
pub mod autograd;
pub mod cli;
mod clock;
pub mod data;
pub mod error;
mod hex;
pub mod layers;
mod memory;
pub mod models;
pub mod optim;
pub mod pipeline;
pub mod prelude;
pub mod tensor;
pub mod train;
pub use error::{Context, Error, ErrorKind, Result};
