//! The model that a command is about, and its profile.
use super::train::model_for;
use crate::{
    Error, Result, data,
    layers::Graph,
    optim::Sgd,
    pipeline::profile::Profile,
    tensor::{DType, Device, Machine},
};
use std::path::PathBuf;

#[derive(clap::Args)]
pub(super) struct Subject {
    /// The model: mlp, lenet, vgg16, resnet18, gpt or lstm
    #[arg(long, default_value = "lenet")]
    model: String,
    /// Width of the model's hidden layers
    #[arg(long)]
    width: Option<usize>,
    /// The data that it is for
    #[arg(long, default_value = "fashion-mnist")]
    data: String,
    /// Estimates from operation counts instead of measuring
    #[arg(long)]
    deterministic: bool,
    #[command(flatten)]
    machine: MachineOptions,
}

/// A device by its rates, whose profile is computed from them instead of measured.
#[derive(clap::Args)]
struct MachineOptions {
    /// Floating-point operations per second of a device: the profile is computed for it instead of measured
    #[arg(long, requires = "device_bandwidth", conflicts_with = "deterministic")]
    device_flops: Option<f64>,
    /// Bytes per second between its kernels and its memory
    #[arg(long, requires = "device_flops")]
    device_bandwidth: Option<f64>,
    /// Seconds that each of its kernels takes beyond its work
    #[arg(long, requires = "device_flops", default_value_t = 0.0)]
    device_latency: f64,
}

impl MachineOptions {
    fn machine(&self) -> Option<Machine> {
        let (flops, bandwidth) = (self.device_flops?, self.device_bandwidth?);
        Some(Machine { flops, bandwidth, latency: self.device_latency })
    }
}

impl Subject {
    /// The model, with its loss.
    pub(super) fn graph(&self) -> Result<Graph> {
        Ok(model_for(&self.model, self.width, &data::by_name(&self.data)?)?.graph)
    }

    /// Its profile with micro-batches of these sizes, taken here.
    pub(super) fn profile(&self, graph: &Graph, sizes: &[usize], threads: usize) -> Result<Profile> {
        sizes.iter().try_for_each(|&size| check_micro_batch(size))?;
        // As `train` has it by default: only the time of an update depends on it.
        let optimizer = Sgd::new(0.01).momentum(0.9);
        if let Some(machine) = self.machine.machine() {
            return Profile::analytic(graph, &optimizer, DType::F32, sizes, machine);
        }
        if self.deterministic {
            return Profile::estimate(graph, &optimizer, DType::F32, sizes);
        }
        Profile::measure(graph, &optimizer, &Device::cpu(threads)?, DType::F32, sizes, 1.0, &mut || Ok(()))
    }
}

#[derive(clap::Args)]
pub(super) struct Profiled {
    #[command(flatten)]
    subject: Subject,
    /// Samples of a micro-batch
    #[arg(long, default_value_t = 128)]
    pub(super) micro_batch: usize,
    /// A profile that was saved; without it the model is measured here
    #[arg(long, conflicts_with = "device_flops")]
    pub(super) profile: Option<PathBuf>,
}

impl Profiled {
    /// The model, with its loss, and its profile.
    pub(super) fn load(&self) -> Result<(Graph, Profile)> {
        check_micro_batch(self.micro_batch)?;
        let graph = self.subject.graph()?;
        let profile = match &self.profile {
            Some(path) => Profile::load(path, &graph)?,
            None => {
                let sizes = Profile::sizes(&graph, DType::F32, self.micro_batch);
                self.subject.profile(&graph, &sizes, 1)?
            }
        };
        Ok((graph, profile))
    }
}

/// More samples than any micro-batch has: what is asked of memory stays in proportion.
const MOST_SAMPLES: usize = 1 << 20;

/// Makes sure that a micro-batch of `size` samples makes sense.
fn check_micro_batch(size: usize) -> Result<()> {
    match size {
        1..=MOST_SAMPLES => Ok(()),
        _ => Err(Error::config(format!("micro_batch: 1 to {MOST_SAMPLES} expected, got {size}"))),
    }
}
