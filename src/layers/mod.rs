//! Layers: what a model is made of. A layer describes; it holds no tensors.
//!
//! A new layer is a file here with a struct, its [`Layer`] implementation and a line in [`ZOO`]; that gives it, for every
//! example, gradient checks in f64, the comparison of the backends, the shape check and the split of B into I and W.
//!
#![doc = include_str!("../../docs/layers.md")]
mod activation;
mod attention;
mod conv2d;
mod dropout;
mod embedding;
mod graph;
mod init;
mod linear;
mod loss;
mod lstm;
mod norm;
mod pool2d;
mod shape;

pub use activation::{Gelu, Relu, Sigmoid, Softmax, Tanh};
pub use attention::MultiHeadAttention;
pub use conv2d::Conv2d;
pub use dropout::Dropout;
pub use embedding::{Embedding, PositionEmbedding};
pub use graph::{Graph, Node, NodeId, NodeKind, Param, ParamId, Sequential, Value};
pub use init::Init;
pub use linear::Linear;
pub use loss::{CrossEntropy, Mse};
pub use lstm::Lstm;
pub use norm::{BatchNorm, LayerNorm};
pub use pool2d::{AvgPool2d, GlobalAvgPool, MaxPool2d};
pub use shape::{Add, Concat, Flatten, Reshape};

use crate::{
    Error, Result,
    autograd::{Cx, Outputs, Var},
    tensor::{DType, Tensor},
};

/// A parameter that a layer asks for.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamSpec {
    /// Its name within the layer, such as `weight`.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// How it starts.
    pub init: Init,
    /// Whether it is learned; a frozen one is read, never changed, and costs nothing in the backward pass.
    pub trainable: bool,
}

impl ParamSpec {
    /// A learned parameter.
    pub fn new(name: &str, shape: &[usize], init: Init) -> ParamSpec {
        ParamSpec { name: name.into(), shape: shape.to_vec(), init, trainable: true }
    }

    /// The same, frozen if `yes`.
    pub fn frozen(self, yes: bool) -> ParamSpec {
        ParamSpec { trainable: !yes, ..self }
    }
}

/// State that a node keeps beside its parameters: an average over the training batches, `s ← s + momentum·(stat − s)`.
#[derive(Clone, Debug, PartialEq)]
pub struct StateSpec {
    /// Its name within the layer, such as `running_mean`.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// The value it starts with.
    pub start: f64,
    /// The weight of a new statistic.
    pub momentum: f64,
}

/// A kind of computation, with the shapes of its parameters.
pub trait Layer: Send + Sync + 'static {
    /// The kind, in small letters: nodes are named by it.
    fn kind(&self) -> &'static str;

    /// The parameters, in the order of `cx.param(i)`.
    fn params(&self) -> Vec<ParamSpec> {
        Vec::new()
    }

    /// The state, in the order of `cx.state(i)` and `cx.emit_stat(i, …)`.
    fn state(&self) -> Vec<StateSpec> {
        Vec::new()
    }

    /// The forward pass. Axis 0 of every input is samples × a fixed number.
    ///
    /// # Errors
    /// Shapes that do not fit; found when the graph is built.
    fn forward(&self, cx: &mut Cx, x: &[Var]) -> Result<Outputs>;

    /// What makes it a loss, if it is one.
    fn loss(&self) -> Option<&dyn Loss> {
        None
    }

    /// Small instances with inputs: what every generic test runs on.
    fn examples() -> Vec<Example>
    where
        Self: Sized;
}

/// A layer that ends a model. Output 0 is the sum of the samples' losses; it is divided by the total weight of the
/// minibatch, which is known before the first forward pass (so unequal micro-batches are exact). Output 1, if there is one,
/// is the number of right answers.
pub trait Loss {
    /// The weight of a part of a minibatch, from the loss's second input (the target, an input of the graph): the number of
    /// labels that count, or of elements.
    fn weight(&self, target: &Tensor) -> Result<f64>;
}

/// A small instance of a layer and inputs for it.
pub struct Example {
    /// What is special about it.
    pub name: String,
    /// The layer.
    pub layer: Box<dyn Layer>,
    /// Its inputs.
    pub inputs: Vec<ExampleInput>,
}

/// An input of an [`Example`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExampleInput {
    /// Random numbers of this shape; gradients are checked.
    Float(Vec<usize>),
    /// Random integers of this shape below the bound.
    Ids(Vec<usize>, usize),
}

impl Example {
    /// An example with floating-point inputs of these shapes.
    pub fn new(name: &str, layer: impl Layer, shapes: &[&[usize]]) -> Example {
        let inputs = shapes.iter().map(|s| ExampleInput::Float(s.to_vec())).collect();
        Example { name: name.into(), layer: Box::new(layer), inputs }
    }

    /// With one more input of random integers below `bound`.
    pub fn ids(mut self, shape: &[usize], bound: usize) -> Example {
        self.inputs.push(ExampleInput::Ids(shape.to_vec(), bound));
        self
    }
}

/// The element type of labels and token ids.
pub const ID_TYPE: DType = DType::I64;

/// The examples of every layer.
pub const ZOO: &[fn() -> Vec<Example>] = &[
    Linear::examples,
    Conv2d::examples,
    MaxPool2d::examples,
    AvgPool2d::examples,
    GlobalAvgPool::examples,
    BatchNorm::examples,
    LayerNorm::examples,
    Relu::examples,
    Gelu::examples,
    Tanh::examples,
    Sigmoid::examples,
    Softmax::examples,
    Dropout::examples,
    Flatten::examples,
    Reshape::examples,
    Add::examples,
    Concat::examples,
    Embedding::examples,
    PositionEmbedding::examples,
    MultiHeadAttention::examples,
    Lstm::examples,
    CrossEntropy::examples,
    Mse::examples,
];

/// The only input of a layer that takes one.
///
/// # Errors
/// If there are none or several.
pub fn single(x: &[Var]) -> Result<&Var> {
    match x {
        [x] => Ok(x),
        _ => Err(Error::graph(format!("one input expected, got {}", x.len()))),
    }
}

/// An error unless every one of a layer's settings is 1 or more.
pub(crate) fn positive(kind: &str, settings: &[(&str, usize)]) -> Result<()> {
    match settings.iter().find(|(_, value)| *value == 0) {
        Some((name, _)) => Err(Error::config(format!("{kind}: {name} must be 1 or more, got 0"))),
        None => Ok(()),
    }
}

/// The sizes [n,h,w,c] of an image.
///
/// # Errors
/// If the value does not have four axes.
pub(crate) fn image(x: &Var) -> Result<[usize; 4]> {
    x.shape().try_into().map_err(|_| Error::shape(format!("an image [n,h,w,c] expected, got {:?}", x.shape())))
}
