//! Writing checkpoints so that a crash at any instant leaves the newest complete one whole.
use super::{
    COMMIT, Commit, FORMAT, POSITION, Position, Role, UPDATES, Written, aside,
    disk::{Disk, Real},
    file_type, folder, parse_name,
    read::{entries, open},
    replaced,
};
use crate::{Context, Error, Result, hex::hex, tensor::Tensor};
use safetensors::tensor::{Metadata, TensorInfo};
use sha2::{Digest, Sha256};
use std::{
    collections::{HashMap, HashSet},
    path::{Path, PathBuf},
};

/// Makes the empty folder in which the checkpoint after minibatch `step` is written, and returns its path. To be called by one
/// rank, before the stages write.
///
/// # Errors
/// If the disk refuses.
pub fn begin(root: &Path, step: u64) -> Result<PathBuf> {
    begin_on(&Real, root, step)
}

pub(super) fn begin_on(disk: &dyn Disk, root: &Path, step: u64) -> Result<PathBuf> {
    let aside = aside(root, step);
    disk.remove_folder(&aside)?;
    disk.create_folder(&aside)?;
    Ok(aside)
}

/// Writes the tensors of stage `stage`, whose weights have seen `updates` updates, into the folder that [`begin`] made.
///
/// # Errors
/// If a name is given twice, or the disk refuses.
pub fn write_stage(folder: &Path, stage: usize, updates: u64, tensors: &[(String, Tensor)]) -> Result<Written> {
    write_stage_on(&Real, folder, stage, updates, tensors).context(|| format!("checkpoint of stage {stage}"))
}

pub(super) fn write_stage_on(
    disk: &dyn Disk,
    folder: &Path,
    stage: usize,
    updates: u64,
    tensors: &[(String, Tensor)],
) -> Result<Written> {
    let mut names = HashSet::new();
    if let Some((name, _)) = tensors.iter().find(|(name, _)| !names.insert(name)) {
        return Err(Error::checkpoint(format!("tensor {name:?} is given twice")));
    }
    let whole: Vec<(&String, Tensor)> =
        tensors.iter().map(|(name, t)| Ok((name, t.contiguous()?))).collect::<Result<_>>()?;
    // By size of the element, so that all are aligned, then by name, so that equal stages make equal files.
    let mut order: Vec<&(&String, Tensor)> = whole.iter().collect();
    order.sort_by_key(|(name, t)| (std::cmp::Reverse(t.dtype().size()), *name));
    let mut end = 0;
    let infos = order.iter().map(|(name, t)| {
        let start = end;
        end += t.byte_len();
        let info = TensorInfo { dtype: file_type(t.dtype()), shape: t.shape().to_vec(), data_offsets: (start, end) };
        (name.to_string(), info)
    });
    let about = HashMap::from([(UPDATES.to_string(), updates.to_string())]);
    let head = Metadata::new(Some(about), infos.collect()).map_err(|e| Error::checkpoint(format!("header: {e}")))?;
    let mut head = serde_json::to_vec(&head).map_err(|e| Error::checkpoint(format!("header: {e}")))?;
    head.resize(head.len().next_multiple_of(8), b' ');
    let length = (head.len() as u64).to_le_bytes();
    let mut parts: Vec<&[u8]> = vec![&length, &head];
    for (_, t) in &order {
        parts.push(t.host_bytes()?);
    }
    write(disk, folder, &format!("stage-{stage}.safetensors"), &parts)
}

fn write(disk: &dyn Disk, folder: &Path, name: &str, parts: &[&[u8]]) -> Result<Written> {
    disk.write(&folder.join(name), parts)?;
    let mut hash = Sha256::new();
    parts.iter().for_each(|p| hash.update(p));
    let bytes = parts.iter().map(|p| p.len() as u64).sum();
    Ok(Written { name: name.into(), bytes, sha256: hex(&hash.finalize()) })
}

/// Makes the checkpoint after minibatch `position.minibatch` complete, once every stage has written its file, and returns its
/// folder. Then only the newest `keep` complete ones stay (at least this one), and what crashes left is removed. To be called by
/// one rank.
///
/// # Errors
/// If no stage wrote a file, or the disk refuses.
pub fn commit(root: &Path, files: &[Written], position: &Position, keep: usize) -> Result<PathBuf> {
    commit_on(&Real, root, files, position, keep).context(|| format!("checkpoint {}", position.minibatch))
}

pub(super) fn commit_on(
    disk: &dyn Disk,
    root: &Path,
    files: &[Written],
    position: &Position,
    keep: usize,
) -> Result<PathBuf> {
    let step = position.minibatch;
    if files.is_empty() {
        return Err(Error::checkpoint("no stage wrote a file"));
    }
    let (from, to, old) = (aside(root, step), folder(root, step), replaced(root, step));
    let json = |e: serde_json::Error| Error::checkpoint(e.to_string());
    let mut files = files.to_vec();
    files.push(write(disk, &from, POSITION, &[&serde_json::to_vec_pretty(position).map_err(json)?])?);
    files.sort_by(|a, b| a.name.cmp(&b.name));
    disk.sync_folder(&from)?;
    if to.exists() {
        // An earlier run's checkpoint of this step, if whole, stays readable until the new one is.
        match open(&to).and_then(|c| c.verify()) {
            Ok(()) => {
                disk.remove_folder(&old)?;
                disk.rename(&to, &old)?;
            }
            Err(_) => disk.remove_folder(&to)?,
        }
    }
    disk.rename(&from, &to)?;
    disk.sync_folder(root)?;
    let listed = serde_json::to_vec_pretty(&Commit { format: FORMAT, files }).map_err(json)?;
    let unnamed = to.join("COMMIT.tmp");
    disk.write(&unnamed, &[&listed])?;
    disk.rename(&unnamed, &to.join(COMMIT))?;
    disk.sync_folder(&to)?;
    prune(disk, root, step, keep)?;
    Ok(to)
}

/// Removes what is not among the newest `keep` complete checkpoints; the one after minibatch `just`, just written, always stays.
fn prune(disk: &dyn Disk, root: &Path, just: u64, keep: usize) -> Result<()> {
    let mut kept = 1;
    for name in entries(root)?.iter().rev() {
        let Some((step, role)) = parse_name(name) else { continue };
        let path = root.join(name);
        if (step, role) == (just, Role::Final) {
            continue;
        }
        let whole = role == Role::Final && open(&path).is_ok();
        if whole && kept < keep {
            kept += 1;
            continue;
        }
        // First what makes it complete, so that half a folder is never taken for a checkpoint.
        disk.remove_file(&path.join(COMMIT))?;
        disk.remove_folder(&path)?;
    }
    disk.sync_folder(root)
}
