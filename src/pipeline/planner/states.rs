//! The states of the published partitioner: the augmented antichains of a graph.
use super::bits::Bits;
use crate::{Error, Result, pipeline::profile::CostGraph};
use std::collections::HashSet;

/// A part of the graph that holds with every node all that it depends on: what the stages up to some cut hold.
pub(super) struct State {
    pub(super) nodes: Bits,
    /// Seconds of all its nodes.
    pub(super) seconds: f64,
    /// Bytes of their parameters.
    pub(super) param_bytes: f64,
    /// Bytes of the outputs of its augmented antichain.
    pub(super) output_bytes: f64,
}

/// More states than the recurrence, cubic in them, gets through.
const MOST_STATES: usize = 1500;

/// The states, each after those within it; the last one is the whole graph.
///
/// As in the original, the first is the first source (in the order of the profile) alone, and from each state a node that reads one
/// of its nodes leads on to another, with all that it depends on.
///
/// # Errors
/// If there are more states than can be gone through, or some node is not reached.
pub(super) fn states(graph: &CostGraph) -> Result<Vec<State>> {
    let count = graph.nodes().len();
    let ancestors = ancestors(graph);
    let first = (0..count).find(|&n| graph.sources(n).is_empty()).unwrap_or(0);
    let mut found = vec![ancestors[first].clone()];
    let mut known = HashSet::from([ancestors[first].clone()]);
    let mut at = 0;
    while at < found.len() {
        let next = found[at].iter().flat_map(|n| graph.readers(n)).filter(|&&r| !found[at].has(r));
        let next: Vec<Bits> = next
            .map(|&r| {
                let mut joined = found[at].clone();
                joined.join(&ancestors[r]);
                joined
            })
            .collect();
        for state in next {
            if known.insert(state.clone()) {
                found.push(state);
            }
        }
        if found.len() > MOST_STATES {
            return Err(Error::plan(format!(
                "the published recurrence goes through every way to cut the graph in two, of which there are more than \
                 {MOST_STATES} here; without compat it can be planned"
            )));
        }
        at += 1;
    }
    found.sort_by_key(Bits::count);
    let whole = found.last().map_or(0, Bits::count);
    if whole < count {
        let missed = (0..count).find(|&n| found.last().is_none_or(|all| !all.has(n))).unwrap_or(0);
        return Err(Error::plan(format!(
            "node {:?} does not hang together with the first source {:?}, from which the published recurrence sets out; without \
             compat it can be planned",
            graph.nodes()[missed].name,
            graph.nodes()[first].name
        )));
    }
    Ok(found.into_iter().map(|nodes| state(graph, &ancestors, nodes)).collect())
}

fn state(graph: &CostGraph, ancestors: &[Bits], nodes: Bits) -> State {
    let all = graph.nodes();
    let is_frontier = |n: &usize| graph.readers(*n).iter().all(|&r| !nodes.has(r));
    let frontier: Vec<usize> = nodes.iter().filter(is_frontier).collect();
    // The original counts an ancestor of a frontier node if any of its readers is not another ancestor of that node, also where
    // that reader is another part of the state.
    let is_kept = |n: &usize| {
        let beyond =
            |&f: &usize| f != *n && ancestors[f].has(*n) && graph.readers(*n).iter().any(|&r| !ancestors[f].has(r));
        is_frontier(n) || frontier.iter().any(beyond)
    };
    State {
        seconds: nodes.iter().map(|n| all[n].seconds()).sum(),
        param_bytes: nodes.iter().map(|n| all[n].param_bytes).sum(),
        output_bytes: nodes.iter().filter(is_kept).map(|n| all[n].output_bytes).sum(),
        nodes,
    }
}

/// Each node and all that it depends on.
fn ancestors(graph: &CostGraph) -> Vec<Bits> {
    let count = graph.nodes().len();
    let mut all = vec![Bits::none(count); count];
    for &n in graph.order() {
        let mut own = Bits::none(count);
        own.insert(n);
        graph.sources(n).iter().for_each(|&s| own.join(&all[s]));
        all[n] = own;
    }
    all
}
