//! The power is cut before, within and after every file operation.
use super::{
    disk::{Disk, Real},
    write::{begin_on, commit_on, write_stage_on},
    *,
};
use crate::{
    Error, Result,
    tensor::{Device, Tensor},
};
use std::{cell::Cell, fs};

/// How much of the operation at which the power fails is done.
#[derive(Clone, Copy, Debug)]
enum Done {
    Nothing,
    Half,
    All,
}

/// A disk that works for `left` operations more.
struct Failing {
    left: Cell<usize>,
    done: Done,
}

impl Failing {
    /// Does `all`, or on the last operation what is done of it; after that nothing.
    fn run(&self, half: impl FnOnce(), all: impl FnOnce() -> Result<()>) -> Result<()> {
        let cut = || Error::checkpoint("the power failed");
        match self.left.get() {
            0 => Err(cut()),
            1 => {
                self.left.set(0);
                match self.done {
                    Done::Nothing => {}
                    Done::Half => half(),
                    Done::All => all()?,
                }
                Err(cut())
            }
            n => {
                self.left.set(n - 1);
                all()
            }
        }
    }
}

impl Disk for Failing {
    fn create_folder(&self, path: &Path) -> Result<()> {
        self.run(|| {}, || Real.create_folder(path))
    }
    fn write(&self, path: &Path, parts: &[&[u8]]) -> Result<()> {
        let whole = parts.concat();
        self.run(|| fs::write(path, &whole[..whole.len() / 2]).unwrap(), || Real.write(path, parts))
    }
    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        self.run(|| {}, || Real.rename(from, to))
    }
    fn sync_folder(&self, path: &Path) -> Result<()> {
        self.run(|| {}, || Real.sync_folder(path))
    }
    fn remove_file(&self, path: &Path) -> Result<()> {
        self.run(|| {}, || Real.remove_file(path))
    }
    fn remove_folder(&self, path: &Path) -> Result<()> {
        let half = || {
            for entry in fs::read_dir(path).into_iter().flatten().step_by(2) {
                fs::remove_file(entry.unwrap().path()).unwrap();
            }
        };
        self.run(half, || Real.remove_folder(path))
    }
}

fn save(disk: &dyn Disk, root: &Path, step: u64, value: f64, keep: usize) -> Result<()> {
    let device = Device::reference();
    let folder = begin_on(disk, root, step)?;
    let mut files = Vec::new();
    for stage in 0..2 {
        let t = Tensor::full(value + stage as f64, &[3, 2], DType::F32, &device)?;
        files.push(write_stage_on(disk, &folder, stage, step, &[(format!("linear{stage}.weight"), t)])?);
    }
    let position = Position { minibatch: step, seed: u64::MAX, ..Position::default() };
    commit_on(disk, root, &files, &position, keep)?;
    Ok(())
}

/// Step and value of the newest complete checkpoint, all of whose tensors must be of one saving.
fn newest(root: &Path) -> Result<(u64, f64)> {
    let found = latest(root)?;
    let c = found.checkpoint.ok_or_else(|| Error::checkpoint(format!("none is whole: {:?}", found.ignored)))?;
    let read = |name| Ok::<f64, Error>(c.read(name, DType::F32, &[3, 2], &Device::reference())?.to_f64()?[5]);
    let (a, b) = (read("linear0.weight")?, read("linear1.weight")?);
    assert_eq!(a + 1.0, b, "tensors of two savings in {:?}", c.folder());
    assert_eq!(c.position().seed, u64::MAX);
    Ok((c.position().minibatch, a))
}

/// Cuts the power at every operation of saving step 20 into what `before` made; `allowed` are the newest checkpoints that may
/// be found then.
fn cut_everywhere(keep: usize, before: &[(u64, f64)], allowed: &[(u64, f64)]) -> Result<()> {
    for done in [Done::Nothing, Done::Half, Done::All] {
        let mut operations = 0;
        loop {
            let root = tempfile::tempdir().map_err(|e| Error::io("a temporary folder", e))?;
            let root = root.path();
            before.iter().try_for_each(|&(step, value)| save(&Real, root, step, value, 9))?;
            operations += 1;
            let failing = Failing { left: Cell::new(operations), done };
            let saved = save(&failing, root, 20, 200.0, keep);
            let found = newest(root)?;
            assert!(allowed.contains(&found), "{done:?} at operation {operations}: found {found:?}");
            if saved.is_ok() {
                assert_eq!(found, (20, 200.0));
                break;
            }
            // The next run is not disturbed by what is left.
            save(&Real, root, 30, 300.0, keep)?;
            assert_eq!(newest(root)?, (30, 300.0));
            let left = fs::read_dir(root).map_err(|e| Error::io(root, e))?.count();
            assert!(left <= keep.max(1), "{done:?} at operation {operations}: {left} folders left of {keep}");
        }
        assert!(operations > 10, "the saving has more operations than {operations}");
    }
    Ok(())
}

#[test]
fn a_crash_leaves_the_newest_complete_one() -> Result<()> {
    for keep in [1, 2] {
        cut_everywhere(keep, &[(10, 100.0)], &[(10, 100.0), (20, 200.0)])?;
    }
    Ok(())
}

#[test]
fn a_crash_while_the_same_step_is_replaced_leaves_the_old_or_the_new() -> Result<()> {
    cut_everywhere(1, &[(20, 150.0)], &[(20, 150.0), (20, 200.0)])
}

#[test]
fn the_newest_k_stay_and_other_folders_are_left_alone() -> Result<()> {
    let root = tempfile::tempdir().map_err(|e| Error::io("a temporary folder", e))?;
    let root = root.path();
    for other in ["step-best", "notes", "step-1", "step-0000001"] {
        fs::create_dir(root.join(other)).map_err(|e| Error::io(root, e))?;
    }
    for step in [5, 1_000_000, 999_999, 1_000_001] {
        save(&Real, root, step, step as f64, 2)?;
    }
    let mut left: Vec<_> =
        fs::read_dir(root).map_err(|e| Error::io(root, e))?.flatten().map(|e| e.file_name()).collect();
    left.sort();
    assert_eq!(left, ["notes", "step-0000001", "step-1", "step-1000000", "step-1000001", "step-best"]);
    // One that was just written stays, though there are newer ones.
    save(&Real, root, 7, 7.0, 1)?;
    assert!(open(&folder(root, 7)).is_ok());
    Ok(())
}
