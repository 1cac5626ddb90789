//! The layer graph: nodes with names, in an order in which each comes after its inputs.
use super::{ID_TYPE, Init, Layer, Loss, ParamSpec, StateSpec};
use crate::{
    Context, Error, Result,
    autograd::{Cx, Mode, ParamRef, RunKey, Scope},
    tensor::{DType, Device, Tensor},
};
use std::{collections::HashMap, sync::Arc};

/// A node's position in its graph.
pub type NodeId = usize;
/// A parameter's position in its graph.
pub type ParamId = usize;

/// An output of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Value {
    /// The node.
    pub node: NodeId,
    /// Which of its outputs.
    pub output: usize,
}

/// What a node is.
#[derive(Clone)]
pub enum NodeKind {
    /// A field of the data set.
    Input,
    /// The weight of the whole minibatch by the graph's loss, which the loader knows before the first forward pass.
    Total,
    /// A layer.
    Layer(Arc<dyn Layer>),
}

/// A node of the graph.
#[derive(Clone)]
pub struct Node {
    /// Its name: given, or kind and ordinal; an input has its field's.
    pub name: String,
    /// What it is.
    pub kind: NodeKind,
    /// What it reads.
    pub inputs: Vec<Value>,
    /// Its parameters, in the layer's order.
    pub params: Vec<ParamId>,
    /// Its state, in the layer's order.
    pub state: Vec<StateSpec>,
    outputs: Vec<Output>,
}

/// An output of a node, as worked out when the node was added.
#[derive(Clone, Debug)]
struct Output {
    /// `None`: whatever floating-point type the run computes in.
    dtype: Option<DType>,
    /// For [`PROBE`] samples.
    shape: Vec<usize>,
    needs_grad: bool,
    /// The nodes that read it, in order, each once.
    readers: Vec<NodeId>,
}

/// A parameter of the graph; tied nodes share one.
#[derive(Clone, Debug)]
pub struct Param {
    /// `node.parameter`, of the first node that uses it.
    pub name: String,
    /// Shape and start.
    pub spec: ParamSpec,
}

/// A model as a graph of layers.
///
/// ```
/// use pipewright::layers::{Graph, Linear, Relu};
/// let mut g = Graph::new();
/// let x = g.input("x", [4]);
/// let h = g.add(Linear::new(4, 8), [x])?;
/// let h = g.add(Relu, [h])?;
/// let wrong = g.add(Linear::new(9, 2), [h]);
/// assert!(wrong.unwrap_err().to_string().contains("linear2"));
/// # Ok::<(), pipewright::Error>(())
/// ```
#[derive(Clone, Default)]
pub struct Graph {
    nodes: Vec<Node>,
    params: Vec<Param>,
    names: HashMap<String, NodeId>,
    ordinals: HashMap<&'static str, usize>,
    loss: Option<NodeId>,
    total: Option<NodeId>,
    /// What is wrong with an input: told by the next call that can.
    fault: Option<String>,
}

/// Samples in the shapes that are worked out when the graph is built: two, so that batch statistics exist.
const PROBE: usize = 2;

impl Graph {
    /// An empty graph.
    pub fn new() -> Graph {
        Graph::default()
    }

    /// A floating-point field of the data set: `shape` per sample; axis 0 is added for the samples. Asking again for a field
    /// gives the same value; asking for another shape, or by the name of another node, is an error of the next `add`.
    pub fn input(&mut self, field: &str, shape: impl AsRef<[usize]>) -> Value {
        self.source(field, None, shape.as_ref())
    }

    /// A field of integers, one per sample: the class.
    pub fn label(&mut self, field: &str) -> Value {
        self.source(field, Some(ID_TYPE), &[])
    }

    /// A field of integers, `shape` per sample: token ids, or a class for each position.
    pub fn ids(&mut self, field: &str, shape: impl AsRef<[usize]>) -> Value {
        self.source(field, Some(ID_TYPE), shape.as_ref())
    }

    fn source(&mut self, field: &str, dtype: Option<DType>, shape: &[usize]) -> Value {
        if let Some(&node) = self.names.get(field) {
            let before = &self.nodes[node];
            let same = |o: &Output| o.dtype == dtype && o.shape[1..] == *shape;
            if !(matches!(before.kind, NodeKind::Input) && before.outputs.iter().all(same)) {
                let fault = format!("the name {field:?} is taken: an input of shape {shape:?} cannot have it");
                self.fault.get_or_insert(fault);
            }
            return Value { node, output: 0 };
        }
        if let Err(e) = check_name(field) {
            self.fault.get_or_insert(e.message().to_string());
        }
        let output = Output { dtype, shape: [&[PROBE], shape].concat(), needs_grad: false, readers: Vec::new() };
        self.push(field, NodeKind::Input, vec![output])
    }

    fn push(&mut self, name: &str, kind: NodeKind, outputs: Vec<Output>) -> Value {
        let node = self.nodes.len();
        self.names.insert(name.to_string(), node);
        let name = name.to_string();
        self.nodes.push(Node { name, kind, inputs: Vec::new(), params: Vec::new(), state: Vec::new(), outputs });
        Value { node, output: 0 }
    }

    /// Adds a layer that reads `inputs`, named by its kind and an ordinal; returns its first output.
    ///
    /// # Errors
    /// If the shapes do not fit.
    pub fn add(&mut self, layer: impl Layer, inputs: impl AsRef<[Value]>) -> Result<Value> {
        self.add_node(Arc::new(layer), inputs.as_ref(), None, None)
    }

    /// The same, under a name of one's own.
    ///
    /// # Errors
    /// If the shapes do not fit, or the name is taken.
    pub fn add_named(&mut self, name: &str, layer: impl Layer, inputs: impl AsRef<[Value]>) -> Result<Value> {
        self.add_node(Arc::new(layer), inputs.as_ref(), Some(name), None)
    }

    /// Adds a layer that shares its parameters with the node that made `with`.
    ///
    /// # Errors
    /// If the shapes do not fit, or the two layers' parameters differ.
    pub fn add_tied(&mut self, layer: impl Layer, inputs: impl AsRef<[Value]>, with: Value) -> Result<Value> {
        self.add_node(Arc::new(layer), inputs.as_ref(), None, Some(with.node))
    }

    /// Adds the layers of a chain one after the other; returns the last output.
    ///
    /// # Errors
    /// If the shapes do not fit.
    pub fn chain(&mut self, layers: Sequential, input: Value) -> Result<Value> {
        layers.0.into_iter().try_fold(input, |x, layer| self.add_node(layer, &[x], None, None))
    }

    fn add_node(
        &mut self,
        layer: Arc<dyn Layer>,
        inputs: &[Value],
        name: Option<&str>,
        tied: Option<NodeId>,
    ) -> Result<Value> {
        self.check_inputs()?;
        let name = name.map_or_else(|| self.ordinal_name(layer.kind()), str::to_string);
        let place = || format!("node {name:?}");
        if self.names.contains_key(&name) {
            return Err(Error::graph(format!("the name {name:?} is taken")));
        }
        check_name(&name)?;
        if let Some(v) = inputs.iter().find(|v| self.nodes.get(v.node).is_none_or(|n| v.output >= n.outputs.len())) {
            return Err(
                Error::graph(format!("there is no output {} of node {} here", v.output, v.node)).context(place())
            );
        }
        let specs = layer.params();
        let shared = tied.map(|node| self.tied_params(node, &specs)).transpose().context(place)?;
        let outputs = self.probe(&name, &*layer, inputs, &specs).context(place)?;
        if layer.loss().is_some() {
            self.check_loss(inputs, &outputs).context(place)?;
        }
        let params = shared.unwrap_or_else(|| (self.params.len()..self.params.len() + specs.len()).collect());
        if tied.is_none() {
            let named = specs.into_iter().map(|spec| Param { name: format!("{name}.{}", spec.name), spec });
            self.params.extend(named);
        }
        let state = layer.state();
        let value = self.push(&name, NodeKind::Layer(layer), outputs);
        let node = &mut self.nodes[value.node];
        (node.inputs, node.params, node.state) = (inputs.to_vec(), params, state);
        for v in inputs {
            let readers = &mut self.nodes[v.node].outputs[v.output].readers;
            if readers.last() != Some(&value.node) {
                readers.push(value.node);
            }
        }
        Ok(value)
    }

    fn check_inputs(&self) -> Result<()> {
        self.fault.as_ref().map_or(Ok(()), |fault| Err(Error::graph(fault.clone())))
    }

    /// The kind with the next ordinal that no node was named by hand.
    fn ordinal_name(&mut self, kind: &'static str) -> String {
        let n = self.ordinals.entry(kind).or_insert(0);
        loop {
            *n += 1;
            let name = format!("{kind}{n}");
            if !self.names.contains_key(&name) {
                return name;
            }
        }
    }

    fn tied_params(&self, node: NodeId, specs: &[ParamSpec]) -> Result<Vec<ParamId>> {
        let with =
            self.nodes.get(node).ok_or_else(|| Error::graph(format!("there is no node {node} to share with")))?;
        let theirs: Vec<&ParamSpec> = with.params.iter().map(|&p| &self.params[p].spec).collect();
        let alike = |a: &ParamSpec, b: &ParamSpec| a.shape == b.shape && a.trainable == b.trainable;
        if theirs.len() != specs.len() || !theirs.iter().zip(specs).all(|(a, b)| alike(a, b)) {
            let shapes = |s: &mut dyn Iterator<Item = &ParamSpec>| {
                s.map(|s| format!("{}{:?}", s.name, s.shape)).collect::<Vec<_>>()
            };
            let (a, b) = (shapes(&mut theirs.into_iter()), shapes(&mut specs.iter()));
            return Err(Error::graph(format!("cannot share the parameters {a:?} of {:?} as {b:?}", with.name)));
        }
        Ok(with.params.clone())
    }

    /// Works out the outputs on the meta device.
    fn probe(&self, name: &str, layer: &dyn Layer, inputs: &[Value], specs: &[ParamSpec]) -> Result<Vec<Output>> {
        let (meta, float) = (Device::meta(), DType::F32);
        let mut params = Vec::new();
        for (i, s) in specs.iter().enumerate() {
            params.push(ParamRef {
                tensor: Tensor::zeros(&s.shape, float, &meta)?,
                id: i,
                slot: i,
                trainable: s.trainable,
            });
        }
        let state = layer.state().iter().map(|s| Tensor::zeros(&s.shape, float, &meta)).collect::<Result<Vec<_>>>()?;
        let key = RunKey { samples: vec![0; PROBE].into(), ..RunKey::default() };
        let mut cx = Cx::inference(Mode::Train, key);
        cx.enter(Scope { node: name, index: self.nodes.len(), params: &params, state: &state });
        let mut x = Vec::new();
        let mut needs_grad = specs.iter().any(|s| s.trainable);
        for v in inputs {
            let from = &self.nodes[v.node].outputs[v.output];
            needs_grad |= from.needs_grad;
            x.push(cx.input(Tensor::zeros(&from.shape, from.dtype.unwrap_or(float), &meta)?, false));
        }
        let outputs = layer.forward(&mut cx, &x)?.all();
        let per_sample = |y: &crate::autograd::Var| y.shape().first().is_some_and(|n| n.is_multiple_of(PROBE));
        if let Some(y) = outputs.iter().find(|y| layer.loss().is_none() && !per_sample(y)) {
            return Err(Error::shape(format!(
                "axis 0 of every output must be samples × a fixed number; {PROBE} samples gave the shape {:?}",
                y.shape()
            )));
        }
        let output = |y: &crate::autograd::Var| {
            let dtype = Some(y.value().dtype()).filter(|d| !d.is_float());
            Output { dtype, shape: y.shape().to_vec(), needs_grad: needs_grad && dtype.is_none(), readers: Vec::new() }
        };
        Ok(outputs.iter().map(output).collect())
    }

    fn check_loss(&self, inputs: &[Value], outputs: &[Output]) -> Result<()> {
        let target = inputs.get(1).map(|v| &self.nodes[v.node].kind);
        if !matches!(target, Some(NodeKind::Input)) {
            return Err(Error::graph("the second input of a loss, the target, must be an input of the graph"));
        }
        match outputs.first() {
            Some(sum) if sum.shape.iter().product::<usize>() == 1 => Ok(()),
            other => Err(Error::graph(format!("the first output of a loss must be one element, got {other:?}"))),
        }
    }

    /// The same graph with `loss` as what is minimised; adds the node that carries the minibatch's total weight.
    ///
    /// # Errors
    /// If the node is no loss, or another loss was set before.
    pub fn with_loss(mut self, loss: Value) -> Result<Graph> {
        self.check_inputs()?;
        let name = |g: &Graph, n: NodeId| g.nodes.get(n).map_or("?".to_string(), |n| n.name.clone());
        if self.loss(loss.node).is_none() {
            return Err(Error::graph(format!("node {:?} is no loss", name(&self, loss.node))));
        }
        match self.loss {
            Some(other) if other != loss.node => {
                return Err(Error::graph(format!("the loss is {:?} already", name(&self, other))));
            }
            Some(_) => {}
            None => {
                let total =
                    Output { dtype: Some(DType::F64), shape: vec![1], needs_grad: false, readers: vec![loss.node] };
                self.total = Some(self.push("(loss total)", NodeKind::Total, vec![total]).node);
                self.loss = Some(loss.node);
            }
        }
        Ok(self)
    }

    /// The loss that `node` is, if it is one.
    pub fn loss(&self, node: NodeId) -> Option<&dyn Loss> {
        match &self.nodes.get(node)?.kind {
            NodeKind::Layer(layer) => layer.loss(),
            _ => None,
        }
    }

    /// The node that is minimised.
    pub fn loss_node(&self) -> Option<NodeId> {
        self.loss
    }

    /// The node that carries the minibatch's total weight to the loss.
    pub fn total_node(&self) -> Option<NodeId> {
        self.total
    }

    /// All nodes; each comes after its inputs.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Whether `node` is a layer: the others are inputs and the total.
    pub fn is_layer(&self, node: NodeId) -> bool {
        matches!(self.nodes[node].kind, NodeKind::Layer(_))
    }

    /// The layers, in order.
    pub fn layers(&self) -> impl Iterator<Item = NodeId> + '_ {
        (0..self.nodes.len()).filter(|&n| self.is_layer(n))
    }

    /// All parameters.
    pub fn params(&self) -> &[Param] {
        &self.params
    }

    /// For each node, whether `node` is computed from it; it is itself one of them.
    pub fn ancestors(&self, node: NodeId) -> Vec<bool> {
        let mut wanted = vec![false; self.nodes.len()];
        wanted[node] = true;
        for n in (0..=node).rev() {
            if wanted[n] {
                self.nodes[n].inputs.iter().for_each(|v| wanted[v.node] = true);
            }
        }
        wanted
    }

    /// The node called `name`.
    pub fn find(&self, name: &str) -> Option<NodeId> {
        self.names.get(name).copied()
    }

    /// The nodes that read `v`, in order, each once. The loss reads the total.
    pub fn consumers(&self, v: Value) -> &[NodeId] {
        &self.nodes[v.node].outputs[v.output].readers
    }

    /// Element type and shape of `v` for `samples` samples, when floating-point values are of type `float`.
    pub fn shape(&self, v: Value, samples: usize, float: DType) -> (DType, Vec<usize>) {
        let output = &self.nodes[v.node].outputs[v.output];
        let mut shape = output.shape.clone();
        if self.is_per_sample(v) {
            shape[0] = shape[0] / PROBE * samples;
        }
        (output.dtype.unwrap_or(float), shape)
    }

    /// Whether axis 0 of `v` is samples × a fixed number: true but for the outputs of a loss and the total.
    pub fn is_per_sample(&self, v: Value) -> bool {
        !matches!(self.nodes[v.node].kind, NodeKind::Total) && self.loss(v.node).is_none()
    }

    /// How many outputs `node` has.
    pub fn output_count(&self, node: NodeId) -> usize {
        self.nodes[node].outputs.len()
    }

    /// Whether `v` has a gradient: it is a floating-point value that a learned parameter has a part in.
    pub fn needs_grad(&self, v: Value) -> bool {
        self.nodes[v.node].outputs[v.output].needs_grad
    }

    /// The first version of parameter `p`.
    pub fn init_param(&self, p: ParamId, seed: u64, dtype: DType, device: &Device) -> Result<Tensor> {
        let Param { name, spec } = &self.params[p];
        spec.init.make(seed, name, &spec.shape, dtype, device)
    }

    /// State `i` of `node` as it starts.
    pub fn init_state(&self, node: NodeId, i: usize, dtype: DType, device: &Device) -> Result<Tensor> {
        let spec = &self.nodes[node].state[i];
        Init::Constant(spec.start).make(0, &spec.name, &spec.shape, dtype, device)
    }
}

fn check_name(name: &str) -> Result<()> {
    if name.is_empty() || name.contains(['.', ' ', '"', '\n']) {
        return Err(Error::graph(format!("a name is not empty and holds no dot, blank or quote, got {name:?}")));
    }
    Ok(())
}

/// Layers one after the other: sugar for [`Graph::chain`]. The graph keeps them apart, so that it can be cut between them.
#[derive(Clone, Default)]
pub struct Sequential(Vec<Arc<dyn Layer>>);

impl Sequential {
    /// No layers.
    pub fn new() -> Sequential {
        Sequential::default()
    }

    /// With `layer` at the end.
    pub fn then(mut self, layer: impl Layer) -> Sequential {
        self.0.push(Arc::new(layer));
        self
    }
}
