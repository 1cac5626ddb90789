//! The file operations that a checkpoint is made of. All of them go through [`Disk`], so that the tests can cut the power
//! before any one of them.
use crate::{Error, Result};
use std::{
    fs::{self, File, OpenOptions},
    io::Write,
    path::Path,
};

/// What changes a disk.
pub(super) trait Disk {
    /// Makes a folder and those above it.
    fn create_folder(&self, path: &Path) -> Result<()>;
    /// Writes a file, whole, and waits until the disk has it.
    fn write(&self, path: &Path, parts: &[&[u8]]) -> Result<()>;
    /// Gives a file or folder another name.
    fn rename(&self, from: &Path, to: &Path) -> Result<()>;
    /// Waits until the disk has the names in a folder.
    fn sync_folder(&self, path: &Path) -> Result<()>;
    /// Removes a file; it may be gone already.
    fn remove_file(&self, path: &Path) -> Result<()>;
    /// Removes a folder with what is in it; it may be gone already.
    fn remove_folder(&self, path: &Path) -> Result<()>;
}

/// The disk of this machine.
pub(super) struct Real;

impl Disk for Real {
    fn create_folder(&self, path: &Path) -> Result<()> {
        fs::create_dir_all(path).map_err(|e| Error::io(path, e))
    }

    fn write(&self, path: &Path, parts: &[&[u8]]) -> Result<()> {
        let write = || -> std::io::Result<()> {
            let mut file = OpenOptions::new().write(true).create(true).truncate(true).open(path)?;
            parts.iter().try_for_each(|p| file.write_all(p))?;
            file.sync_all()
        };
        write().map_err(|e| Error::io(path, e))
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        fs::rename(from, to).map_err(|e| Error::io(from, e).context(format!("renaming to {}", to.display())))
    }

    fn sync_folder(&self, path: &Path) -> Result<()> {
        File::open(path).and_then(|f| f.sync_all()).map_err(|e| Error::io(path, e))
    }

    fn remove_file(&self, path: &Path) -> Result<()> {
        gone(path, fs::remove_file(path))
    }

    fn remove_folder(&self, path: &Path) -> Result<()> {
        gone(path, fs::remove_dir_all(path))
    }
}

fn gone(path: &Path, removed: std::io::Result<()>) -> Result<()> {
    match removed {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io(path, e)),
        _ => Ok(()),
    }
}
