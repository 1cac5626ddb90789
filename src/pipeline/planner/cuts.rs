//! The places where a graph may be cut in two.
use super::{bits::Bits, cost::Held};
use crate::{Error, Result, pipeline::profile::CostGraph};
use std::collections::HashSet;

/// What stages up to some place hold: with every node all that it reads.
pub(super) struct Cut {
    pub(super) nodes: Bits,
    /// The sums over its nodes.
    pub(super) held: Held,
    /// Bytes of what is made before it and read behind it.
    pub(super) crossing: f64,
}

/// The cuts, each after those within it: the first has no node, the last all. They are all there are if these are not more than
/// `most`, else those along a few orders of the graph, thinned out to that many.
pub(super) fn cuts(graph: &CostGraph, most: usize) -> Vec<Cut> {
    let found = match graph.cuts_in_order() {
        Some(allowed) => along(graph, graph.order(), &|at| allowed[at], most),
        None => all(graph, most).unwrap_or_else(|| {
            let orders = [graph.order().to_vec(), narrow_order(graph)];
            orders.iter().flat_map(|order| along(graph, order, &|_| true, most / 2)).collect()
        }),
    };
    let mut known = HashSet::new();
    let mut found: Vec<Bits> = found.into_iter().filter(|cut| known.insert(cut.clone())).collect();
    found.sort_by_key(Bits::count);
    found.into_iter().map(|nodes| Cut::new(graph, nodes)).collect()
}

/// The cuts before these nodes in the order of the graph, and its ends.
///
/// # Errors
/// If one of them is not there, is the first, does not come after the one before, or must stay with the one before it.
pub(super) fn cuts_at(graph: &CostGraph, begins: &[usize]) -> Result<Vec<Cut>> {
    let mut nodes = Bits::none(graph.nodes().len());
    let mut found = vec![Cut::new(graph, nodes.clone())];
    let mut last = 0;
    for &n in begins {
        let place = graph.order().iter().position(|&o| o == n);
        let place = place.ok_or_else(|| Error::plan(format!("there is no node {n} to cut before")))?;
        let name = &graph.nodes()[n].name;
        if place <= last {
            let before = if last == 0 { "is the first node" } else { "does not come after the cut before" };
            return Err(Error::plan(format!("a cut before {name:?}, which {before}")));
        }
        if graph.cuts_in_order().is_some_and(|allowed| !allowed[place]) {
            return Err(Error::plan(format!("a cut before {name:?} would separate nodes with shared parameters")));
        }
        graph.order()[last..place].iter().for_each(|&o| nodes.insert(o));
        found.push(Cut::new(graph, nodes.clone()));
        last = place;
    }
    graph.order()[last..].iter().for_each(|&o| nodes.insert(o));
    found.push(Cut::new(graph, nodes));
    Ok(found)
}

impl Cut {
    fn new(graph: &CostGraph, nodes: Bits) -> Cut {
        let mut held = Held::default();
        nodes.iter().for_each(|n| held.add(graph, n));
        Cut { held, crossing: crossing(graph, &nodes), nodes }
    }
}

fn crossing(graph: &CostGraph, nodes: &Bits) -> f64 {
    let is_read = |n: &usize| graph.readers(*n).iter().any(|&r| !nodes.has(r));
    nodes.iter().filter(is_read).map(|n| graph.nodes()[n].output_bytes).sum()
}

/// All cuts, unless there are more than `most`.
fn all(graph: &CostGraph, most: usize) -> Option<Vec<Bits>> {
    let count = graph.nodes().len();
    let mut found = vec![Bits::none(count)];
    let mut known: HashSet<Bits> = found.iter().cloned().collect();
    let mut at = 0;
    while at < found.len() {
        let here = found[at].clone();
        let is_next = |n: &usize| !here.has(*n) && graph.sources(*n).iter().all(|&s| here.has(s));
        for n in (0..count).filter(is_next) {
            let mut next = here.clone();
            next.insert(n);
            if known.insert(next.clone()) {
                found.push(next);
            }
        }
        if found.len() > most {
            return None;
        }
        at += 1;
    }
    Some(found)
}

/// The cuts along an order, at places that are allowed: of more than `most` the one that least crosses in each of as many parts that
/// take equally long.
fn along(graph: &CostGraph, order: &[usize], is_allowed: &dyn Fn(usize) -> bool, most: usize) -> Vec<Bits> {
    let count = order.len();
    let mut cut = Bits::none(count);
    let (mut seconds, mut bytes) = (0.0, 0.0);
    // How many readers of each node are still to come.
    let mut unread: Vec<usize> = (0..count).map(|n| graph.readers(n).len()).collect();
    // Of each part the place that least crosses, and what does.
    let mut best: Vec<Option<(f64, Bits)>> = vec![None; most.clamp(2, count + 1) - 1];
    let whole = graph.seconds();
    for at in 1..count {
        let n = order[at - 1];
        let node = &graph.nodes()[n];
        cut.insert(n);
        seconds += node.seconds();
        bytes += if unread[n] > 0 { node.output_bytes } else { 0.0 };
        for &s in graph.sources(n) {
            unread[s] -= 1;
            bytes -= if unread[s] == 0 { graph.nodes()[s].output_bytes } else { 0.0 };
        }
        let parts = best.len();
        // Where there is room for all, every place is a part.
        let share = if parts >= count { at as f64 / count as f64 } else { seconds / whole };
        let part = if parts >= count { at } else { ((share * parts as f64) as usize).min(parts - 1) };
        if is_allowed(at) && best[part].as_ref().is_none_or(|(least, _)| bytes < *least) {
            best[part] = Some((bytes, cut.clone()));
        }
    }
    if let Some(&last) = order.last() {
        cut.insert(last);
    }
    let kept = best.into_iter().flatten().map(|(_, cut)| cut);
    [Bits::none(count)].into_iter().chain(kept).chain([cut]).collect()
}

/// An order along which little crosses: of the nodes that may come, always one after which the least does.
fn narrow_order(graph: &CostGraph) -> Vec<usize> {
    let count = graph.nodes().len();
    let mut waits: Vec<usize> = (0..count).map(|n| graph.sources(n).len()).collect();
    let mut unread: Vec<usize> = (0..count).map(|n| graph.readers(n).len()).collect();
    let mut ready: Vec<usize> = (0..count).filter(|&n| waits[n] == 0).collect();
    let mut order = Vec::new();
    loop {
        let more = |n: usize| {
            let done = graph.sources(n).iter().filter(|&&s| unread[s] == 1).map(|&s| graph.nodes()[s].output_bytes);
            let own = if graph.readers(n).is_empty() { 0.0 } else { graph.nodes()[n].output_bytes };
            own - done.sum::<f64>()
        };
        let Some(best) = (0..ready.len()).min_by(|&a, &b| more(ready[a]).total_cmp(&more(ready[b]))) else {
            return order;
        };
        let n = ready.remove(best);
        order.push(n);
        graph.sources(n).iter().for_each(|&s| unread[s] -= 1);
        for &r in graph.readers(n) {
            waits[r] -= 1;
            if waits[r] == 0 {
                ready.push(r);
            }
        }
    }
}
