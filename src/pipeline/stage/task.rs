//! What a stage is given, and what it gives.
use crate::{
    Result,
    autograd::{Mode, RunKey},
    layers::{Graph, NodeId, Value},
    optim::Optimizer,
    pipeline::{
        plan::{Edge, Plan},
        reduce::{AllReduce, Compression, Means, Reducer},
        schedule::{MicroBatch, WeightPolicy},
        transport::Transport,
        weights::Slot,
    },
    tensor::{DType, Device, Tensor},
};
use std::{collections::HashMap, sync::Arc};

/// The edges that end and begin at a stage, with their positions in the plan.
#[derive(Clone, Debug, Default)]
pub struct Ports {
    pub(super) inputs: Vec<(usize, Edge)>,
    pub(super) outputs: Vec<(usize, Edge)>,
}

impl Ports {
    /// The edges of `stage` in `plan`.
    pub fn new(plan: &Plan, stage: usize) -> Ports {
        let of = |end: fn(&Edge) -> usize| {
            plan.edges().iter().cloned().enumerate().filter(|(_, e)| end(e) == stage).collect()
        };
        Ports { inputs: of(|e| e.to), outputs: of(|e| e.from) }
    }

    /// Positions of the edges that end here.
    pub fn inputs(&self) -> impl Iterator<Item = usize> {
        self.inputs.iter().map(|(i, _)| *i)
    }

    /// Positions of the edges that begin here.
    pub fn outputs(&self) -> impl Iterator<Item = usize> {
        self.outputs.iter().map(|(i, _)| *i)
    }
}

/// What the loss said about a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Measured {
    /// The micro-batch.
    pub mb: MicroBatch,
    /// The sum of the losses of its samples.
    pub loss: f64,
    /// The total weight of its minibatch.
    pub total: f64,
    /// Right answers, where the loss counts them.
    pub correct: Option<f64>,
}

/// How B reaches the other workers of its stage.
pub struct Wire<'a> {
    /// The messages.
    pub transport: &'a mut dyn Transport,
    /// The samples of its micro-batch.
    pub samples: usize,
}

/// What a forward pass leaves beside its flight.
pub struct Forward {
    /// The values that go to other stages, by the position of the edge.
    pub sends: Vec<(usize, Tensor)>,
    /// What the loss measured, on the stage that has it.
    pub measured: Option<Measured>,
    /// Values that were asked for.
    pub asked: Vec<(Value, Tensor)>,
}

/// What a forward pass is to do.
pub struct Task<'a> {
    /// Training or evaluation.
    pub mode: Mode,
    /// What random numbers are drawn from.
    pub key: RunKey,
    /// The edges.
    pub ports: &'a Ports,
    /// The graph's inputs, on the first stage.
    pub sources: HashMap<NodeId, Tensor>,
    /// What came over the edges that end here, by position.
    pub arrived: HashMap<usize, Tensor>,
    /// Nodes to run; all if `None`.
    pub wanted: Option<&'a [bool]>,
    /// Values to hand out.
    pub ask: &'a [Value],
}

/// What every stage of a run has in common.
#[derive(Clone)]
pub struct Setup {
    /// The model.
    pub graph: Arc<Graph>,
    /// How weights follow gradients.
    pub optimizer: Arc<dyn Optimizer>,
    /// Which weights a backward pass uses.
    pub policy: WeightPolicy,
    /// The seed of the run.
    pub seed: u64,
    /// The floating-point type it computes in.
    pub dtype: DType,
    /// Whether a stage on R workers makes an update for every R minibatches, with their mean gradient (1F1B-RR).
    pub rounds: bool,
    /// Whether its learning rate is then multiplied by R / the workers of the first stage.
    pub scale_rate: bool,
    /// Whether a synchronous run on several workers a stage gives the bits of one worker.
    pub deterministic: bool,
    /// How the workers of a stage add up their gradients.
    pub all_reduce: AllReduce,
    /// What they send of them.
    pub compression: Compression,
    /// Whether the gradient of each worker of a stage makes an update of its own, without waiting for those of the others.
    pub asp: bool,
    /// The host of each worker; one of which nothing is said is on host 0.
    pub hosts: Vec<usize>,
}

impl Setup {
    /// The host of a worker.
    fn host(&self, worker: usize) -> usize {
        self.hosts.get(worker).copied().unwrap_or(0)
    }

    /// Whether the gradients of micro-batches stay apart until they are summed over the workers of a stage.
    pub(super) fn keeps_apart(&self) -> bool {
        self.deterministic && !self.rounds && !matches!(self.compression, Compression::PowerSgd { .. })
    }

    /// One worker's side of the sums of a stage: number `me` of its `workers`.
    ///
    /// # Errors
    /// If its gradients cannot be added up so on these workers, or there is no memory.
    pub(in crate::pipeline) fn reducer(
        &self,
        (stage, workers, me): (usize, &[usize], usize),
        slots: &[Slot],
        device: &Device,
    ) -> Result<Reducer> {
        let hosts: Vec<usize> = workers.iter().map(|&w| self.host(w)).collect();
        Reducer::new((stage, workers, me), &hosts, self.means(), slots, self.dtype, device)
    }

    /// How gradients are brought together.
    fn means(&self) -> Means {
        let Setup { all_reduce, compression, rounds: mean, deterministic: in_order, seed, .. } = *self;
        Means { all_reduce, compression, mean, in_order, seed }
    }
}
