//! `pipewright bench peak`
use crate::{
    Error, Result,
    cli::print_found,
    tensor::{Isa, check_threads},
};
use std::{thread, time::Duration};

#[derive(clap::Args)]
pub(in crate::cli) struct Args {
    /// Threads that measure at once [default: as many as there are cores]
    #[arg(long)]
    threads: Option<usize>,
    /// How long to measure
    #[arg(long, default_value_t = 200)]
    milliseconds: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(serde::Serialize)]
struct Answer {
    isa: &'static str,
    /// Billions of floating-point operations a second, of each thread.
    gflops: Vec<f64>,
}

pub(super) fn run(args: &Args) -> Result<()> {
    let threads = match args.threads {
        Some(threads) => threads,
        None => thread::available_parallelism().map_err(|e| Error::device(format!("cpu: cores: {e}")))?.get(),
    };
    check_threads(threads)?;
    let (isa, time) = (Isa::chosen()?, Duration::from_millis(args.milliseconds));
    let flops: Result<Vec<f64>> = thread::scope(|s| {
        let start = |_| thread::Builder::new().spawn_scoped(s, || isa.peak_flops(time));
        let all: std::io::Result<Vec<_>> = (0..threads).map(start).collect();
        let all = all.map_err(|e| Error::device(format!("cpu: {threads} threads cannot be started: {e}")))?;
        all.into_iter().map(|t| t.join().map_err(|_| Error::device("a thread ended early"))?).collect()
    });
    let answer = Answer { isa: isa.name(), gflops: flops?.into_iter().map(|f| f / 1e9).collect() };
    let each: Vec<String> = answer.gflops.iter().map(|f| format!("{f:.1}")).collect();
    print_found(
        0,
        args.json,
        &answer,
        &format!("{}: {} GFLOP/s of multiply-adds in registers", answer.isa, each.join(", ")),
    )
}
