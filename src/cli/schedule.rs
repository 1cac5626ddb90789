//! `pipewright schedule`
use super::print_json;
use crate::{
    Result,
    pipeline::schedule::{Kind, Wiring, lower, make},
};

#[derive(clap::Args)]
pub(super) struct Args {
    /// sequential, gpipe, 1f1b, pipedream, pipedream-vertical or pipedream-nostash
    #[arg(long)]
    kind: Kind,
    /// Workers, a stage each
    #[arg(long, default_value_t = 4)]
    workers: usize,
    /// Micro-batches (asynchronous kinds: minibatches)
    #[arg(long, default_value_t = 8)]
    micro_batches: usize,
    /// With the messages between the workers
    #[arg(long)]
    lowered: bool,
    /// Prints one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(serde::Serialize)]
struct Answer {
    instructions: Vec<Vec<String>>,
}

pub(super) fn run(args: &Args) -> Result<()> {
    let mut programs = make(args.kind, args.workers, args.micro_batches)?;
    if args.lowered {
        programs = lower(&programs, &Wiring::straight(args.workers))?;
    }
    let text = |worker: usize| programs.stream(worker).map(|inst| inst.to_string()).collect::<Vec<_>>();
    let instructions: Vec<Vec<String>> = (0..args.workers).map(text).collect();
    if args.json {
        return print_json(&Answer { instructions });
    }
    for (worker, insts) in instructions.iter().enumerate() {
        println!("worker {worker}: {}", insts.join(" "));
    }
    Ok(())
}
