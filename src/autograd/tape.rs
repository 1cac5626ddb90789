//! The tape: what a forward pass recorded, consumed by its backward pass.
use super::op::{Mask, Op, Saved, Sink, fold};
use crate::{Context, Error, Result, tensor::Tensor};
use std::collections::HashSet;

pub(super) type VarId = usize;

/// What a value depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Path {
    /// Nothing that is learned or fed.
    Const,
    /// Parameters only: its gradient is the business of W.
    Param,
    /// The input of the stage: an activation, also where the input itself needs no gradient, so that I and W share the work
    /// in the same way in every stage.
    Data,
}

/// A value during the forward pass.
#[derive(Clone, Debug)]
pub struct Var {
    pub(super) value: Tensor,
    pub(super) id: VarId,
    pub(super) tape: u64,
    pub(super) path: Path,
    pub(super) needs_grad: bool,
    pub(super) param: Option<usize>,
    pub(super) slot: Option<usize>,
}

impl Var {
    /// The value.
    pub fn value(&self) -> &Tensor {
        &self.value
    }

    /// The length of each axis.
    pub fn shape(&self) -> &[usize] {
        self.value.shape()
    }

    /// Where the gradient of this parameter goes.
    pub(super) fn slot(&self) -> Option<usize> {
        self.slot
    }

    /// The same variable without its data: to name it at the backward pass without holding its memory until then.
    pub(crate) fn without_value(&self) -> Var {
        Var { value: self.value.shape_only(), ..self.clone() }
    }

    /// Whether a gradient will be asked for it.
    pub fn needs_grad(&self) -> bool {
        self.needs_grad
    }
}

struct Input {
    path: Path,
    needs_grad: bool,
}

struct Node {
    op: Box<dyn Op>,
    inputs: Vec<Input>,
    ids: Vec<VarId>,
    outputs: Vec<VarId>,
    path: Path,
    saved: Saved,
}

impl Node {
    /// The inputs of kind `path` whose gradient is wanted.
    fn wanted(&self, path: Path) -> Mask {
        self.inputs.iter().enumerate().filter(|(_, i)| i.needs_grad && i.path == path).map(|(i, _)| i).collect()
    }

    fn backward(&mut self, dy: &[Option<Tensor>], wrt: Mask, grads: &mut [Option<Tensor>]) -> Result<()> {
        let mut sink = Sink { inputs: &self.ids, wrt, grads };
        let done = self.op.backward(&mut self.saved, dy, wrt, &mut sink);
        self.saved.release(wrt);
        done.context(|| format!("backward of {}", self.op.name()))
    }
}

/// The record of one forward pass. Backward consumes it: a second one does not compile.
pub struct Tape {
    serial: u64,
    nodes: Vec<Node>,
    vars: usize,
    /// Variables that stand for a parameter's use in one node.
    params: Vec<(VarId, usize)>,
}

impl Tape {
    pub(super) fn new(serial: u64) -> Tape {
        Tape { serial, nodes: Vec::new(), vars: 0, params: Vec::new() }
    }

    pub(super) fn var(&mut self, value: Tensor, path: Path, needs_grad: bool) -> Var {
        self.vars += 1;
        Var { value, id: self.vars - 1, tape: self.serial, path, needs_grad, param: None, slot: None }
    }

    pub(super) fn param(&mut self, value: Tensor, slot: usize, id: usize) -> Var {
        let var = self.var(value, Path::Param, true);
        self.params.push((var.id, slot));
        Var { param: Some(id), slot: Some(slot), ..var }
    }

    pub(super) fn push(&mut self, op: Box<dyn Op>, inputs: &[&Var], outputs: &[Var], path: Path, saved: Saved) {
        self.nodes.push(Node {
            op,
            ids: inputs.iter().map(|v| v.id).collect(),
            inputs: inputs.iter().map(|v| Input { path: v.path, needs_grad: v.needs_grad }).collect(),
            outputs: outputs.iter().map(|v| v.id).collect(),
            path,
            saved,
        });
    }

    /// Bytes of the tensors kept for the backward pass, parameters left out and shared memory counted once.
    pub fn saved_bytes(&self) -> usize {
        let params = self.stashed().map(|(_, t)| t.storage_id()).collect();
        saved_bytes(self.nodes.iter().map(|n| &n.saved), params)
    }

    /// The parameters (by the ids that the context was given) whose memory the tape holds: a stashed version.
    pub fn stashed(&self) -> impl Iterator<Item = (usize, &Tensor)> {
        self.nodes.iter().flat_map(|n| n.saved.params())
    }

    /// Looks up the parameters that were recorded without stashing.
    pub fn resolve(&mut self, current: &dyn Fn(usize) -> Option<Tensor>) {
        self.nodes.iter_mut().for_each(|n| n.saved.resolve(current));
    }

    /// B: the gradients of the inputs, and those of the parameters, added to `out`.
    pub fn backward(self, seeds: &[(&Var, Tensor)], out: &mut Grads) -> Result<InputGrads> {
        self.backward_telling(seeds, out, &mut |_, _| Ok(()))
    }

    /// The same, and tells of every parameter's gradient, by its slot and as it then is in `out`, as soon as it is complete.
    pub fn backward_telling(self, seeds: &[(&Var, Tensor)], out: &mut Grads, made: Made) -> Result<InputGrads> {
        let (inputs, weights) = self.walk(seeds, Some((&mut *out, &mut *made)))?;
        weights.run_telling(out, made)?;
        Ok(inputs)
    }

    /// I: the gradients of the inputs now, and what is left to do for the parameters.
    pub fn backward_input(self, seeds: &[(&Var, Tensor)]) -> Result<(InputGrads, WeightPass)> {
        self.walk(seeds, None)
    }

    /// For each node, of those that are gone through last to first, the parameters that no node before it uses.
    fn completed_at(&self) -> Vec<Vec<(VarId, usize)>> {
        let mut first = vec![None; self.vars];
        for (at, node) in self.nodes.iter().enumerate() {
            for &id in &node.ids {
                // Those nodes are left for the end.
                let at = if node.path == Path::Param { usize::MAX } else { at };
                first[id] =
                    first[id].map_or(Some(at), |before: usize| Some(if at == usize::MAX { at } else { before }));
            }
        }
        let mut completed = vec![Vec::new(); self.nodes.len()];
        for &(id, slot) in &self.params {
            if let Some(at) = first[id].and_then(|at| completed.get_mut(at)) {
                at.push((id, slot));
            }
        }
        completed
    }

    /// With somewhere to put the parameters' gradients these are computed too.
    fn walk(
        self,
        seeds: &[(&Var, Tensor)],
        mut weights: Option<(&mut Grads, Made)>,
    ) -> Result<(InputGrads, WeightPass)> {
        let split = weights.is_none();
        let completed = if split { Vec::new() } else { self.completed_at() };
        let mut grads: Vec<Option<Tensor>> = vec![None; self.vars];
        for (var, seed) in seeds {
            if var.tape != self.serial {
                return Err(Error::graph("backward: a variable of another forward pass"));
            }
            if var.shape() != seed.shape() || var.value.dtype() != seed.dtype() {
                return Err(Error::shape(format!("backward: seed {seed:?} for a value of shape {:?}", var.shape())));
            }
            if var.needs_grad {
                fold(&mut grads[var.id], seed.clone())?;
            }
        }
        let (mut later, mut of_params) = (Vec::new(), Vec::new());
        for (at, mut node) in self.nodes.into_iter().enumerate().rev() {
            if node.path == Path::Param {
                of_params.push(node);
                continue;
            }
            let dy: Vec<Option<Tensor>> = node.outputs.iter().map(|&o| grads[o].take()).collect();
            if dy.iter().all(Option::is_none) {
                continue;
            }
            let (data, param) = (node.wanted(Path::Data), node.wanted(Path::Param));
            let now = if split { data } else { data.or(param) };
            if !now.is_empty() {
                node.backward(&dy, now, &mut grads)?;
            }
            if let Some((out, made)) = &mut weights {
                for &(id, slot) in &completed[at] {
                    add(grads[id].take(), slot, out, made)?;
                }
            }
            if split && !param.is_empty() {
                node.saved.release(data);
                later.push((node, dy, param));
            }
        }
        // What came for parameters, and for values made of them only, is the business of W.
        let mut for_weights = vec![None; grads.len()];
        let made = of_params.iter().flat_map(|n: &Node| &n.outputs);
        for &id in self.params.iter().map(|(id, _)| id).chain(made) {
            for_weights[id] = grads[id].take();
        }
        let inputs = InputGrads { serial: self.serial, grads };
        Ok((inputs, WeightPass { later, of_params, params: self.params, grads: for_weights }))
    }
}

/// The gradients of a tape's inputs.
pub struct InputGrads {
    serial: u64,
    grads: Vec<Option<Tensor>>,
}

impl InputGrads {
    /// The gradient of `input`; `None` if nothing depends on it, or it needs none.
    pub fn take(&mut self, input: &Var) -> Option<Tensor> {
        if input.tape == self.serial { self.grads.get_mut(input.id).and_then(Option::take) } else { None }
    }
}

/// W: what is left of a backward pass after I.
pub struct WeightPass {
    later: Vec<(Node, Vec<Option<Tensor>>, Mask)>,
    of_params: Vec<Node>,
    params: Vec<(VarId, usize)>,
    grads: Vec<Option<Tensor>>,
}

impl WeightPass {
    /// Bytes of the tensors kept for it.
    pub fn saved_bytes(&self) -> usize {
        saved_bytes(self.later.iter().map(|(n, ..)| &n.saved), HashSet::new())
    }

    /// Computes the parameters' gradients and adds them to `out`.
    pub fn run(self, out: &mut Grads) -> Result<()> {
        self.run_telling(out, &mut |_, _| Ok(()))
    }

    fn run_telling(mut self, out: &mut Grads, made: Made) -> Result<()> {
        for (mut node, dy, wrt) in self.later {
            node.backward(&dy, wrt, &mut self.grads)?;
        }
        for mut node in self.of_params {
            let dy: Vec<Option<Tensor>> = node.outputs.iter().map(|&o| self.grads[o].take()).collect();
            if dy.iter().any(Option::is_some) {
                node.backward(&dy, node.wanted(Path::Param), &mut self.grads)?;
            }
        }
        for (id, slot) in self.params {
            add(self.grads[id].take(), slot, out, made)?;
        }
        Ok(())
    }
}

/// Is told of the gradient in a slot.
pub type Made<'a> = &'a mut dyn FnMut(usize, &Tensor) -> Result<()>;

/// Adds a complete gradient to those of its slot, and tells of it.
fn add(grad: Option<Tensor>, slot: usize, out: &mut Grads, made: Made) -> Result<()> {
    let Some(grad) = grad else { return Ok(()) };
    out.add(slot, grad)?;
    out.get(slot).map_or(Ok(()), |grad| made(slot, grad))
}

/// Bytes of the tensors, each memory once and without those in `seen`.
fn saved_bytes<'a>(saved: impl Iterator<Item = &'a Saved>, mut seen: HashSet<usize>) -> usize {
    saved.flat_map(Saved::tensors).filter(|t| seen.insert(t.storage_id())).map(Tensor::byte_len).sum()
}

/// Gradients of parameters, by the slot that the context was given for each use.
#[derive(Clone, Default)]
pub struct Grads {
    slots: Vec<Option<Tensor>>,
}

impl Grads {
    /// Adds `g` to slot `slot`.
    pub fn add(&mut self, slot: usize, g: Tensor) -> Result<()> {
        if self.slots.len() <= slot {
            self.slots.resize(slot + 1, None);
        }
        fold(&mut self.slots[slot], g)
    }

    /// Adds all of `other`: `self + other`, slot by slot.
    pub fn fold(&mut self, other: Grads) -> Result<()> {
        other.slots.into_iter().enumerate().try_for_each(|(slot, g)| g.map_or(Ok(()), |g| self.add(slot, g)))
    }

    /// The gradient in `slot`, if any came.
    pub fn get(&self, slot: usize) -> Option<&Tensor> {
        self.slots.get(slot).and_then(Option::as_ref)
    }

    /// Takes the gradient out of `slot`.
    pub fn take(&mut self, slot: usize) -> Option<Tensor> {
        self.slots.get_mut(slot).and_then(Option::take)
    }
}
