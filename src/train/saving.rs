//! Checkpoints of a run: all workers call the same functions at the same place.
use super::{engine::Engine, files::Files, gather::share, planning, settings::Recipe};
use crate::{
    Context, Error, Result,
    data::{Data, Sampler},
    pipeline::{
        checkpoint::{self, Checkpoint, Position},
        plan::Plan,
        transport::Transport,
    },
    tensor::Isa,
};
use std::{
    fs::{File, TryLockError},
    path::{Path, PathBuf},
};

/// The line of [`identity`] that names the instruction set.
const INSTRUCTIONS: &str = "instructions: ";

/// What a run must have in common with one that it goes on from, a line a matter.
pub(super) fn identity(recipe: &Recipe, data: &Data, isa: Isa) -> String {
    let s = &recipe.settings;
    let schedule = if s.schedule.is_synchronous() { "synchronous" } else { s.schedule.name() };
    // Every synchronous schedule gives the same numbers, for every number of workers.
    let micro_batches = if s.schedule.is_synchronous() { s.micro_batches } else { 1 };
    [
        format!("model: {}", planning::fingerprint(&recipe.graph)),
        format!("data: {}, {} samples", data.train.name(), data.train.len()),
        format!("optimizer: {}", recipe.optimizer.describe()),
        format!("schedule: {schedule}"),
        format!("batch: {}", s.batch),
        format!("micro-batches: {micro_batches}"),
        format!("seed: {}", s.seed),
        format!("dtype: {}", s.dtype),
        format!("{INSTRUCTIONS}{isa}"),
        format!("winograd: {}", s.winograd),
        format!("rates scaled by workers: {}", s.scale_rate),
        format!("updates wait for all workers: {}", !s.asp),
        format!("compression: gradients {}, edges {}", s.compress_gradients, s.wire()),
    ]
    .join("\n")
}

/// Writes a checkpoint into `root`, of which the newest `keep` stay. Nothing may be in flight. Returns its folder.
pub(super) fn save(engine: &mut Engine, root: &Path, position: &Position, keep: usize) -> Result<PathBuf> {
    let first = engine.worker().rank() == 0;
    let folder = if first { Some(checkpoint::begin(root, position.minibatch)?) } else { None };
    let folder = engine.share(folder)?.ok_or_else(|| Error::checkpoint("no worker began it"))?;
    let mut mine = Vec::new();
    for stage in engine.worker().stages().filter(|s| engine.is_first_of(s)) {
        let tensors = checkpoint::stage_tensors(stage, &*engine.recipe().optimizer);
        mine.push(checkpoint::write_stage(&folder, stage.index(), stage.weights().minibatches(), &tensors)?);
    }
    let files = engine.gather(&mine)?.concat();
    let done = if first { Some(checkpoint::commit(root, &files, position, keep)?) } else { None };
    engine.share(done)?.ok_or_else(|| Error::checkpoint("no worker completed it"))
}

/// Epochs and samples done before minibatch `next`.
pub(super) fn stand(sampler: &Sampler, next: u64) -> (u64, u64) {
    let (epoch, index) = sampler.locate(next);
    let seen = |n: u64, size: usize| n.saturating_mul(size as u64);
    (epoch, seen(epoch, sampler.samples()).saturating_add(seen(index, sampler.batch())))
}

/// Makes sure that a run which goes on from nothing is not mistaken for an earlier one in the same folder.
///
/// # Errors
/// If that one left checkpoints.
pub(super) fn refuse_to_mix(files: &Files) -> Result<()> {
    let roots = [files.checkpoints(), files.best()];
    for root in roots.into_iter().flatten().filter(|_| files.resume.is_none()) {
        if checkpoint::any(&root)? {
            let root = root.display();
            return Err(Error::config(format!(
                "{root} holds checkpoints of an earlier run: resume that run, or choose another folder"
            )));
        }
    }
    Ok(())
}

/// Keeps other runs out of the run's folder for as long as the first worker holds what this returns. No worker returns before the
/// folder is this run's.
///
/// # Errors
/// If another run that has not ended writes there.
pub(super) fn lock(files: &Files, transport: &mut dyn Transport) -> Result<Option<File>> {
    let Some(out) = &files.out else { return Ok(None) };
    let held = if transport.rank() == 0 { Some(lock_folder(out)?) } else { None };
    transport.all_gather(&[])?;
    Ok(held)
}

fn lock_folder(out: &Path) -> Result<File> {
    let io = |e| Error::io(out, e);
    std::fs::create_dir_all(out).map_err(io)?;
    let file = File::options().create(true).append(true).open(out.join("lock")).map_err(io)?;
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => {
            let out = out.display();
            Err(Error::config(format!(
                "{out}: another run is writing there: wait for its end, or choose another folder"
            )))
        }
        Err(TryLockError::Error(e)) => {
            tracing::warn!("{}: cannot be locked against other runs: {e}", out.display());
            Ok(file)
        }
        Ok(()) => Ok(file),
    }
}

/// The checkpoint that a run goes on from, the same on every worker: the one in `folder`, or the newest of the run in `folder`.
pub(super) fn find(folder: &Path, transport: &mut dyn Transport) -> Result<Checkpoint> {
    let found = if transport.rank() == 0 { Some(newest(folder)?.folder().to_path_buf()) } else { None };
    let found = share(transport, found)?.ok_or_else(|| Error::checkpoint("the first worker found none"))?;
    checkpoint::open(&found)
}

fn newest(folder: &Path) -> Result<Checkpoint> {
    if checkpoint::is_one(folder) {
        let found = checkpoint::open(folder)?;
        return found.verify().map(|()| found);
    }
    let inside = folder.join("checkpoints");
    let root = if inside.is_dir() { &inside } else { folder };
    let found = checkpoint::latest(root)?;
    found.checkpoint.ok_or_else(|| {
        let why: Vec<String> = found.ignored.iter().map(|e| format!("; {e}")).collect();
        Error::checkpoint(format!("{}: there is no complete checkpoint to go on from{}", root.display(), why.concat()))
    })
}

/// The instruction set that `found` was computed with, by its name.
pub(super) fn instructions(found: &Checkpoint) -> Option<&str> {
    found.position().config.lines().find_map(|line| line.strip_prefix(INSTRUCTIONS))
}

/// Makes sure that `found` is of a run like this one, whose minibatches are those of `sampler`.
///
/// # Errors
/// Naming what differs.
pub(super) fn check(found: &Checkpoint, identity: &str, sampler: &Sampler) -> Result<()> {
    // Of the instructions all workers have settled already.
    fn matters(text: &str) -> Vec<&str> {
        text.lines().filter(|line| !line.starts_with(INSTRUCTIONS)).collect()
    }
    let (theirs, ours) = (matters(&found.position().config), matters(identity));
    for (a, b) in theirs.iter().zip(&ours) {
        if a != b {
            let folder = found.folder().display();
            return Err(Error::checkpoint(format!("{folder} is of another run: it has {a:?}, this run {b:?}")));
        }
    }
    if theirs.len() != ours.len() {
        return Err(Error::checkpoint(format!("{} is of another kind of run: {theirs:?}", found.folder().display())));
    }
    let (at, folder) = (found.position(), found.folder().display());
    let (want, got) = (stand(sampler, at.minibatch), (at.epoch, at.samples));
    if want != got {
        let at = at.minibatch;
        return Err(Error::checkpoint(format!(
            "{folder}: {want:?} epochs and samples expected before minibatch {at}, its position says {got:?}"
        )));
    }
    Ok(())
}

/// The plan that wrote `found`, if it is one for `workers` workers: going on with it gives an asynchronous run its numbers.
pub(super) fn plan_of(found: &Checkpoint, recipe: &Recipe, workers: usize) -> Result<Option<Plan>> {
    let place = || found.folder().display().to_string();
    let plan = Plan::from_text(&recipe.graph, &found.position().plan).context(place)?;
    Ok((plan.workers() == workers).then_some(plan))
}

/// Gives this worker's stages what `found` holds.
pub(super) fn load(engine: &mut Engine, found: &Checkpoint) -> Result<()> {
    let optimizer = engine.recipe().optimizer.clone();
    for stage in engine.worker_mut().stages_mut() {
        checkpoint::load_stage(found, stage, &*optimizer)?;
    }
    engine.resume_at(found.position().minibatch);
    Ok(())
}
