//! `pipewright plan`
use super::{print, print_json, profiled::Profiled};
use crate::{
    Error, Result,
    pipeline::{
        planner::{Link, plan_straight},
        profile::NodeCost,
    },
    tensor::DType,
};
use std::path::PathBuf;

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    profiled: Profiled,
    /// Stages, one worker each
    #[arg(long, default_value_t = 4)]
    stages: usize,
    /// Micro-batches that share an update
    #[arg(long, default_value_t = 1)]
    micro_batches: usize,
    /// Bytes per second of the links between workers
    #[arg(long, default_value_t = 5e9)]
    bandwidth: f64,
    /// Seconds of latency of the links
    #[arg(long, default_value_t = 1e-6)]
    latency: f64,
    /// Writes the profile here
    #[arg(long)]
    save_profile: Option<PathBuf>,
    /// Prints one JSON object instead of the plan file
    #[arg(long)]
    json: bool,
}

#[derive(serde::Serialize)]
struct Answer {
    seconds_per_micro_batch: f64,
    stage_seconds: Vec<f64>,
    cut_seconds: Vec<f64>,
    stages: Vec<Vec<String>>,
}

pub(super) fn run(args: &Args) -> Result<()> {
    let (graph, profile) = args.profiled.load()?;
    let size = args.profiled.micro_batch;
    if let Some(path) = &args.save_profile {
        profile.save(path)?;
    }
    let link = Link { latency: args.latency, bandwidth: args.bandwidth };
    if args.micro_batches == 0 {
        return Err(Error::config("micro_batches: 1 or more expected, got 0"));
    }
    let costs: Vec<NodeCost> = profile.at(size)?.iter().map(|c| c.per_micro_batch(args.micro_batches)).collect();
    let planned = plan_straight(&graph, &costs, link, args.stages, size, DType::F32)?;
    if args.json {
        let names = |nodes: &Vec<usize>| nodes.iter().map(|&n| graph.nodes()[n].name.clone()).collect();
        return print_json(&Answer {
            seconds_per_micro_batch: planned.bottleneck(),
            stages: planned.plan.stages().iter().map(|s| names(&s.nodes)).collect(),
            stage_seconds: planned.stage_seconds,
            cut_seconds: planned.cut_seconds,
        });
    }
    let text = planned.plan.to_text_with(&graph, &planned.stage_seconds);
    print(&format!("{text}\n# in steady state {:.1} samples/s\n", size as f64 / planned.bottleneck()))
}
