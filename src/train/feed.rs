//! Cuts minibatches into micro-batches and hands them to a worker.
use crate::{
    Context, Error, Result,
    autograd::RunKey,
    data::Batch,
    layers::{Graph, NodeId, NodeKind},
    pipeline::{schedule::MicroBatch, worker::Feed},
    tensor::{DType, Tensor},
};
use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

/// A minibatch as every worker sees it; only the first stage's has the data.
#[derive(Clone, Debug)]
pub struct Minibatch {
    /// Its number since training began.
    pub number: u64,
    /// The samples.
    pub ids: Vec<u64>,
    /// Their values.
    pub batch: Option<Batch>,
}

/// A micro-batch that has not been forwarded yet.
struct Piece {
    key: RunKey,
    sources: HashMap<NodeId, Tensor>,
}

/// Micro-batches by number, from a minibatch's arrival to its forward pass.
pub struct Pieces {
    graph: Arc<Graph>,
    seed: u64,
    dtype: DType,
    /// For each stage on this worker: which replica it is, of how many.
    replicas: Vec<(usize, usize)>,
    /// Samples of the micro-batches since the pipeline was last empty.
    samples: Vec<usize>,
    waiting: BTreeMap<MicroBatch, Piece>,
}

impl Pieces {
    /// Nothing yet. `replicas` tells for each stage on this worker which replica it is, of how many.
    pub fn new(graph: Arc<Graph>, seed: u64, dtype: DType, replicas: Vec<(usize, usize)>) -> Pieces {
        Pieces { graph, seed, dtype, replicas, samples: Vec::new(), waiting: BTreeMap::new() }
    }

    /// The pipeline is empty; micro-batches are numbered from 0 again.
    pub fn restart(&mut self) {
        self.samples.clear();
    }

    /// Whether micro-batch `mb` is worked on here.
    fn is_here(&self, mb: MicroBatch) -> bool {
        self.replicas.iter().any(|&(replica, of)| mb % of == replica)
    }

    /// Cuts a minibatch into micro-batches of at most `size` samples, numbered from `first`; returns their number. Only inputs
    /// among the `wanted` nodes are read (`None`: all).
    ///
    /// # Errors
    /// If a field that the graph reads is missing or has another shape.
    pub fn add(
        &mut self,
        minibatch: &Minibatch,
        first: MicroBatch,
        size: usize,
        wanted: Option<&[bool]>,
    ) -> Result<usize> {
        let whole = match &minibatch.batch {
            Some(batch) => Some(self.whole(batch, wanted).context(|| format!("minibatch {}", minibatch.number))?),
            None => None,
        };
        let mut count = 0;
        for (i, ids) in minibatch.ids.chunks(size.max(1)).enumerate() {
            count += 1;
            self.samples.resize(self.samples.len().max(first + i + 1), 0);
            self.samples[first + i] = ids.len();
            if !self.is_here(first + i) {
                continue;
            }
            let mut sources = HashMap::new();
            for (&node, t) in whole.iter().flatten() {
                let is_total = matches!(self.graph.nodes()[node].kind, NodeKind::Total);
                sources.insert(node, if is_total { t.clone() } else { t.slice(0, i * size, ids.len())? });
            }
            let key = RunKey { seed: self.seed, step: minibatch.number, samples: ids.into() };
            self.waiting.insert(first + i, Piece { key, sources });
        }
        Ok(count)
    }

    /// The values of the graph's inputs for a whole minibatch, and its total weight.
    fn whole(&self, batch: &Batch, wanted: Option<&[bool]>) -> Result<HashMap<NodeId, Tensor>> {
        let mut sources = HashMap::new();
        let is_wanted = |n: NodeId| wanted.is_none_or(|w| w.get(n).copied().unwrap_or(false));
        for (n, node) in self.graph.nodes().iter().enumerate() {
            if !matches!(node.kind, NodeKind::Input) || !is_wanted(n) {
                continue;
            }
            let t = batch.field(&node.name)?;
            let value = crate::layers::Value { node: n, output: 0 };
            let (dtype, shape) = self.graph.shape(value, batch.len(), self.dtype);
            if t.shape() != shape || t.dtype().is_float() != dtype.is_float() {
                return Err(Error::data(format!("field {:?}: {dtype}{shape:?} expected, got {t:?}", node.name)));
            }
            sources.insert(n, t.cast(dtype)?);
        }
        if let (Some(loss), Some(total)) = (self.graph.loss_node(), self.graph.total_node().filter(|&n| is_wanted(n))) {
            let target = self.graph.nodes()[loss].inputs.get(1).and_then(|v| sources.get(&v.node));
            let target = target.ok_or_else(|| Error::graph("the loss has no target"))?;
            let loss = self.graph.loss(loss).ok_or_else(|| Error::graph("the loss is no loss"))?;
            let weight = loss.weight(target)?;
            sources.insert(total, Tensor::from_host(&[weight], &[1], target.device())?);
        }
        Ok(sources)
    }
}

impl Feed for Pieces {
    fn key(&mut self, mb: MicroBatch) -> Result<RunKey> {
        let piece =
            self.waiting.get_mut(&mb).ok_or_else(|| Error::schedule(format!("micro-batch {mb} was not fed")))?;
        Ok(piece.key.clone())
    }

    fn sources(&mut self, mb: MicroBatch) -> Result<HashMap<NodeId, Tensor>> {
        let piece =
            self.waiting.get_mut(&mb).ok_or_else(|| Error::schedule(format!("micro-batch {mb} was not fed")))?;
        Ok(std::mem::take(&mut piece.sources))
    }

    fn done(&mut self, mb: MicroBatch) {
        self.waiting.remove(&mb);
    }

    fn samples(&self, mb: MicroBatch) -> Option<usize> {
        self.samples.get(mb).copied()
    }
}
