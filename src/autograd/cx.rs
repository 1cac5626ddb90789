//! What a forward pass runs in: the values it reads, and the tape it records on.
use super::{
    op::{Mask, Op, Saved, Slot},
    tape::{Path, Tape, Var},
};
use crate::{
    Error, Result,
    tensor::{DType, Device, Philox, Tensor},
};
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

/// Whether layers behave as in training (dropout, batch statistics) or as in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Training.
    Train,
    /// Evaluation and prediction.
    Eval,
}

/// What random numbers of a forward pass are drawn from.
#[derive(Clone, Debug, Default)]
pub struct RunKey {
    /// The seed of the run.
    pub seed: u64,
    /// The number of the optimizer step.
    pub step: u64,
    /// The sample behind each part of axis 0.
    pub samples: Arc<[u64]>,
}

/// A parameter as one node sees it.
#[derive(Clone, Debug)]
pub struct ParamRef {
    /// The version to be read.
    pub tensor: Tensor,
    /// Which parameter it is.
    pub id: usize,
    /// Where its gradient goes in [`Grads`](super::Grads): one slot per parameter and node.
    pub slot: usize,
    /// Whether it is learned; a frozen one costs nothing in the backward pass.
    pub trainable: bool,
}

/// The node whose layer runs now.
#[derive(Clone, Copy, Default)]
pub struct Scope<'a> {
    /// Its name.
    pub node: &'a str,
    /// Its position in the graph.
    pub index: usize,
    /// Its parameters, in the layer's order.
    pub params: &'a [ParamRef],
    /// Its state (running statistics), in the layer's order.
    pub state: &'a [Tensor],
}

/// A statistic that a layer emitted, to be folded into its node's state at the next step.
#[derive(Clone, Debug)]
pub struct Stat {
    /// The node.
    pub node: usize,
    /// Which of its states.
    pub state: usize,
    /// The value seen by this micro-batch.
    pub value: Tensor,
}

/// The context of a forward pass.
pub struct Cx<'a> {
    tape: Option<Tape>,
    serial: u64,
    mode: Mode,
    key: RunKey,
    stash: bool,
    scope: Scope<'a>,
    stats: Vec<Stat>,
}

impl<'a> Cx<'a> {
    /// A context that records for a backward pass.
    pub fn recording(mode: Mode, key: RunKey) -> Cx<'a> {
        static SERIAL: AtomicU64 = AtomicU64::new(1);
        let serial = SERIAL.fetch_add(1, Relaxed);
        Cx { tape: Some(Tape::new(serial)), serial, ..Cx::inference(mode, key) }
    }

    /// A context without a tape.
    pub fn inference(mode: Mode, key: RunKey) -> Cx<'a> {
        Cx { tape: None, serial: 0, mode, key, stash: true, scope: Scope::default(), stats: Vec::new() }
    }

    /// Parameters are not held for the backward pass but looked up then ([`Tape::resolve`]): wrong gradients once a step came
    /// between, for comparison only.
    pub fn without_stashing(mut self) -> Cx<'a> {
        self.stash = false;
        self
    }

    /// Enters a node: what `param`, `state`, `emit_stat` and `rng` refer to from now on.
    pub fn enter(&mut self, scope: Scope<'a>) {
        self.scope = scope;
    }

    /// Training or evaluation.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// A value that is fed: an activation of this tape.
    pub fn input(&mut self, value: Tensor, needs_grad: bool) -> Var {
        let needs_grad = needs_grad && value.dtype().is_float();
        self.var(value, Path::Data, needs_grad)
    }

    /// A value that nothing is learned about.
    pub fn constant(&mut self, value: Tensor) -> Var {
        self.var(value, Path::Const, false)
    }

    fn var(&mut self, value: Tensor, path: Path, needs_grad: bool) -> Var {
        match &mut self.tape {
            Some(tape) => tape.var(value, path, needs_grad),
            None => Var { value, id: 0, tape: 0, path, needs_grad: false, param: None, slot: None },
        }
    }

    /// Parameter `i` of the layer that runs now.
    ///
    /// # Errors
    /// If the layer declared fewer.
    pub fn param(&mut self, i: usize) -> Result<Var> {
        let Scope { node, params, .. } = self.scope;
        let p =
            params.get(i).ok_or_else(|| Error::graph(format!("{node}: parameter {i} of {} declared", params.len())))?;
        Ok(match &mut self.tape {
            Some(tape) if p.trainable => tape.param(p.tensor.clone(), p.slot, p.id),
            Some(tape) => Var { param: Some(p.id), ..tape.var(p.tensor.clone(), Path::Const, false) },
            None => self.var(p.tensor.clone(), Path::Const, false),
        })
    }

    /// A variable that names parameter `i` of the layer that ran last, to ask for its gradient.
    pub(super) fn used_param(&self, i: usize) -> Result<Var> {
        let p = self.scope.params.get(i).ok_or_else(|| Error::graph(format!("there is no parameter {i}")))?;
        Ok(Var {
            value: p.tensor.clone(),
            id: 0,
            tape: self.serial,
            path: Path::Param,
            needs_grad: p.trainable,
            param: Some(p.id),
            slot: Some(p.slot),
        })
    }

    /// State `i` of the node that runs now.
    ///
    /// # Errors
    /// If the layer declared fewer.
    pub fn state(&self, i: usize) -> Result<&'a Tensor> {
        let Scope { node, state, .. } = self.scope;
        state.get(i).ok_or_else(|| Error::graph(format!("{node}: state {i} of {} declared", state.len())))
    }

    /// Emits what this micro-batch says about state `i`; folded in micro-batch order at the next step.
    pub fn emit_stat(&mut self, i: usize, value: Tensor) {
        self.stats.push(Stat { node: self.scope.index, state: i, value });
    }

    /// The stream of random numbers of the node that runs now, at this step, and the samples along axis 0.
    pub fn rng(&self) -> (Philox, Arc<[u64]>) {
        (Philox::new(self.key.seed, self.key.step, self.scope.node), self.key.samples.clone())
    }

    /// The same value as a variable of its own, so that what its consumer sends back is folded as one gradient.
    pub fn alias(&mut self, x: &Var) -> Result<Var> {
        if !x.needs_grad {
            return Ok(x.clone());
        }
        self.record(Alias, &[x], vec![x.value.clone()], &[])?.one()
    }

    /// Records `op` as the maker of `outputs` from `inputs`. Each saved tensor comes with the input gradients that will read
    /// it; it is kept only if one of those is wanted. Outputs that are integers need no gradient.
    ///
    /// # Errors
    /// If an input belongs to another forward pass, or there are more inputs than a [`Mask`] holds.
    pub fn record(
        &mut self,
        op: impl Op,
        inputs: &[&Var],
        outputs: Vec<Tensor>,
        save: &[(&Tensor, Mask)],
    ) -> Result<Outputs> {
        let path = inputs.iter().map(|v| v.path).max().unwrap_or(Path::Const);
        if inputs.len() > Mask::MAX {
            return Err(Error::graph(format!(
                "{}: {} inputs, at most {} are possible",
                op.name(),
                inputs.len(),
                Mask::MAX
            )));
        }
        if inputs.iter().any(|v| v.tape != self.serial) {
            return Err(Error::graph(format!("{}: an input belongs to another forward pass", op.name())));
        }
        let wanted: Mask = (0..inputs.len()).filter(|&i| inputs[i].needs_grad).collect();
        let stash = self.stash;
        let Some(tape) = self.tape.as_mut().filter(|_| !wanted.is_empty()) else {
            return Ok(outputs.into_iter().map(|y| self.var(y, path, false)).collect::<Vec<_>>().into());
        };
        let outputs: Vec<Var> = outputs
            .into_iter()
            .map(|y| {
                let float = y.dtype().is_float();
                tape.var(y, path, float)
            })
            .collect();
        let keep = |(t, need): &(&Tensor, Mask)| {
            let need = need.and(wanted);
            let param = inputs.iter().find(|v| v.param.is_some() && v.value.shares_storage(t)).and_then(|v| v.param);
            let slot = match param {
                Some(id) => Slot::Param { id, stashed: stash.then(|| (*t).clone()) },
                None => Slot::Value((*t).clone()),
            };
            ((!need.is_empty()).then_some(slot), need)
        };
        let saved = Saved::new(save.iter().map(keep).collect());
        tape.push(Box::new(op), inputs, &outputs, path, saved);
        Ok(outputs.into())
    }

    /// A constant filled with `value`, of the type and on the device of `like`.
    pub fn full_like(&mut self, value: f64, shape: &[usize], like: &Var) -> Result<Var> {
        let (dtype, device): (DType, &Device) = (like.value.dtype(), like.value.device());
        let t = Tensor::full(value, shape, dtype, device)?;
        Ok(self.constant(t))
    }

    /// The end of the forward pass: the tape (if one was recorded) and the emitted statistics.
    pub fn finish(self) -> (Option<Tape>, Vec<Stat>) {
        (self.tape, self.stats)
    }
}

/// What an op or a layer returns: one or several values.
#[derive(Clone, Debug)]
pub struct Outputs(Vec<Var>);

impl Outputs {
    /// The only value.
    ///
    /// # Errors
    /// If there are several.
    pub fn one(mut self) -> Result<Var> {
        match (self.0.len(), self.0.pop()) {
            (1, Some(v)) => Ok(v),
            (n, _) => Err(Error::graph(format!("one output expected, there are {n}"))),
        }
    }

    /// All values.
    pub fn all(self) -> Vec<Var> {
        self.0
    }
}

impl From<Var> for Outputs {
    fn from(v: Var) -> Outputs {
        Outputs(vec![v])
    }
}

impl From<Vec<Var>> for Outputs {
    fn from(v: Vec<Var>) -> Outputs {
        Outputs(v)
    }
}

struct Alias;

impl Op for Alias {
    fn name(&self) -> &'static str {
        "alias"
    }
    fn backward(&self, _: &mut Saved, dy: &[Option<Tensor>], _: Mask, dx: &mut super::Sink) -> Result<()> {
        dy[0].iter().try_for_each(|g| dx.put(0, g.clone()))
    }
}
