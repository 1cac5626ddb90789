//! Plans as small text files, which may be written and edited by hand.
//!
//! ```toml
//! # what stands after a hash is for people
//! [[stage]]
//! worker = 0
//! nodes = ["conv2d1", "relu1"]
//!
//! [[stage]]
//! worker = 1
//! nodes = ["flatten1", "linear1", "cross_entropy1"]
//! ```
//! A stage on several workers has `workers = [1, 2]` instead of `worker`; `warm_up = 3` says how many forward passes each worker of
//! a stage does before its first backward pass in an asynchronous schedule, if it is not the published number.
//!
//! Or shorter, stage s on worker s, by the first layer of every stage but the first:
//! ```toml
//! cuts = ["flatten1"]
//! ```
//! The inputs of the graph belong to the first stage and need not be named.
use super::plan::{Plan, StagePlan};
use crate::{
    Context, Error, Result,
    layers::{Graph, NodeId},
};
use serde::Deserialize;
use std::path::Path;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    stage: Option<Vec<Stage>>,
    cuts: Option<Vec<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Stage {
    worker: Option<usize>,
    workers: Option<Vec<usize>>,
    warm_up: Option<usize>,
    nodes: Vec<String>,
}

impl Plan {
    /// The plan as text.
    pub fn to_text(&self, graph: &Graph) -> String {
        self.to_text_with(graph, &[])
    }

    /// The plan as text, with the seconds that each stage is predicted to take for a micro-batch, for people to read.
    pub fn to_text_with(&self, graph: &Graph, stage_seconds: &[f64]) -> String {
        let mut text = String::from("# A plan: the stages in order, each with its worker and its nodes.\n");
        for (s, stage) in self.stages().iter().enumerate() {
            let quoted = |n: &NodeId| toml::Value::String(graph.nodes()[*n].name.clone()).to_string();
            let names: Vec<String> = stage.nodes.iter().filter(|n| graph.is_layer(**n)).map(quoted).collect();
            let on = match stage.workers[..] {
                [worker] => format!("worker = {worker}"),
                ref workers => format!("workers = {workers:?}"),
            };
            let warm_up = stage.warm_up.map_or(String::new(), |w| format!("warm_up = {w}\n"));
            let seconds =
                stage_seconds.get(s).map_or(String::new(), |t| format!("# {:.3} ms a micro-batch\n", t * 1e3));
            text += &format!("\n{seconds}[[stage]]\n{on}\n{warm_up}nodes = [{}]\n", names.join(", "));
        }
        text
    }

    /// Reads what [`to_text`](Plan::to_text) wrote, or a person did.
    ///
    /// # Errors
    /// If it is not of one of the forms (with line and column), names a node that the graph does not have, names one twice or
    /// not at all, or is no plan for it.
    pub fn from_text(graph: &Graph, text: &str) -> Result<Plan> {
        let file: File = toml::from_str(text).map_err(|e| Error::plan(format!("not a plan: {e}")))?;
        match (file.stage, file.cuts) {
            (Some(stages), None) => from_stages(graph, &stages),
            (None, Some(cuts)) => from_cuts(graph, &cuts),
            _ => Err(Error::plan("not a plan: either [[stage]] entries or a list of `cuts` expected")),
        }
    }

    /// Reads a plan from a file.
    ///
    /// # Errors
    /// If it cannot be read, or as [`from_text`](Plan::from_text) says, with the file's name.
    pub fn load(graph: &Graph, path: &Path) -> Result<Plan> {
        let text = Error::read_text(path)?;
        Plan::from_text(graph, &text).context(|| path.display().to_string())
    }
}

fn from_stages(graph: &Graph, listed: &[Stage]) -> Result<Plan> {
    let mut stages = Vec::new();
    for (s, stage) in listed.iter().enumerate() {
        let find = |name: &String| graph.find(name).ok_or_else(|| unknown(graph, &format!("stage {s} names"), name));
        let mut nodes = stage.nodes.iter().map(find).collect::<Result<Vec<_>>>()?;
        if s == 0 {
            let unnamed: Vec<NodeId> =
                (0..graph.nodes().len()).filter(|n| !graph.is_layer(*n) && !nodes.contains(n)).collect();
            nodes.extend(unnamed);
        }
        let workers = match (stage.worker, &stage.workers) {
            (Some(worker), None) => vec![worker],
            (None, Some(workers)) => workers.clone(),
            _ => return Err(Error::plan(format!("stage {s}: either `worker` or `workers` expected"))),
        };
        stages.push(StagePlan { nodes, workers, warm_up: stage.warm_up });
    }
    let mut workers: Vec<usize> = stages.iter().flat_map(|s| s.workers.clone()).collect();
    workers.sort_unstable();
    if workers.iter().enumerate().any(|(i, &w)| i != w) {
        return Err(Error::plan(format!(
            "the stages must lie on workers 0 to {}, each on its own, got {workers:?}",
            workers.len().saturating_sub(1)
        )));
    }
    Plan::new(graph, stages)
}

fn from_cuts(graph: &Graph, names: &[String]) -> Result<Plan> {
    let mut cuts: Vec<NodeId> = Vec::new();
    for name in names {
        let cut = graph.find(name).ok_or_else(|| unknown(graph, "a cut before", name))?;
        if !graph.is_layer(cut) {
            return Err(Error::plan(format!("a cut before {name:?}, which is an input; a layer expected")));
        }
        if let Some(&last) = cuts.last().filter(|&&last| last >= cut) {
            let last = &graph.nodes()[last].name;
            return Err(Error::plan(format!("a cut before {name:?} after one before {last:?}: not the model's order")));
        }
        cuts.push(cut);
    }
    Plan::straight(graph, &cuts)
}

/// Says that the model has no node `name`, and which one it resembles, if any.
fn unknown(graph: &Graph, what: &str, name: &str) -> Error {
    let layers = graph.layers().map(|n| graph.nodes()[n].name.as_str());
    let nearest = layers.map(|n| (edits(name, n), n)).min().filter(|(edits, n)| *edits <= n.len() / 2);
    let hint = nearest.map_or(String::new(), |(_, n)| format!("; did you mean {n:?}?"));
    Error::plan(format!("{what} {name:?}, which the model does not have{hint}"))
}

/// The edit distance of two words, row by row.
fn edits(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, a) in a.chars().enumerate() {
        let mut before = std::mem::replace(&mut row[0], i + 1);
        for (j, &b) in b.iter().enumerate() {
            let best = (before + usize::from(a != b)).min(row[j] + 1).min(row[j + 1] + 1);
            before = std::mem::replace(&mut row[j + 1], best);
        }
    }
    row[b.len()]
}
