//! The weights of a stage and their versions.
//!
//! A stash is a reference: the tape of a micro-batch in flight holds the very tensors that its forward pass read, so a step
//! that comes before its backward pass writes the new version into a fresh pooled buffer, and one that comes after writes in
//! place. Nothing is copied, and memory is used only for versions that are really needed.
use super::schedule::{Read, Version};
use crate::{
    Context, Error, Result,
    autograd::{Grads, ParamRef},
    layers::{Graph, NodeId, ParamId},
    memory,
    optim::Optimizer,
    tensor::{DType, Device, Tensor},
};
use std::collections::{BTreeMap, HashSet};

/// One parameter as a stage holds it.
pub struct Weight {
    /// Which parameter of the graph it is.
    pub id: ParamId,
    /// Its name in checkpoints.
    pub name: String,
    /// The newest version.
    pub tensor: Tensor,
    /// The optimizer's tensors for it; none if it is frozen.
    pub state: Vec<Tensor>,
    /// Its gradient slots, one per node that uses it, in the order of the graph.
    slots: Vec<usize>,
    trainable: bool,
}

impl Weight {
    /// Its gradient slots, one per node that uses it.
    pub fn slots(&self) -> &[usize] {
        &self.slots
    }

    /// Whether gradients change it.
    pub fn is_learned(&self) -> bool {
        self.trainable
    }
}

/// One node's use of a learned parameter: where its gradient is folded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Its number in [`Grads`].
    pub slot: usize,
    /// The parameter's shape.
    pub shape: Vec<usize>,
}

/// All parameters of a stage.
pub struct Weights {
    held: Vec<Weight>,
    /// For each node of the stage: (position in `held`, slot) of its parameters.
    uses: BTreeMap<NodeId, Vec<(usize, usize)>>,
    /// Updates since the pipeline was last empty.
    version: Version,
    /// Older versions that a forward pass will still read.
    kept: BTreeMap<Version, Vec<Tensor>>,
    /// Minibatches since training began.
    minibatches: u64,
}

/// How an update of a stage relates to minibatches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pace {
    /// Minibatches that it is made for.
    pub minibatches: u64,
    /// Minibatches that an update is made for if no run ends meanwhile.
    pub round: u64,
    /// What the learning rate is multiplied by.
    pub factor: f64,
}

impl Default for Pace {
    /// An update for every minibatch.
    fn default() -> Pace {
        Pace { minibatches: 1, round: 1, factor: 1.0 }
    }
}

/// Makes sure that this machine has memory for the parameters of `nodes` and the optimizer's state for them.
///
/// # Errors
/// With what they take and what there is.
pub fn check_memory(graph: &Graph, nodes: &[NodeId], optimizer: &dyn Optimizer, dtype: DType) -> Result<()> {
    let ids: HashSet<ParamId> = nodes.iter().flat_map(|&n| graph.nodes()[n].params.iter().copied()).collect();
    let copies = |trainable: bool| 1 + if trainable { optimizer.state().len() } else { 0 };
    let specs = ids.iter().map(|&id| &graph.params()[id].spec);
    let elements = specs.map(|s| memory::elements(&s.shape).saturating_mul(copies(s.trainable) as u128));
    let bytes = elements.fold(0, u128::saturating_add).saturating_mul(dtype.size() as u128);
    memory::check(|| format!("{} parameters with the optimizer's state for them", ids.len()), bytes)
}

impl Weights {
    /// The first version of the parameters of `nodes`, and the optimizer's state at zero.
    ///
    /// # Errors
    /// If this machine has no memory for them, or the device refuses a shape.
    pub fn new(
        graph: &Graph,
        nodes: &[NodeId],
        optimizer: &dyn Optimizer,
        seed: u64,
        dtype: DType,
        device: &Device,
    ) -> Result<Weights> {
        if device.backend().has_data() {
            check_memory(graph, nodes, optimizer, dtype)?;
        }
        let (mut held, mut uses): (Vec<Weight>, BTreeMap<_, Vec<_>>) = Default::default();
        let mut slots = 0;
        for &node in nodes {
            for &id in &graph.nodes()[node].params {
                let at = match held.iter().position(|w| w.id == id) {
                    Some(at) => at,
                    None => {
                        let param = &graph.params()[id];
                        let tensor = graph.init_param(id, seed, dtype, device)?;
                        let count = if param.spec.trainable { optimizer.state().len() } else { 0 };
                        let state =
                            (0..count).map(|_| Tensor::zeros(tensor.shape(), dtype, device)).collect::<Result<_>>()?;
                        held.push(Weight {
                            id,
                            name: param.name.clone(),
                            tensor,
                            state,
                            slots: Vec::new(),
                            trainable: param.spec.trainable,
                        });
                        held.len() - 1
                    }
                };
                held[at].slots.push(slots);
                uses.entry(node).or_default().push((at, slots));
                slots += 1;
            }
        }
        Ok(Weights { held, uses, version: 0, kept: BTreeMap::new(), minibatches: 0 })
    }

    /// The parameters, in the order of their first use.
    pub fn held(&self) -> &[Weight] {
        &self.held
    }

    /// The parameters, to be loaded from a checkpoint.
    pub fn held_mut(&mut self) -> &mut [Weight] {
        &mut self.held
    }

    /// The uses of learned parameters, in the order of the graph.
    pub fn slots(&self) -> Vec<Slot> {
        let of_weight = |w: &Weight| {
            let shape = w.tensor.shape().to_vec();
            w.slots.clone().into_iter().map(move |slot| Slot { slot, shape: shape.clone() })
        };
        let mut slots: Vec<Slot> = self.held.iter().filter(|w| w.trainable).flat_map(of_weight).collect();
        slots.sort_by_key(|s| s.slot);
        slots
    }

    /// Minibatches that updates were made for since training began.
    pub fn minibatches(&self) -> u64 {
        self.minibatches
    }

    /// Goes on from a checkpoint.
    pub fn set_minibatches(&mut self, minibatches: u64) {
        self.minibatches = minibatches;
    }

    /// Updates since the pipeline was last empty.
    pub fn version(&self) -> Version {
        self.version
    }

    /// The pipeline is empty: versions are counted anew.
    pub fn restart(&mut self) -> Result<()> {
        if !self.kept.is_empty() {
            return Err(Error::schedule(format!("versions {:?} were kept and never freed", self.kept.keys())));
        }
        self.version = 0;
        Ok(())
    }

    /// What the nodes read at version `read`, by node.
    ///
    /// # Errors
    /// If that version is not held.
    pub fn read(&self, read: Read) -> Result<BTreeMap<NodeId, Vec<ParamRef>>> {
        let older = match read {
            Read::At(v) if v != self.version => {
                let kept = self.kept.get(&v);
                Some(kept.ok_or_else(|| {
                    Error::schedule(format!("version {v} is not held; the newest is {}", self.version))
                })?)
            }
            _ => None,
        };
        let param = |&(at, slot): &(usize, usize)| {
            let w = &self.held[at];
            let tensor = older.map_or(&w.tensor, |o| &o[at]).clone();
            ParamRef { tensor, id: w.id, slot, trainable: w.trainable }
        };
        Ok(self.uses.iter().map(|(&node, params)| (node, params.iter().map(param).collect())).collect())
    }

    /// The newest version of parameter `id`.
    pub fn current(&self, id: ParamId) -> Option<Tensor> {
        self.held.iter().find(|w| w.id == id).map(|w| w.tensor.clone())
    }

    /// One update of every learned parameter: its gradient is the fold over the nodes that use it, in the order of the graph.
    /// With `keep` the old version stays readable.
    pub fn step(&mut self, optimizer: &dyn Optimizer, grads: Grads, pace: Pace, keep: bool) -> Result<()> {
        let rate = optimizer.rate(self.minibatches) * pace.factor;
        let update = self.minibatches.div_ceil(pace.round);
        if keep {
            self.kept.insert(self.version, self.held.iter().map(|w| w.tensor.clone()).collect());
        }
        let grads = self.of_weights(grads)?;
        for (w, grad) in self.held.iter_mut().zip(grads) {
            if let Some(g) = grad {
                optimizer.update(update, rate, &mut w.tensor, &g, &mut w.state).context(|| w.name.clone())?;
            }
        }
        self.version += 1;
        self.minibatches += pace.minibatches;
        Ok(())
    }

    /// The gradient of each learned parameter: the fold over the nodes that use it, in the order of the graph.
    pub fn of_weights(&self, mut grads: Grads) -> Result<Vec<Option<Tensor>>> {
        let of = |w: &Weight| {
            let mut sum: Option<Tensor> = None;
            for g in w.slots.iter().filter(|_| w.trainable).filter_map(|&s| grads.take(s)) {
                match &mut sum {
                    None => sum = Some(g),
                    Some(sum) => sum.accumulate(&g)?,
                }
            }
            Ok(sum)
        };
        self.held.iter().map(of).collect()
    }

    /// Update `number` (from 0) of the parameter at this position alone.
    pub fn update_one(&mut self, at: usize, optimizer: &dyn Optimizer, grad: &Tensor, number: u64) -> Result<()> {
        let w = self.at(at)?;
        optimizer.update(number, optimizer.rate(number), &mut w.tensor, grad, &mut w.state).context(|| w.name.clone())
    }

    /// Another worker has updated the parameter at this position.
    pub fn replace(&mut self, at: usize, tensor: Tensor) -> Result<()> {
        self.at(at)?.tensor = tensor;
        Ok(())
    }

    /// A parameter and the optimizer's tensors for it.
    pub fn tensors_mut(&mut self, at: usize) -> impl Iterator<Item = &mut Tensor> {
        self.held.get_mut(at).into_iter().flat_map(|w| [&mut w.tensor].into_iter().chain(&mut w.state))
    }

    fn at(&mut self, at: usize) -> Result<&mut Weight> {
        self.held.get_mut(at).ok_or_else(|| Error::schedule(format!("the stage has no parameter number {at}")))
    }

    /// Counts an update that was made parameter by parameter.
    pub fn count_update(&mut self) {
        self.version += 1;
    }

    /// Drops a kept version.
    ///
    /// # Errors
    /// If it is not held.
    pub fn free(&mut self, version: Version) -> Result<()> {
        match self.kept.remove(&version) {
            Some(_) => Ok(()),
            None => Err(Error::schedule(format!("version {version} is freed but was not kept"))),
        }
    }

    /// How many versions of any one parameter are held at most: the newest, the kept ones, and those that `stashed` (the
    /// tapes in flight) hold.
    pub fn versions<'a>(&'a self, stashed: impl Iterator<Item = (ParamId, &'a Tensor)>) -> usize {
        let mut seen: BTreeMap<ParamId, HashSet<usize>> = BTreeMap::new();
        let kept = self.kept.values().flat_map(|v| self.held.iter().map(|w| w.id).zip(v));
        let newest = self.held.iter().map(|w| (w.id, &w.tensor));
        for (id, t) in stashed.chain(kept).chain(newest) {
            seen.entry(id).or_default().insert(t.storage_id());
        }
        seen.values().map(HashSet::len).max().unwrap_or(0)
    }
}
