//! What a program that defines and trains a model needs, at once: `use pipewright::prelude::*;`.
pub use crate::{
    Context, Error, Result,
    autograd::{Cx, Outputs, Var},
    data::{self, Data, Dataset},
    layers::*,
    models,
    optim::{Adam, Optimizer, Rate, Sgd},
    pipeline::schedule::Kind as Schedule,
    tensor::{DType, Device, Tensor},
    train::{Control, EpochReport, Every, PlanChoice, Report, Session, Settings, Trainer},
};
