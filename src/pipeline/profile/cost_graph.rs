//! What the layers of a model cost and which read which: all that a planner needs to know of a model.
use super::{LONGEST, NodeCost};
use crate::{
    Error, Result,
    layers::{Graph, Value},
    pipeline::planner::allowed_cuts,
};
use std::collections::HashMap;

/// The cost of one node for one minibatch. Times in seconds, sizes in bytes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CostNode {
    /// The node's name.
    pub name: String,
    /// What it is, for people to read.
    pub what: String,
    /// F.
    pub forward: f64,
    /// B, and its part of an update.
    pub backward: f64,
    /// What it hands on.
    pub output_bytes: f64,
    /// All parameters.
    pub param_bytes: f64,
    /// What is kept of a minibatch in flight for the backward pass, parameters left out.
    pub saved_bytes: f64,
}

impl CostNode {
    /// F and B.
    pub fn seconds(&self) -> f64 {
        self.forward + self.backward
    }
}

/// The nodes of a model with their costs, and which reads which: a directed graph without cycles.
#[derive(Clone, Debug, PartialEq)]
pub struct CostGraph {
    nodes: Vec<CostNode>,
    readers: Vec<Vec<usize>>,
    sources: Vec<Vec<usize>>,
    /// All nodes, each after those that it reads.
    order: Vec<usize>,
    /// Whether stages are cut out of `order` only, and the places where they may not be.
    only_in_order: Option<Vec<bool>>,
}

/// More nodes than any model that is planned layer by layer has.
const MOST_NODES: usize = 10_000;
/// More bytes than any worker holds.
const LARGEST: f64 = 1e15;

impl CostGraph {
    /// A graph of `nodes`, where each of `edges` is a node and one that reads it.
    ///
    /// # Errors
    /// If there is no node, or are too many, two have one name, a cost is negative, not finite or larger than any can be, an edge
    /// names a node that is not there or stands there twice, or nodes read each other in a circle.
    pub fn new(nodes: Vec<CostNode>, edges: &[(usize, usize)]) -> Result<CostGraph> {
        if nodes.is_empty() || nodes.len() > MOST_NODES {
            return Err(Error::plan(format!("a profile of {} nodes; 1 to {MOST_NODES} expected", nodes.len())));
        }
        let mut ids = HashMap::new();
        for (n, node) in nodes.iter().enumerate() {
            node.check()?;
            if ids.insert(node.name.as_str(), n).is_some() {
                return Err(Error::plan(format!("node {:?} stands there twice", node.name)));
            }
        }
        let mut readers = vec![Vec::new(); nodes.len()];
        let mut sources = vec![Vec::new(); nodes.len()];
        let mut seen = std::collections::HashSet::new();
        for &(from, to) in edges {
            let (Some(a), Some(b)) = (nodes.get(from), nodes.get(to)) else {
                return Err(Error::plan(format!("an edge from node {from} to {to}; there are {} nodes", nodes.len())));
            };
            if !seen.insert((from, to)) {
                return Err(Error::plan(format!("the edge from {:?} to {:?} stands there twice", a.name, b.name)));
            }
            readers[from].push(to);
            sources[to].push(from);
        }
        let order = in_order(&readers, &sources)
            .map_err(|n| Error::plan(format!("node {:?} depends on itself; no cycle expected", nodes[n].name)))?;
        Ok(CostGraph { nodes, readers, sources, order, only_in_order: None })
    }

    /// The layers of a model of this crate. `costs` are those of the micro-batch that will run, with its part of an update
    /// ([`NodeCost::per_micro_batch`]). Stages are neighbours in the order of the graph ([`Plan`](crate::pipeline::plan::Plan)), and
    /// nodes with shared parameters stay together.
    ///
    /// # Errors
    /// If `costs` are not those of the graph, or as [`new`](CostGraph::new) says.
    pub fn of_model(graph: &Graph, costs: &[NodeCost]) -> Result<CostGraph> {
        if costs.len() != graph.nodes().len() {
            return Err(Error::plan(format!("costs of {} nodes for a model of {}", costs.len(), graph.nodes().len())));
        }
        let node = |c: &NodeCost| CostNode {
            name: c.node.clone(),
            what: String::new(),
            forward: c.forward,
            backward: c.seconds() - c.forward,
            output_bytes: c.output_bytes as f64,
            param_bytes: c.param_bytes as f64,
            saved_bytes: c.saved_bytes as f64,
        };
        let layers: Vec<usize> = graph.layers().collect();
        let place: HashMap<usize, usize> = layers.iter().enumerate().map(|(at, &n)| (n, at)).collect();
        let mut edges = Vec::new();
        for &n in &layers {
            let mut readers: Vec<usize> = (0..graph.output_count(n))
                .flat_map(|output| graph.consumers(Value { node: n, output }))
                .map(|r| place[r])
                .collect();
            readers.sort_unstable();
            readers.dedup();
            edges.extend(readers.into_iter().map(|r| (place[&n], r)));
        }
        let nodes = layers.iter().map(|&n| node(&costs[n])).collect();
        let mut made = CostGraph::new(nodes, &edges)?;
        made.order = (0..layers.len()).collect();
        made.only_in_order = Some(allowed_cuts(graph, &layers));
        Ok(made)
    }

    /// The same model, where a minibatch is cut into so many micro-batches: a part each of times, and of bytes that depend on samples.
    /// Kernels that are slower on few samples are not known of; a profile that was measured at the size says more.
    pub fn in_micro_batches(&self, count: usize) -> CostGraph {
        let part = 1.0 / count.max(1) as f64;
        let node = |n: &CostNode| CostNode {
            forward: part * n.forward,
            backward: part * n.backward,
            output_bytes: part * n.output_bytes,
            saved_bytes: part * n.saved_bytes,
            ..n.clone()
        };
        CostGraph { nodes: self.nodes.iter().map(node).collect(), ..self.clone() }
    }

    /// The nodes.
    pub fn nodes(&self) -> &[CostNode] {
        &self.nodes
    }

    /// The nodes that read the output of `node`.
    pub fn readers(&self, node: usize) -> &[usize] {
        &self.readers[node]
    }

    /// The nodes whose outputs `node` reads.
    pub fn sources(&self, node: usize) -> &[usize] {
        &self.sources[node]
    }

    /// All nodes, each after those that it reads.
    pub fn order(&self) -> &[usize] {
        &self.order
    }

    /// If stages may only be cut out of [`order`](CostGraph::order): before which of its places.
    pub fn cuts_in_order(&self) -> Option<&[bool]> {
        self.only_in_order.as_deref()
    }

    /// Seconds that one worker takes for a minibatch.
    pub fn seconds(&self) -> f64 {
        self.nodes.iter().map(CostNode::seconds).sum()
    }

    /// Bytes of all parameters.
    pub fn param_bytes(&self) -> f64 {
        self.nodes.iter().map(|n| n.param_bytes).sum()
    }

    /// What is planned of a published profile: inputs are left out, and results that nothing reads (nodes `Input…` that read nothing,
    /// then nodes `__getitem__…` that nothing reads), as the original partitioner does.
    ///
    /// Gives the graph of what is left, which node each of its nodes was, and for each node left out the node of the new graph
    /// whose stage it belongs to: the one that makes it, or none for an input, which belongs to the first stage.
    ///
    /// # Errors
    /// If nothing is left.
    pub fn without_ends(&self) -> Result<Trimmed> {
        let begins = |n: &usize| self.sources[*n].is_empty() && self.nodes[*n].what.starts_with("Input");
        let mut is_left: Vec<bool> = (0..self.nodes.len()).map(|n| !begins(&n)).collect();
        let unread: Vec<usize> = (0..self.nodes.len())
            .filter(|&n| is_left[n] && self.readers[n].is_empty() && self.nodes[n].what.starts_with("__getitem__"))
            .collect();
        unread.iter().for_each(|&n| is_left[n] = false);
        let was: Vec<usize> = (0..self.nodes.len()).filter(|&n| is_left[n]).collect();
        if was.is_empty() {
            return Err(Error::plan("nothing but inputs and results that nothing reads; a layer expected"));
        }
        if was.len() == self.nodes.len() {
            return Ok(Trimmed { graph: self.clone(), was, left_out: Vec::new() });
        }
        let mut place = vec![usize::MAX; self.nodes.len()];
        was.iter().enumerate().for_each(|(at, &n)| place[n] = at);
        let edges = was.iter().flat_map(|&n| {
            let place = &place;
            self.readers[n].iter().filter(|&&r| is_left[r]).map(move |&r| (place[n], place[r]))
        });
        let edges: Vec<(usize, usize)> = edges.collect();
        let graph = CostGraph::new(was.iter().map(|&n| self.nodes[n].clone()).collect(), &edges)?;
        let rank: HashMap<usize, usize> = graph.order.iter().enumerate().map(|(i, &n)| (n, i)).collect();
        let maker =
            |n: usize| self.sources[n].iter().filter(|&&s| is_left[s]).map(|&s| place[s]).max_by_key(|p| rank[p]);
        let left_out = (0..self.nodes.len()).filter(|&n| !is_left[n]).map(|n| (n, maker(n))).collect();
        Ok(Trimmed { graph, was, left_out })
    }
}

/// A graph without its ends ([`CostGraph::without_ends`]).
#[derive(Clone, Debug)]
pub struct Trimmed {
    /// What is left.
    pub graph: CostGraph,
    /// Which node of the whole graph each of its nodes was.
    pub was: Vec<usize>,
    /// The nodes left out, by their place in the whole graph, and the node of `graph` whose stage each belongs to: none if to the first.
    pub left_out: Vec<(usize, Option<usize>)>,
}

impl CostNode {
    /// # Errors
    /// If a cost is negative, not finite or larger than any can be.
    pub(super) fn check(&self) -> Result<()> {
        let numbers = [
            ("forward", self.forward, LONGEST, "s"),
            ("backward", self.backward, LONGEST, "s"),
            ("output", self.output_bytes, LARGEST, "bytes"),
            ("parameters", self.param_bytes, LARGEST, "bytes"),
            ("saved", self.saved_bytes, LARGEST, "bytes"),
        ];
        match numbers.into_iter().find(|(_, x, most, _)| !(0.0..=*most).contains(x)) {
            None => Ok(()),
            Some((what, x, most, unit)) => {
                let name = &self.name;
                Err(Error::plan(format!("node {name:?}: {what} of {x} {unit}; 0 to {most:e} expected")))
            }
        }
    }
}

/// All nodes, each after those that it reads, the first of those that may come; or a node on a cycle.
fn in_order(readers: &[Vec<usize>], sources: &[Vec<usize>]) -> std::result::Result<Vec<usize>, usize> {
    let mut waits: Vec<usize> = sources.iter().map(Vec::len).collect();
    let ready = |waits: &[usize], n: &usize| waits[*n] == 0;
    let mut heap: std::collections::BTreeSet<usize> = (0..readers.len()).filter(|n| ready(&waits, n)).collect();
    let mut order = Vec::new();
    while let Some(n) = heap.pop_first() {
        order.push(n);
        for &r in &readers[n] {
            waits[r] -= 1;
            if waits[r] == 0 {
                heap.insert(r);
            }
        }
    }
    // From a node that waits, back along those that wait too, one is met again: it is on a cycle.
    let Some(mut n) = (0..readers.len()).find(|&n| waits[n] > 0) else { return Ok(order) };
    let mut met = vec![false; readers.len()];
    while !met[n] {
        met[n] = true;
        n = sources[n].iter().copied().find(|&s| waits[s] > 0).unwrap_or(n);
    }
    Err(n)
}
