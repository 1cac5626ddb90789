//! `pipewright eval`
use super::{print_found, train};
use crate::{
    Context, Result,
    train::{CONFIG, Evaluation, Files},
};
use std::path::PathBuf;

#[derive(clap::Args)]
pub(super) struct Args {
    /// The folder of a run that the command line made
    run: PathBuf,
    /// Evaluates this checkpoint [default: the newest of the run; `RUN/best` is the folder of its best one]
    #[arg(long)]
    checkpoint: Option<PathBuf>,
    /// In-process workers; under mpirun the ranks are the workers [default: 1]
    #[arg(long)]
    workers: Option<usize>,
    /// Threads of each worker's kernels [default: those of the run]
    #[arg(long)]
    threads: Option<usize>,
    /// Seconds that a worker waits for others before the job ends; 0 for ever [default: 300]
    #[arg(long)]
    watchdog: Option<u64>,
    /// Prints one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(serde::Serialize)]
struct Answer {
    test_loss: f64,
    test_accuracy: Option<f64>,
    minibatches: u64,
}

pub(super) fn run(args: &Args) -> Result<()> {
    let mut settings = train::Args::load(&args.run.join(CONFIG)).context(|| {
        format!("{} is to be the folder of a run that `pipewright train --out` made", args.run.display())
    })?;
    settings.workers = args.workers;
    settings.threads = args.threads.or(settings.threads);
    settings.watchdog = args.watchdog.or(settings.watchdog);
    // Another number of workers needs another plan than the run had.
    settings.plan = None;
    (settings.out, settings.keep_best, settings.quiet) = (None, false, true);
    let resume = Some(args.checkpoint.clone().unwrap_or_else(|| args.run.clone()));
    let trainer =
        settings.trainer()?.files(Files { resume, any_instructions: true, ..Files::default() }).handle_signals(false);
    let (found, minibatches, rank): (Evaluation, u64, usize) =
        trainer.run_with(|session| Ok((session.evaluate()?, session.next_minibatch(), session.rank())))?;
    let answer = Answer { test_loss: found.loss, test_accuracy: found.accuracy, minibatches };
    let accuracy = answer.test_accuracy.map_or(String::new(), |a| format!(", accuracy {:.2} %", 100.0 * a));
    let words = format!("after {minibatches} minibatches: test loss {:.4}{accuracy}", answer.test_loss);
    print_found(rank, args.json, &answer, &words)
}
