//! `pipewright schedule`
use super::{print, print_json, replicas};
use crate::{
    Error, Result,
    pipeline::schedule::{
        Kind, Programs, Shape, Wiring, lower, make, make_for, simulate, simulate::Costs, verify, verify::StageFacts,
    },
};
use std::path::PathBuf;

#[derive(clap::Args)]
pub(super) struct Args {
    /// sequential, gpipe, 1f1b, pipedream, pipedream-vertical or pipedream-nostash
    #[arg(long, required_unless_present = "check")]
    kind: Option<Kind>,
    /// Workers, a stage each
    #[arg(long, default_value_t = 4)]
    workers: usize,
    /// Workers of each stage, as in 2-1-1, instead of one
    #[arg(long, value_name = "SHAPE", conflicts_with = "workers")]
    replicas: Option<String>,
    /// Micro-batches (asynchronous kinds: minibatches)
    #[arg(long, default_value_t = 8)]
    micro_batches: usize,
    /// With the messages between the workers
    #[arg(long)]
    lowered: bool,
    /// Proves the programs of a file as this command prints it, edited or not; adds messages if it has none
    #[arg(long, value_name = "FILE", conflicts_with_all = ["kind", "workers", "micro_batches", "lowered"])]
    check: Option<PathBuf>,
    /// Prints one JSON object
    #[arg(long)]
    json: bool,
}

/// What a proof found, and a simulation in which F, I and W take 1 each and all else nothing.
#[derive(serde::Serialize)]
struct Found {
    makespan: f64,
    bubble_fraction: f64,
    /// By worker, as all peaks.
    peak_activations: Vec<usize>,
    peak_receives: Vec<usize>,
    peak_sends: Vec<usize>,
    /// By stage, the most of its workers.
    weight_versions: Vec<usize>,
    staleness: Vec<usize>,
}

#[derive(serde::Serialize)]
struct Answer {
    #[serde(flatten)]
    found: Found,
    /// By worker, as they run.
    instructions: Vec<Vec<String>>,
}

/// Instructions that are too many to be listed one by one.
const TOO_MANY: usize = 1 << 22;

impl Found {
    /// Proves programs that have messages.
    fn new(programs: &Programs, wiring: &Wiring) -> Result<Found> {
        let facts = verify(programs, wiring)?;
        let most = |of: &dyn Fn(&StageFacts) -> usize| -> Vec<usize> {
            let on = |stage| facts.stages.iter().filter(move |s| s.stage == stage);
            (0..wiring.stages.len()).map(|stage| on(stage).map(of).max().unwrap_or(0)).collect()
        };
        let timeline = simulate(programs, wiring, &Costs::uniform(wiring, 1.0, 1.0, 1.0))?;
        Ok(Found {
            makespan: timeline.makespan,
            bubble_fraction: timeline.bubble_fraction(),
            peak_activations: facts.workers.iter().map(|w| w.peak_activations).collect(),
            peak_receives: facts.workers.iter().map(|w| w.peak_receives).collect(),
            peak_sends: facts.workers.iter().map(|w| w.peak_sends).collect(),
            weight_versions: most(&|s| s.weight_versions),
            staleness: most(&|s| s.staleness),
        })
    }

    /// In words, each line after `start`.
    fn describe(&self, start: &str) -> String {
        let mut text = format!(
            "{start}safe; where F, I and W take 1 each: makespan {}, bubble {:.1} %\n",
            self.makespan,
            100.0 * self.bubble_fraction
        );
        for (worker, activations) in self.peak_activations.iter().enumerate() {
            let (receives, sends) = (self.peak_receives[worker], self.peak_sends[worker]);
            text += &format!(
                "{start}worker {worker}, at most: micro-batches in flight {activations}, receives open {receives}, sends {sends}\n"
            );
        }
        for (stage, versions) in self.weight_versions.iter().enumerate() {
            let staleness = self.staleness[stage];
            text += &format!("{start}stage {stage}, at most: weight versions {versions}, staleness {staleness}\n");
        }
        text
    }
}

pub(super) fn run(args: &Args) -> Result<()> {
    let replicas = args.replicas.as_deref().map(replicas).transpose()?;
    let programs = match (&args.check, args.kind, &replicas) {
        (Some(path), ..) => Programs::load(path)?,
        (None, Some(kind), None) => make(kind, args.workers, args.micro_batches)?,
        (None, Some(kind), Some(replicas)) => make_for(kind, &Shape::new(replicas)?, args.micro_batches)?,
        (None, None, _) => return Err(Error::config("either --kind or --check expected")),
    };
    let wiring = match &replicas {
        Some(replicas) => Wiring::replicated(replicas),
        None => Wiring::straight(programs.workers.len()),
    };
    let lowered = if programs.is_lowered() { programs.clone() } else { lower(&programs, &wiring)? };
    let found = Found::new(&lowered, &wiring)?;
    let shown = if args.lowered { &lowered } else { &programs };
    if args.json {
        let length = shown.workers.iter().map(|p| p.len()).fold(0, usize::saturating_add);
        if length > TOO_MANY {
            return Err(Error::schedule(format!("{length} instructions are too many for a list")));
        }
        let list = |worker| shown.stream(worker).map(|inst| inst.to_string()).collect();
        return print_json(&Answer { found, instructions: (0..shown.workers.len()).map(list).collect() });
    }
    match args.check {
        Some(_) => print(&found.describe("")),
        None => print(&format!("{}\n{}", shown.to_text(), found.describe("# "))),
    }
}
