//! Profiles in the text format that PipeDream's authors published with their system (SOSP'19).
//!
//! ```text
//! ID -- DESCRIPTION -- forward_compute_time=MS, backward_compute_time=MS, activation_size=BYTES|[B; B], parameter_size=BYTES[ -- stage_id=N]
//! <TAB>SOURCE -- READER
//! ```
//! The nodes come first, in any order, then the edges. A description may hold anything; several activations are summed.
use super::{CostGraph, CostNode};
use crate::{Context, Error, Result};
use std::{
    collections::{HashMap, HashSet},
    path::Path,
};

impl CostGraph {
    /// Reads the published text format. Of what a minibatch in flight keeps the format says nothing: the output of every node is
    /// taken to be kept.
    ///
    /// # Errors
    /// If a line is of neither form, names a node that is not there or one that is there already, or holds a number that is negative,
    /// not finite or larger than any can be: with the number of the line, from 1. If there is no node, or nodes read each other in
    /// a circle.
    pub fn from_published(text: &str) -> Result<CostGraph> {
        let mut nodes: Vec<CostNode> = Vec::new();
        let mut ids: HashMap<&str, usize> = HashMap::new();
        let mut edges: Vec<(usize, usize)> = Vec::new();
        let mut seen = HashSet::new();
        for (at, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let place = || format!("line {}", at + 1);
            if let Some(edge) = line.strip_prefix('\t') {
                let edge = read_edge(edge, &ids).context(place)?;
                if !seen.insert(edge) {
                    return Err(Error::plan("this edge stands there twice").context(place()));
                }
                edges.push(edge);
                continue;
            }
            if !edges.is_empty() {
                let wrong = format!("an edge expected, as <TAB>SOURCE -- READER, after the first; got {}", short(line));
                return Err(Error::plan(wrong).context(place()));
            }
            let (id, node) = read_node(line).context(place)?;
            if ids.insert(id, nodes.len()).is_some() {
                return Err(Error::plan(format!("node {id:?} stands there twice")).context(place()));
            }
            nodes.push(node);
        }
        if nodes.is_empty() {
            return Err(Error::plan(
                "the profile is empty; lines expected as ID -- DESCRIPTION -- forward_compute_time=…, …",
            ));
        }
        CostGraph::new(nodes, &edges)
    }

    /// Reads a file of the published text format.
    ///
    /// # Errors
    /// If it cannot be read, or as [`from_published`](CostGraph::from_published) says, with the file's name.
    pub fn load_published(path: &Path) -> Result<CostGraph> {
        CostGraph::from_published(&Error::read_text(path)?).context(|| path.display().to_string())
    }
}

const NODE: &str = "ID -- DESCRIPTION -- forward_compute_time=MS, backward_compute_time=MS, activation_size=BYTES, \
                    parameter_size=BYTES";

/// The name of a node and its cost.
fn read_node(line: &str) -> Result<(&str, CostNode)> {
    let wrong = || Error::plan(format!("a node expected, as {NODE}, got {}", short(line)));
    let (id, rest) = line.split_once(" -- ").ok_or_else(wrong)?;
    let (mut what, mut fields) = rest.rsplit_once(" -- ").ok_or_else(wrong)?;
    if let Some(stage) = fields.strip_prefix("stage_id=") {
        // The stage that the original assigned; plans are made anew.
        stage.trim().parse::<u32>().map_err(|_| Error::plan(format!("stage_id={stage}: a number expected")))?;
        (what, fields) = what.rsplit_once(" -- ").ok_or_else(wrong)?;
    }
    if id.is_empty() || id.trim() != id {
        return Err(wrong());
    }
    let mut found = [None; 4];
    let names = ["forward_compute_time", "backward_compute_time", "activation_size", "parameter_size"];
    for field in fields.split(", ") {
        let (name, value) = field.split_once('=').ok_or_else(wrong)?;
        let place = names.iter().position(|n| *n == name.trim()).ok_or_else(wrong)?;
        let value = match value.trim().strip_prefix('[').map(|v| v.strip_suffix(']')) {
            Some(Some(parts)) if place == 2 => parts.split(';').map(|part| number(name, part)).sum::<Result<f64>>()?,
            _ => number(name, value)?,
        };
        if found[place].replace(value).is_some() {
            return Err(Error::plan(format!("{name} stands there twice")));
        }
    }
    let [Some(forward), Some(backward), Some(output_bytes), Some(param_bytes)] = found else { return Err(wrong()) };
    let node = CostNode {
        name: id.to_string(),
        what: what.to_string(),
        forward: forward / 1e3,
        backward: backward / 1e3,
        output_bytes,
        param_bytes,
        saved_bytes: output_bytes,
    };
    node.check()?;
    Ok((id, node))
}

/// A number that is 0 or more; how large it may be depends on what it is.
fn number(name: &str, text: &str) -> Result<f64> {
    let found = text.trim().parse::<f64>().ok().filter(|x| x.is_finite() && *x >= 0.0);
    found.ok_or_else(|| Error::plan(format!("{name}={}: a number of 0 or more expected", short(text.trim()))))
}

/// The places of the two nodes of an edge.
fn read_edge(line: &str, ids: &HashMap<&str, usize>) -> Result<(usize, usize)> {
    let (from, to) = line
        .split_once(" -- ")
        .ok_or_else(|| Error::plan(format!("an edge expected, as <TAB>SOURCE -- READER, got {}", short(line))))?;
    let find = |id: &str| {
        let unknown =
            || Error::plan(format!("node {} is not in the profile; the nodes come before the edges", short(id)));
        ids.get(id.trim()).copied().ok_or_else(unknown)
    };
    let edge = (find(from)?, find(to)?);
    if edge.0 == edge.1 {
        return Err(Error::plan(format!("node {} reads itself; no cycle expected", short(from.trim()))));
    }
    Ok(edge)
}

/// The beginning of a text, quoted: a line of garbage may be long.
fn short(text: &str) -> String {
    const LENGTH: usize = 80;
    match text.char_indices().nth(LENGTH) {
        None => format!("{text:?}"),
        Some((end, _)) => format!("{:?}…", &text[..end]),
    }
}
