//! `pipewright bench`
mod cases;
mod peak;
mod products;

use super::{print_found, train};
use crate::{Result, pipeline::profile::Profile, train::Session};
use std::time::Instant;

#[derive(clap::Subcommand)]
pub(super) enum Command {
    /// Times single training steps of a pipeline that has filled up. Takes the flags of `train`, or a case by name.
    Step(Box<Step>),
    /// Measures what multiply-adds reach in registers, on several cores at once: the limit, and whether the machine is quiet.
    Peak(peak::Args),
    /// Times the matrix products of the cases, with operands that come from beyond a core's own caches.
    Products(products::Args),
}

#[derive(clap::Args)]
pub(super) struct Step {
    /// Minibatches before the clock starts [default: 8, of a case 2]
    #[arg(long)]
    warm: Option<u64>,
    /// Of a model and shapes that other frameworks are measured with too, on one worker; of the other flags it takes --threads,
    /// --steps, --warm and --json
    #[arg(long, value_name = "NAME", conflicts_with_all = cases::FIXED)]
    case: Option<String>,
    #[command(flatten)]
    train: train::Args,
}

/// Steps before the clock starts, and those that are timed, unless `--warm` and `--steps` say how many.
const WARM: u64 = 8;
const STEPS: u64 = 32;

#[derive(serde::Serialize)]
struct Answer {
    schedule: String,
    workers: usize,
    /// The median, on the slowest worker.
    seconds_per_step: f64,
    samples_per_s: f64,
    /// Floating-point operations a second of each core in use, in billions.
    gflops_per_core: f64,
    /// Of the timed steps and the draining of the pipeline.
    efficiency: f64,
    busy: Vec<f64>,
    bubble_fraction: f64,
    overhead_us: f64,
    instructions: Vec<u64>,
}

pub(super) fn run(command: Command) -> Result<()> {
    let step = match command {
        Command::Step(step) => step,
        Command::Peak(args) => return peak::run(&args),
        Command::Products(args) => return products::run(&args),
    };
    if let Some(name) = &step.case {
        return cases::run(name, &step.train, step.warm);
    }
    let mut args = step.train.with_config()?;
    let (steps, warm) = (args.steps.take().unwrap_or(STEPS).max(1), step.warm.unwrap_or(WARM));
    let (data, model) = args.task()?;
    let (batch, dtype) = (args.batch().min(data.train.len()), args.dtype()?);
    let operations = Profile::operations(&model.graph, dtype, batch)?;
    let cores_each = args.threads.unwrap_or(1);
    let trainer = args.trainer()?;
    let (answer, rank) = trainer.run_with(|session| {
        let seconds = time(session, warm, steps)?;
        let report = session.report()?;
        let answer = Answer {
            seconds_per_step: seconds,
            samples_per_s: batch as f64 / seconds,
            gflops_per_core: operations / seconds / (report.workers * cores_each) as f64 / 1e9,
            schedule: report.schedule,
            workers: report.workers,
            efficiency: report.efficiency,
            busy: report.busy,
            bubble_fraction: report.bubble_fraction,
            overhead_us: report.overhead_us,
            instructions: report.instructions,
        };
        Ok((answer, report.worker))
    })?;
    let words = format!(
        "{} on {} workers: {:.3} ms a step, {:.1} samples/s, {:.1} GFLOP/s a core, {:.1} % efficiency, {:.1} µs of overhead an \
         instruction",
        answer.schedule,
        answer.workers,
        1e3 * answer.seconds_per_step,
        answer.samples_per_s,
        answer.gflops_per_core,
        100.0 * answer.efficiency,
        answer.overhead_us
    );
    print_found(rank, args.json, &answer, &words)
}

/// The median seconds of a step on the slowest worker, after `warm` steps.
fn time(session: &mut Session, warm: u64, steps: u64) -> Result<f64> {
    let mut times = Vec::new();
    let mut last = Instant::now();
    for step in 0..warm.saturating_add(steps) {
        // An epoch's end is no end here.
        let batch = match session.next_batch()? {
            Some(batch) => Some(batch),
            None => session.next_batch()?,
        };
        let Some(batch) = batch else { break };
        session.step(&batch)?;
        let now = Instant::now();
        if step >= warm {
            times.push((now - last).as_secs_f64());
        }
        last = now;
        if step + 1 == warm {
            session.reset_clock();
        }
    }
    times.sort_by(f64::total_cmp);
    let median = times.get(times.len() / 2).copied().unwrap_or(f64::NAN);
    Ok(session.gather(&median)?.into_iter().fold(0.0, f64::max))
}
