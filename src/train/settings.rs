//! What a run is told, apart from the model and the data.
use crate::{
    Error, Result,
    layers::Graph,
    optim::Optimizer,
    pipeline::{
        plan::Plan,
        reduce::{AllReduce, Compression},
        schedule::Kind,
        stage::Setup,
    },
    tensor::{DType, MOST_THREADS},
};
use std::{path::PathBuf, sync::Arc};

/// How the model is cut into stages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlanChoice {
    /// By the planner, into as many stages as there are workers, from a measured (or, deterministic, an estimated) profile.
    Auto,
    /// Before these nodes.
    Cuts(Vec<String>),
    /// As a file says.
    File(PathBuf),
    /// As it was before, on resuming, on the ranks there are now.
    Given(Plan),
    /// By the planner, which also chooses how many workers hold each stage.
    Best,
    /// By the planner, into stages of so many workers each.
    Replicas(Vec<usize>),
}

/// The settings of a run. The defaults are those of the command line.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The schedule.
    pub schedule: Kind,
    /// Samples of a minibatch.
    pub batch: usize,
    /// Micro-batches that a synchronous schedule cuts a minibatch into; never derived from the number of workers.
    pub micro_batches: usize,
    /// The seed of initialisation, shuffling, augmentation and dropout.
    pub seed: u64,
    /// The floating-point type of weights and activations: `F32` or `F64`.
    pub dtype: DType,
    /// Threads of each worker's kernels.
    pub threads: usize,
    /// Plans from operation counts instead of the clock, so that a run can be repeated bit for bit.
    pub deterministic: bool,
    /// Whether the learning rate of a stage on R workers is multiplied by R / the workers of the first stage, where it makes one
    /// update for R minibatches (asynchronous schedules; Narayanan et al. 2019).
    pub scale_rate: bool,
    /// How the workers of a stage add up their gradients.
    pub all_reduce: AllReduce,
    /// What they send of them to each other.
    pub compress_gradients: Compression,
    /// Whether values that have a gradient, and their gradients, travel between stages rounded to `BF16`.
    pub compress_edges: bool,
    /// Whether the gradient of each worker makes an update of its own, without waiting for those of the others (ASP): data parallelism
    /// with stale gradients, for comparison.
    pub asp: bool,
    /// Whether convolutions may take 4 products for 9: see [`CpuOptions`](crate::tensor::CpuOptions).
    pub winograd: bool,
    /// How the model is cut.
    pub plan: PlanChoice,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            schedule: Kind::PipeDream,
            batch: 128,
            micro_batches: 8,
            seed: 1,
            dtype: DType::F32,
            threads: 1,
            deterministic: false,
            scale_rate: true,
            all_reduce: AllReduce::Auto,
            compress_gradients: Compression::None,
            compress_edges: false,
            asp: false,
            winograd: true,
            plan: PlanChoice::Auto,
        }
    }
}

impl Settings {
    /// The most samples of a micro-batch: ⌈batch / micro-batches⌉ of a synchronous schedule, the whole minibatch of an
    /// asynchronous one.
    pub fn micro_batch(&self) -> usize {
        if self.schedule.is_synchronous() { self.batch.div_ceil(self.micro_batches) } else { self.batch }
    }

    /// What values that have a gradient travel as between stages.
    pub fn wire(&self) -> DType {
        if self.compress_edges { DType::BF16 } else { self.dtype }
    }

    /// # Errors
    /// A value that makes no sense, by name.
    pub fn check(&self) -> Result<()> {
        let positive = [("batch", self.batch), ("micro_batches", self.micro_batches), ("threads", self.threads)];
        if let Some((name, _)) = positive.iter().find(|(_, n)| *n == 0) {
            return Err(Error::config(format!("{name}: 1 or more expected, got 0")));
        }
        if self.threads > MOST_THREADS {
            return Err(Error::config(format!("threads: at most {MOST_THREADS} expected, got {}", self.threads)));
        }
        let waits = [
            (self.schedule != Kind::PipeDream, format!("the schedule pipedream expected, got {}", self.schedule)),
            (self.deterministic, "what it gives depends on the clock, it cannot be deterministic".into()),
            (self.compress_gradients != Compression::None, "it sends gradients as they are, not compressed".into()),
            (self.all_reduce != AllReduce::Auto, "it has no all_reduce".into()),
        ];
        if let Some((_, why)) = waits.iter().find(|(wrong, _)| self.asp && *wrong) {
            return Err(Error::config(format!("asp: {why}")));
        }
        if !matches!(self.dtype, DType::F32 | DType::F64) {
            return Err(Error::config(format!("dtype: f32 or f64 expected, got {}", self.dtype)));
        }
        Ok(())
    }
}

/// A model with all that it is trained by.
#[derive(Clone)]
pub struct Recipe {
    /// The model, with its loss.
    pub graph: Arc<Graph>,
    /// How weights follow gradients.
    pub optimizer: Arc<dyn Optimizer>,
    /// The rest.
    pub settings: Settings,
}

impl Recipe {
    /// What every stage has in common, on workers that are on these hosts.
    pub fn setup(&self, hosts: Vec<usize>) -> Setup {
        Setup {
            graph: self.graph.clone(),
            optimizer: self.optimizer.clone(),
            policy: self.settings.schedule.weights(),
            seed: self.settings.seed,
            dtype: self.settings.dtype,
            rounds: !self.settings.schedule.is_synchronous(),
            scale_rate: self.settings.scale_rate,
            deterministic: self.settings.deterministic,
            all_reduce: self.settings.all_reduce,
            compression: self.settings.compress_gradients,
            asp: self.settings.asp,
            hosts,
        }
    }
}
