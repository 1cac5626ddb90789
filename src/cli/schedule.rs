//! `pipewright schedule`
use super::print_json;
use crate::{
    Result,
    pipeline::schedule::{Inst, Kind, Wiring, lower, make},
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
    let text = |worker: usize| programs.stream(worker).map(short).collect::<Vec<_>>();
    let instructions: Vec<Vec<String>> = (0..args.workers).map(text).collect();
    if args.json {
        return print_json(&Answer { instructions });
    }
    for (worker, insts) in instructions.iter().enumerate() {
        println!("worker {worker}: {}", insts.join(" "));
    }
    Ok(())
}

/// An instruction as in the field's papers: `2F0` is the forward pass of micro-batch 0 by stage 2.
fn short(inst: Inst) -> String {
    match inst {
        Inst::F { stage, mb, .. } => format!("{stage}F{mb}"),
        Inst::B { stage, mb } => format!("{stage}B{mb}"),
        Inst::I { stage, mb } => format!("{stage}I{mb}"),
        Inst::W { stage, mb } => format!("{stage}W{mb}"),
        Inst::Step { stage, .. } => format!("{stage}S"),
        Inst::Free { stage, version } => format!("{stage}free{version}"),
        Inst::Post(m) => format!("post({}.{})", m.edge, m.mb),
        Inst::Recv(m) => format!("recv({}.{})", m.edge, m.mb),
        Inst::Send(m) => format!("send({}.{})", m.edge, m.mb),
        Inst::Wait(m) => format!("wait({}.{})", m.edge, m.mb),
    }
}
