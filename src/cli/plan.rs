//! `pipewright plan`
mod jointly;
mod workers;

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
    /// Stages, one worker each [default: 4]; with --workers, the most stages there may be
    #[arg(long)]
    stages: Option<usize>,
    /// Workers, innermost level first: 4,4 are four servers of four. Plans replicated stages, of a model, or of the published text
    /// format with --profile
    #[arg(long, value_delimiter = ',')]
    workers: Vec<usize>,
    /// A file that describes the workers and their links, in place of --workers: they may be unequal
    #[arg(long, conflicts_with_all = ["workers", "bandwidth", "latency"])]
    topology: Option<PathBuf>,
    /// Micro-batches that share an update [default: 1]; with --schedule, the numbers to choose from [default: 2,4,8,16,32]
    #[arg(long, value_delimiter = ',')]
    micro_batches: Vec<usize>,
    /// Bytes per second of the links between workers, per direction [default: 5e9]; with --workers, of each level
    #[arg(long, value_delimiter = ',')]
    bandwidth: Vec<f64>,
    /// Seconds of latency of the links [default: 1e-6]; with --workers, of each level [default: 0]
    #[arg(long, value_delimiter = ',')]
    latency: Vec<f64>,
    #[command(flatten)]
    replicated: workers::Options,
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
    if !args.workers.is_empty() || args.topology.is_some() {
        return workers::run(args);
    }
    args.replicated.refuse_without_workers(args)?;
    let (graph, profile) = args.profiled.load()?;
    let size = args.profiled.micro_batch;
    if let Some(path) = &args.save_profile {
        profile.save(path)?;
    }
    let link =
        Link { latency: one("latency", &args.latency, 1e-6)?, bandwidth: one("bandwidth", &args.bandwidth, 5e9)? };
    let micro_batches = one("micro_batches", &args.micro_batches, 1)?;
    if micro_batches == 0 {
        return Err(Error::config("micro_batches: 1 or more expected, got 0"));
    }
    let costs: Vec<NodeCost> = profile.at(size)?.iter().map(|c| c.per_micro_batch(micro_batches)).collect();
    let planned = plan_straight(&graph, &costs, link, args.stages.unwrap_or(4), size, DType::F32)?;
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

/// The value of an option of which there is one where there are no levels.
fn one<T: Copy + std::fmt::Debug>(name: &str, given: &[T], default: T) -> Result<T> {
    match given {
        [] => Ok(default),
        [value] => Ok(*value),
        _ => Err(Error::config(format!("{name}: one number expected without --workers, got {given:?}"))),
    }
}
