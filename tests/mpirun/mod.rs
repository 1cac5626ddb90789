//! Runs this test program again as ranks of a real `mpirun`. MPI can be started once in a process, so every case is a job.
use crate::launcher;
use std::{
    process::Command,
    time::{Duration, Instant},
};

/// Names the case to the ranks.
const CASE: &str = "PIPEWRIGHT_TEST_CASE";

/// What a job ended with.
#[derive(Debug)]
pub struct Job {
    /// Whether all ranks ended well.
    pub success: bool,
    /// All that was printed.
    pub text: String,
    pub took: Duration,
}

/// The case that this process is to run as a rank.
pub fn case() -> Option<String> {
    std::env::var(CASE).ok()
}

/// Runs the ignored test `rank` of this program as `n` ranks that find `case`; `None`, with a message, without `mpirun`.
/// A job that hangs is ended after a minute and is no success.
pub fn mpirun(n: usize, case: &str, env: &[(&str, &str)]) -> Option<Job> {
    if !launcher::is_there() {
        return None;
    }
    let program = std::env::current_exe().expect("a test program knows its own path");
    let start = Instant::now();
    let out = launcher::configure(&mut Command::new("timeout"))
        .args(["-k", "5", "60", "mpirun", "--bind-to", "none", "-n", &n.to_string()])
        .arg(program)
        .args(["--exact", "rank", "--ignored", "--nocapture"])
        .env(CASE, case)
        .envs(env.iter().copied())
        .output()
        .expect("timeout is part of every system with mpirun");
    let text = format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    Some(Job { success: out.status.success(), text, took: start.elapsed() })
}
