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
//! The inputs of the graph belong to the first stage and need not be named.
use super::plan::{Plan, StagePlan};
use crate::{
    Error, Result,
    layers::{Graph, NodeKind},
};
use serde::Deserialize;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    stage: Vec<Stage>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Stage {
    worker: usize,
    nodes: Vec<String>,
}

impl Plan {
    /// The plan as text.
    pub fn to_text(&self, graph: &Graph) -> String {
        let mut text = String::from("# A plan: the stages in order, each with its worker and its nodes.\n");
        for stage in self.stages() {
            let is_layer = |n: &&usize| matches!(graph.nodes()[**n].kind, NodeKind::Layer(_));
            let names: Vec<String> =
                stage.nodes.iter().filter(is_layer).map(|&n| format!("{:?}", graph.nodes()[n].name)).collect();
            let worker = stage.workers.first().copied().unwrap_or(0);
            text += &format!("\n[[stage]]\nworker = {worker}\nnodes = [{}]\n", names.join(", "));
        }
        text
    }

    /// Reads what [`to_text`](Plan::to_text) wrote, or a person did.
    ///
    /// # Errors
    /// If it is not of that form (with line and column), names a node that the graph does not have, or is no plan for it.
    pub fn from_text(graph: &Graph, text: &str) -> Result<Plan> {
        let file: File = toml::from_str(text).map_err(|e| Error::plan(format!("not a plan: {e}")))?;
        let mut stages = Vec::new();
        for (s, stage) in file.stage.iter().enumerate() {
            let find = |name: &String| graph.find(name).ok_or_else(|| unknown(graph, s, name));
            let mut nodes = stage.nodes.iter().map(find).collect::<Result<Vec<_>>>()?;
            if s == 0 {
                let inputs = (0..graph.nodes().len()).filter(|&n| !matches!(graph.nodes()[n].kind, NodeKind::Layer(_)));
                let unnamed: Vec<usize> = inputs.filter(|n| !nodes.contains(n)).collect();
                nodes.extend(unnamed);
            }
            stages.push(StagePlan { nodes, workers: vec![stage.worker] });
        }
        let mut workers: Vec<usize> = file.stage.iter().map(|s| s.worker).collect();
        workers.sort_unstable();
        if workers.iter().enumerate().any(|(i, &w)| i != w) {
            return Err(Error::plan(format!(
                "the stages must lie on workers 0 to {}, one each, got {workers:?}",
                workers.len().saturating_sub(1)
            )));
        }
        Plan::new(graph, stages)
    }
}

fn unknown(graph: &Graph, stage: usize, name: &str) -> Error {
    let distance = |other: &str| {
        // Edit distance, row by row.
        let other: Vec<char> = other.chars().collect();
        let mut row: Vec<usize> = (0..=other.len()).collect();
        for (i, a) in name.chars().enumerate() {
            let mut before = std::mem::replace(&mut row[0], i + 1);
            for (j, &b) in other.iter().enumerate() {
                let best = (before + usize::from(a != b)).min(row[j] + 1).min(row[j + 1] + 1);
                before = std::mem::replace(&mut row[j + 1], best);
            }
        }
        row[other.len()]
    };
    let nearest = graph.nodes().iter().map(|n| &n.name).min_by_key(|n| distance(n));
    let hint = nearest.map_or(String::new(), |n| format!("; did you mean {n:?}?"));
    Error::plan(format!("stage {stage} names {name:?}, which the model does not have{hint}"))
}
