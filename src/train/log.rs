//! A log for every worker: a file in the run's folder, and warnings on standard error.
use crate::{Error, Result};
use std::{env, fs::File, io::IsTerminal, path::Path, sync::Mutex};
use tracing::subscriber::{DefaultGuard, NoSubscriber};
use tracing_subscriber::{EnvFilter, Layer, Registry, filter::LevelFilter, fmt, layer::SubscriberExt};

/// From now on, until the guard is dropped, what this thread logs goes to `logs/rank-R.log` in the run's folder (if it has one)
/// and, as far as `RUST_LOG` says (warnings, if it says nothing), to standard error. A program that has a subscriber of its own
/// keeps it, and there is no file.
pub(super) fn attach(out: Option<&Path>, rank: usize, goes_on: bool) -> Result<Option<DefaultGuard>> {
    if !tracing::dispatcher::get_default(|d| d.is::<NoSubscriber>()) {
        return Ok(None);
    }
    let filter = EnvFilter::builder().with_default_directive(LevelFilter::WARN.into()).from_env_lossy();
    // Colours are for people: not for files and pipes, and not for those who set NO_COLOR.
    let colours = std::io::stderr().is_terminal() && env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
    let console = fmt::layer().with_writer(std::io::stderr).with_ansi(colours).without_time().with_target(false);
    let console = console.with_filter(filter);
    let file = out.map(|out| open(&out.join("logs"), rank, goes_on)).transpose()?;
    let file = file.map(|file| {
        fmt::layer().with_writer(Mutex::new(file)).with_ansi(false).with_target(false).with_filter(LevelFilter::DEBUG)
    });
    Ok(Some(tracing::subscriber::set_default(Registry::default().with(file).with(console))))
}

fn open(folder: &Path, rank: usize, goes_on: bool) -> Result<File> {
    std::fs::create_dir_all(folder).map_err(|e| Error::io(folder, e))?;
    let path = folder.join(format!("rank-{rank}.log"));
    let mut options = File::options();
    options.create(true).write(true).append(goes_on).truncate(!goes_on);
    options.open(&path).map_err(|e| Error::io(&path, e))
}
