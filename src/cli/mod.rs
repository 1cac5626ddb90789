//! The command line: one file a command.
mod bench;
mod eval;
mod plan;
mod profile;
mod profiled;
mod schedule;
mod simulate;
mod train;

use crate::{Error, Result, aloud::aloud, pipeline::planner::replicas_of_shape};
use clap::{Parser, Subcommand};
use std::io::Write;

/// Trains deep networks as pipelines: profiles, partitions, proves and runs them, in one process or over MPI ranks.
#[derive(Parser)]
#[command(name = "pipewright", version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Trains a model; under mpirun, as one of its ranks.
    Train(Box<train::Args>),
    /// Evaluates a checkpoint of a run on the test set.
    Eval(eval::Args),
    /// Measures what each layer of a model costs.
    Profile(profile::Args),
    /// Profiles a model and prints the plan for a number of stages.
    Plan(plan::Args),
    /// Prints the programs of a schedule, or proves edited ones.
    Schedule(schedule::Args),
    /// Predicts how long a schedule takes, and draws it.
    Simulate(simulate::Args),
    /// Measures speed.
    #[command(subcommand)]
    Bench(bench::Command),
}

/// Runs the command that the process was started with; gives the exit status.
pub fn main() -> std::process::ExitCode {
    let done = match Cli::parse().command {
        Command::Train(args) => train::run(*args),
        Command::Eval(args) => eval::run(&args),
        Command::Profile(args) => profile::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Schedule(args) => schedule::run(&args),
        Command::Simulate(args) => simulate::run(&args),
        Command::Bench(command) => bench::run(command),
    };
    match done {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(e) => {
            aloud(&format!("error: {e}"));
            std::process::ExitCode::FAILURE
        }
    }
}

/// The workers of each stage that `--replicas` asks for.
fn replicas(text: &str) -> Result<Vec<usize>> {
    replicas_of_shape(text)
        .unwrap_or_else(|| Err(Error::config(format!("replicas: a shape such as 2-1-1 expected, got {text:?}"))))
}

/// Prints one JSON object on a line of its own.
fn print_json(value: &impl serde::Serialize) -> Result<()> {
    print(&(serde_json::to_string(value).map_err(|e| Error::config(format!("json: {e}")))? + "\n"))
}

/// Prints what the workers of a run found, on the first of them: as one JSON object, or in words.
fn print_found(rank: usize, json: bool, found: &impl serde::Serialize, words: &str) -> Result<()> {
    match (rank, json) {
        (0, true) => print_json(found),
        (0, false) => print(&format!("{words}\n")),
        _ => Ok(()),
    }
}

/// Prints `text`. That nobody reads to its end, as `head` does not, is no error.
fn print(text: &str) -> Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(Error::io("standard output", e)),
        _ => Ok(()),
    }
}
