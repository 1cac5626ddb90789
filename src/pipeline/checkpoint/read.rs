//! Reading checkpoints: finding the newest complete one, and single tensors by name.
use super::{COMMIT, Commit, FORMAT, POSITION, Position, Role, UPDATES, Written, file_type, parse_name};
use crate::{
    Context, Error, Result,
    hex::hex,
    tensor::{DType, Device, Tensor},
};
use safetensors::tensor::{Metadata, TensorInfo};
use sha2::{Digest, Sha256};
use std::{
    collections::HashMap,
    fs::{self, File},
    io::{Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    sync::OnceLock,
};

/// The longest header of a safetensors file that is believed.
const LONGEST_HEADER: u64 = 100_000_000;

/// A complete checkpoint.
pub struct Checkpoint {
    folder: PathBuf,
    position: Position,
    files: Vec<StageFile>,
    /// For each tensor its file, by position in `files`, and where it is in there.
    index: HashMap<String, (usize, TensorInfo)>,
}

/// A safetensors file whose header was read.
struct StageFile {
    path: PathBuf,
    listed: Written,
    /// Where the tensors begin.
    start: u64,
    updates: u64,
    /// Set once its contents were found to be those that `COMMIT` lists.
    checked: OnceLock<()>,
}

/// The newest complete checkpoint of a folder.
pub struct Latest {
    /// If there is one.
    pub checkpoint: Option<Checkpoint>,
    /// Why newer ones were passed over, newest first.
    pub ignored: Vec<Error>,
}

/// The newest complete checkpoint in `root`, every byte of it checked. Broken ones are passed over with a warning. A folder that
/// does not exist has none.
///
/// # Errors
/// If the folder cannot be read.
pub fn latest(root: &Path) -> Result<Latest> {
    let mut ignored = Vec::new();
    if !root.exists() {
        return Ok(Latest { checkpoint: None, ignored });
    }
    for name in entries(root)?.iter().rev() {
        let path = root.join(name);
        match parse_name(name) {
            // What is still being written was never promised.
            None | Some((_, Role::Aside)) => continue,
            Some(_) => {}
        }
        match open(&path).and_then(|c| c.verify().map(|()| c)) {
            Ok(c) => return Ok(Latest { checkpoint: Some(c), ignored }),
            Err(e) => {
                tracing::warn!("checkpoint {} is ignored: {e}", path.display());
                ignored.push(e);
            }
        }
    }
    Ok(Latest { checkpoint: None, ignored })
}

/// Whether `folder` is a checkpoint, and not a folder of them.
pub fn is_one(folder: &Path) -> bool {
    folder.join(COMMIT).exists()
}

/// Whether there are checkpoints in `root`, complete or not.
///
/// # Errors
/// If the folder is there but cannot be read.
pub fn any(root: &Path) -> Result<bool> {
    Ok(root.exists() && !entries(root)?.is_empty())
}

/// The names in `root` that are those of checkpoints, by step, the final one of a step last.
pub(super) fn entries(root: &Path) -> Result<Vec<String>> {
    let io = |e| Error::io(root, e);
    let mut found = Vec::new();
    for entry in fs::read_dir(root).map_err(io)? {
        let name = entry.map_err(io)?.file_name();
        found.extend(name.to_str().and_then(|n| Some((parse_name(n)?, n.to_string()))));
    }
    found.sort();
    Ok(found.into_iter().map(|(_, name)| name).collect())
}

/// The checkpoint in `folder`: what it holds and whether its files are there with the right lengths. Their contents are checked
/// when a tensor is read from them, or by [`Checkpoint::verify`].
///
/// # Errors
/// If it is not complete, or a file is missing, truncated or not what it should be: with the file's name.
pub fn open(folder: &Path) -> Result<Checkpoint> {
    let path = folder.join(COMMIT);
    if !path.exists() {
        return Err(Error::checkpoint(format!("{}: not complete, there is no {COMMIT}", folder.display())));
    }
    let commit: Commit = json(&path, &fs::read(&path).map_err(|e| Error::io(&path, e))?)?;
    if commit.format != FORMAT {
        let found = commit.format;
        return Err(Error::checkpoint(format!("{}: format {FORMAT} expected, got {found}", path.display())));
    }
    let (mut position, mut files, mut index) = (None, Vec::new(), HashMap::new());
    for listed in commit.files {
        if Path::new(&listed.name).file_name().is_none_or(|n| n != listed.name.as_str()) {
            return Err(Error::checkpoint(format!(
                "{} lists {:?}, which is no file name",
                path.display(),
                listed.name
            )));
        }
        let path = folder.join(&listed.name);
        let bytes = fs::metadata(&path).map_err(|e| Error::io(&path, e))?.len();
        if bytes != listed.bytes {
            let want = listed.bytes;
            return Err(Error::checkpoint(format!("{}: {want} bytes expected, it has {bytes}", path.display())));
        }
        if listed.name == POSITION {
            let text = fs::read(&path).map_err(|e| Error::io(&path, e))?;
            expect_hash(&path, &listed, &hex(&Sha256::digest(&text)))?;
            position = Some(json(&path, &text)?);
            continue;
        }
        let (file, tensors) = StageFile::open(path, listed)?;
        for (name, info) in tensors {
            if let Some((other, _)) = index.insert(name.clone(), (files.len(), info)) {
                let other: &StageFile = files.get(other).unwrap_or(&file);
                let (a, b) = (other.path.display(), file.path.display());
                return Err(Error::checkpoint(format!("tensor {name:?} is in {a} and in {b}")));
            }
        }
        files.push(file);
    }
    let position: Position =
        position.ok_or_else(|| Error::checkpoint(format!("{} lists no {POSITION}", path.display())))?;
    // Every minibatch is an update of every stage.
    if let Some(file) = files.iter().find(|f| f.updates != position.minibatch) {
        let (want, got, path) = (position.minibatch, file.updates, file.path.display());
        return Err(Error::checkpoint(format!(
            "{path}: {want} updates expected, as many as the minibatches of {POSITION}, it has seen {got}"
        )));
    }
    Ok(Checkpoint { folder: folder.to_path_buf(), position, files, index })
}

fn json<T: serde::de::DeserializeOwned>(path: &Path, text: &[u8]) -> Result<T> {
    serde_json::from_slice(text).map_err(|e| Error::checkpoint(format!("{}: {e}", path.display())))
}

fn expect_hash(path: &Path, listed: &Written, got: &str) -> Result<()> {
    if listed.sha256 == got {
        return Ok(());
    }
    let want = &listed.sha256;
    Err(Error::checkpoint(format!("{}: SHA-256 {want} expected, it has {got}; the file is damaged", path.display())))
}

impl StageFile {
    /// The file and its tensors, in their order there, so that every rank complains of the same one.
    fn open(path: PathBuf, listed: Written) -> Result<(StageFile, Vec<(String, TensorInfo)>)> {
        let not = |why: String| Error::checkpoint(format!("{}: not a safetensors file: {why}", path.display()));
        let io = |e| Error::io(&path, e);
        let mut file = File::open(&path).map_err(io)?;
        if listed.bytes < 8 {
            return Err(not(format!("it has {} bytes", listed.bytes)));
        }
        let mut length = [0; 8];
        file.read_exact(&mut length).map_err(io)?;
        let length = u64::from_le_bytes(length);
        if length > LONGEST_HEADER.min(listed.bytes - 8) {
            return Err(not(format!("a header of {length} bytes in a file of {}", listed.bytes)));
        }
        let mut head = vec![0; length as usize];
        file.read_exact(&mut head).map_err(io)?;
        let head: Metadata = serde_json::from_slice(&head).map_err(|e| not(e.to_string()))?;
        let (want, got) = (head.data_len() as u64, listed.bytes - 8 - length);
        if want != got {
            return Err(not(format!("its header describes {want} bytes of tensors, there are {got}")));
        }
        let updates = head.metadata().as_ref().and_then(|m| m.get(UPDATES)?.parse().ok());
        let updates = updates.ok_or_else(|| not(format!("its metadata has no number {UPDATES:?}")))?;
        let with_info = |name: String| head.info(&name).cloned().map(|info| (name, info));
        let tensors = head.offset_keys().into_iter().filter_map(with_info).collect();
        Ok((StageFile { path, listed, start: 8 + length, updates, checked: OnceLock::new() }, tensors))
    }

    fn check(&self) -> Result<()> {
        if self.checked.get().is_some() {
            return Ok(());
        }
        let io = |e| Error::io(&self.path, e);
        let mut file = File::open(&self.path).map_err(io)?;
        let (mut hash, mut buf) = (Sha256::new(), vec![0; 1 << 20]);
        loop {
            match file.read(&mut buf).map_err(io)? {
                0 => break,
                n => hash.update(&buf[..n]),
            }
        }
        expect_hash(&self.path, &self.listed, &hex(&hash.finalize()))?;
        self.checked.get_or_init(|| ());
        Ok(())
    }
}

impl Checkpoint {
    /// Its folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Where the run stood.
    pub fn position(&self) -> &Position {
        &self.position
    }

    /// The names of its tensors, in order.
    pub fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.index.keys().map(String::as_str).collect();
        names.sort_unstable();
        names
    }

    /// Checks the contents of all files.
    ///
    /// # Errors
    /// With the name of a file that is damaged.
    pub fn verify(&self) -> Result<()> {
        self.files.iter().try_for_each(StageFile::check)
    }

    fn find(&self, name: &str) -> Result<(&StageFile, &TensorInfo)> {
        let found = self.index.get(name).and_then(|(file, info)| Some((self.files.get(*file)?, info)));
        found.ok_or_else(|| {
            let (folder, n) = (self.folder.display(), self.index.len());
            Error::checkpoint(format!("{folder}: no tensor {name:?} among the {n} in its files"))
        })
    }

    /// The tensor called `name`.
    ///
    /// # Errors
    /// If there is none, it has another type or shape, or its file is damaged: with file, tensor, what was expected and what is
    /// there.
    pub fn read(&self, name: &str, dtype: DType, shape: &[usize], device: &Device) -> Result<Tensor> {
        let (file, info) = self.find(name)?;
        if info.dtype != file_type(dtype) || info.shape != shape {
            let (path, got) = (file.path.display(), format!("{:?}{:?}", info.dtype, info.shape).to_lowercase());
            return Err(Error::checkpoint(format!("{path}: tensor {name:?}: {dtype}{shape:?} expected, it is {got}")));
        }
        file.check()?;
        let io = |e| Error::io(&file.path, e);
        let (from, to) = info.data_offsets;
        let mut bytes = vec![0; to - from];
        let mut reader = File::open(&file.path).map_err(io)?;
        reader.seek(SeekFrom::Start(file.start + from as u64)).map_err(io)?;
        reader.read_exact(&mut bytes).map_err(io)?;
        Tensor::from_bytes(&bytes, dtype, shape, device).context(|| format!("tensor {name:?}"))
    }
}
