//! What one differentiable operation is to the tape.
use super::tape::VarId;
use crate::{Error, Result, tensor::Tensor};

/// A set of an op's inputs, by position (at most 64).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Mask(u64);

impl Mask {
    /// No input.
    pub const NONE: Mask = Mask(0);
    /// Every input.
    pub const ALL: Mask = Mask(u64::MAX);
    /// The largest number of inputs of an op.
    pub const MAX: usize = 64;

    /// Input `i` alone; nothing beyond [`MAX`](Mask::MAX).
    pub const fn only(i: usize) -> Mask {
        Mask(if i < Mask::MAX { 1 << i } else { 0 })
    }

    /// Whether input `i` is in it.
    pub const fn has(self, i: usize) -> bool {
        !self.and(Mask::only(i)).is_empty()
    }

    /// The inputs in both.
    pub const fn and(self, other: Mask) -> Mask {
        Mask(self.0 & other.0)
    }

    /// The inputs in either.
    pub const fn or(self, other: Mask) -> Mask {
        Mask(self.0 | other.0)
    }

    /// The inputs that are not in `other`.
    pub const fn minus(self, other: Mask) -> Mask {
        Mask(self.0 & !other.0)
    }

    /// Whether it is empty.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }
}

impl FromIterator<usize> for Mask {
    fn from_iter<I: IntoIterator<Item = usize>>(inputs: I) -> Mask {
        inputs.into_iter().fold(Mask::NONE, |m, i| m.or(Mask::only(i)))
    }
}

/// A differentiable operation, made by the forward pass and used by the backward pass.
pub trait Op: Send + 'static {
    /// Its name in errors, such as `conv2d`.
    fn name(&self) -> &'static str;

    /// Puts the gradient of each input in `wrt` into `dx`, given the gradient of each output (`None` where nothing came
    /// back). May be called twice for one forward pass, for the activations first (I) and for the parameters later (W);
    /// what I worked out and W needs again goes through [`Saved::keep`].
    fn backward(&self, saved: &mut Saved, dy: &[Option<Tensor>], wrt: Mask, dx: &mut Sink) -> Result<()>;
}

/// A tensor that the backward pass will need.
pub(super) enum Slot {
    /// A value.
    Value(Tensor),
    /// A parameter: with weight stashing the very version that the forward pass read, else to be looked up at B.
    Param { id: usize, stashed: Option<Tensor> },
}

impl Slot {
    fn tensor(&self) -> Option<&Tensor> {
        match self {
            Slot::Value(t) => Some(t),
            Slot::Param { stashed, .. } => stashed.as_ref(),
        }
    }
}

/// Tensors kept from the forward pass, each until the last input gradient that needs it has been computed.
#[derive(Default)]
pub struct Saved {
    slots: Vec<(Option<Slot>, Mask)>,
    kept: Vec<Option<Tensor>>,
}

impl Saved {
    pub(super) fn new(slots: Vec<(Option<Slot>, Mask)>) -> Saved {
        Saved { slots, kept: Vec::new() }
    }

    /// The `i`-th tensor that the forward pass saved.
    ///
    /// # Errors
    /// If it was not saved for the gradients asked for now: a fault in the op's masks.
    pub fn get(&self, i: usize) -> Result<&Tensor> {
        let slot = self.slots.get(i).and_then(|(s, _)| s.as_ref());
        slot.and_then(Slot::tensor).ok_or_else(|| {
            Error::graph(format!(
                "saved tensor {i} is gone: the mask it was saved with leaves out a gradient that reads it"
            ))
        })
    }

    /// Keeps work done in I for W under the small number `key`.
    pub fn keep(&mut self, key: usize, t: Tensor) {
        if self.kept.len() <= key {
            self.kept.resize(key + 1, None);
        }
        self.kept[key] = Some(t);
    }

    /// What `keep` kept.
    pub fn kept(&self, key: usize) -> Option<&Tensor> {
        self.kept.get(key).and_then(Option::as_ref)
    }

    /// Drops what only the gradients in `done` needed.
    pub(super) fn release(&mut self, done: Mask) {
        for (slot, need) in &mut self.slots {
            *need = need.minus(done);
            if need.is_empty() {
                *slot = None;
            }
        }
    }

    /// Looks up parameters that were not stashed.
    pub(super) fn resolve(&mut self, current: &dyn Fn(usize) -> Option<Tensor>) {
        for (slot, _) in &mut self.slots {
            if let Some(Slot::Param { id, stashed: stashed @ None }) = slot {
                *stashed = current(*id);
            }
        }
    }

    /// The tensors held now.
    pub(super) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.slots.iter().filter_map(|(s, _)| s.as_ref()?.tensor()).chain(self.kept.iter().flatten())
    }

    /// The parameters held now.
    pub(super) fn params(&self) -> impl Iterator<Item = (usize, &Tensor)> {
        self.slots.iter().filter_map(|(s, _)| match s {
            Some(Slot::Param { id, stashed: Some(t) }) => Some((*id, t)),
            _ => None,
        })
    }
}

/// Where an op's backward pass puts the gradients of its inputs.
pub struct Sink<'a> {
    pub(super) inputs: &'a [VarId],
    pub(super) wrt: Mask,
    pub(super) grads: &'a mut [Option<Tensor>],
}

impl Sink<'_> {
    /// Adds `g` to the gradient of input `i`.
    ///
    /// # Errors
    /// If that gradient was not asked for: the work was wasted, and would count twice where B is split into I and W.
    pub fn put(&mut self, i: usize, g: Tensor) -> Result<()> {
        let id = self
            .inputs
            .get(i)
            .ok_or_else(|| Error::graph(format!("gradient of input {i} of {}", self.inputs.len())))?;
        if !self.wrt.has(i) {
            return Err(Error::graph(format!(
                "the gradient of input {i} was not asked for: test `wrt.has({i})` first"
            )));
        }
        fold(&mut self.grads[*id], g)
    }
}

/// `sum ← sum + g`, where nothing counts as zero.
pub(super) fn fold(sum: &mut Option<Tensor>, g: Tensor) -> Result<()> {
    match sum {
        None => *sum = Some(g),
        Some(sum) => sum.accumulate(&g)?,
    }
    Ok(())
}
