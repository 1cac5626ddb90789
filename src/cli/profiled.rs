//! The model that a command is about, and its profile.
use super::train::model_for;
use crate::{
    Error, Result, data,
    layers::Graph,
    optim::Sgd,
    pipeline::profile::Profile,
    tensor::{DType, Device},
};
use std::path::PathBuf;

#[derive(clap::Args)]
pub(super) struct Profiled {
    /// The model: mlp, lenet, vgg16 or resnet18
    #[arg(long, default_value = "lenet")]
    model: String,
    /// Width of the model's hidden fully connected layers
    #[arg(long)]
    width: Option<usize>,
    /// The data that it is for
    #[arg(long, default_value = "fashion-mnist")]
    data: String,
    /// Samples of a micro-batch
    #[arg(long, default_value_t = 128)]
    pub(super) micro_batch: usize,
    /// A profile that was saved; without it the model is measured here
    #[arg(long)]
    profile: Option<PathBuf>,
    /// Estimates from operation counts instead of measuring
    #[arg(long)]
    deterministic: bool,
}

impl Profiled {
    /// The model, with its loss, and its profile.
    pub(super) fn load(&self) -> Result<(Graph, Profile)> {
        let data = data::by_name(&self.data)?;
        let graph = model_for(&self.model, self.width, &data)?.graph;
        let size = self.micro_batch;
        check_micro_batch(size)?;
        let sizes = [size.div_ceil(4), size.div_ceil(2), size];
        // As `train` has it by default: only the time of an update depends on it.
        let optimizer = Sgd::new(0.01).momentum(0.9);
        let profile = match &self.profile {
            Some(path) => Profile::load(path, &graph)?,
            None if self.deterministic => Profile::estimate(&graph, &optimizer, DType::F32, &sizes)?,
            None => {
                let device = Device::cpu(1)?;
                Profile::measure(&graph, &optimizer, &device, DType::F32, &sizes, 1.0, &mut || Ok(()))?
            }
        };
        Ok((graph, profile))
    }
}

/// More samples than any micro-batch has: what is asked of memory stays in proportion.
const MOST_SAMPLES: usize = 1 << 20;

/// Makes sure that a micro-batch of `size` samples makes sense.
pub(super) fn check_micro_batch(size: usize) -> Result<()> {
    match size {
        1..=MOST_SAMPLES => Ok(()),
        _ => Err(Error::config(format!("micro_batch: 1 to {MOST_SAMPLES} expected, got {size}"))),
    }
}
