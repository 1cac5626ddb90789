//! IDX, the format of MNIST and its successors: big-endian, two zero bytes, a type, the number of axes, the length of each
//! axis (u32), then the values; raw or gzip.
use super::Images;
use crate::{Error, Result, hex::hex};
use flate2::bufread::MultiGzDecoder;
use md5::{Digest, Md5};
use std::{
    fs::File,
    io::{BufRead, BufReader, ErrorKind, Read},
    path::{Path, PathBuf},
};

/// The type code of unsigned bytes, the only one that images and labels come in.
const UNSIGNED_BYTES: u8 = 8;

impl Images {
    /// Grey images of `classes` classes from a pair of IDX files, gzip or raw: unsigned bytes `[n,h,w]` and labels `[n]`.
    ///
    /// # Errors
    /// If a file cannot be read, or is not what its header says, or the two do not fit together.
    pub fn from_idx(name: &str, images: impl AsRef<Path>, labels: impl AsRef<Path>, classes: usize) -> Result<Images> {
        join(name, Idx::read(images.as_ref(), 3)?, Idx::read(labels.as_ref(), 1)?, classes)
    }
}

/// An IDX file of unsigned bytes.
pub(crate) struct Idx {
    path: PathBuf,
    shape: Vec<usize>,
    values: Vec<u8>,
    md5: String,
}

impl Idx {
    /// Reads the file `path` of `axes` axes, gzip or raw.
    ///
    /// # Errors
    /// If it cannot be read, has another type or number of axes, or is shorter or longer than its header says.
    pub(crate) fn read(path: &Path, axes: u8) -> Result<Idx> {
        let mut input = Input::open(path)?;
        let header = 4 + 4 * usize::from(axes);
        let mut bytes = Vec::new();
        input.up_to(4, &mut bytes)?;
        let magic = [0, 0, UNSIGNED_BYTES, axes];
        if bytes.len() < 4 {
            return Err(input.short(bytes.len(), header));
        }
        if bytes != magic {
            let (got, want) = (hex(&bytes), hex(&magic));
            return Err(
                input.wrong(format!("byte 0: magic number {got}, expected {want} (unsigned bytes, {axes} axes)"))
            );
        }
        input.up_to(header - 4, &mut bytes)?;
        if bytes.len() < header {
            return Err(input.short(bytes.len(), header));
        }
        let shape: Vec<usize> =
            bytes[4..].chunks_exact(4).map(|b| b.iter().fold(0, |n, &b| n << 8 | usize::from(b))).collect();
        let whole = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).and_then(|n| n.checked_add(header));
        let whole = whole.ok_or_else(|| input.wrong(format!("byte 4: {shape:?} is too large")))?;
        input.up_to(whole - header, &mut bytes)?;
        if bytes.len() < whole {
            return Err(input.short(bytes.len(), whole));
        }
        input.up_to(1, &mut bytes)?;
        if bytes.len() > whole {
            return Err(input.wrong(format!("goes on after byte {whole}, where its header {shape:?} says it ends")));
        }
        let md5 = hex(&Md5::digest(&bytes));
        Ok(Idx { path: path.into(), shape, values: bytes.split_off(header), md5 })
    }

    /// Checks the MD5 sum of the uncompressed file.
    pub(crate) fn expect_md5(self, want: &str) -> Result<Idx> {
        if self.md5 == want {
            return Ok(self);
        }
        let got = &self.md5;
        Err(Error::data(format!("{}: MD5 of the uncompressed file is {got}, expected {want}", self.path.display())))
    }
}

/// Images [n,h,w] and their labels [n], below `classes`.
pub(crate) fn join(name: &str, images: Idx, labels: Idx, classes: usize) -> Result<Images> {
    let (&[n, h, w], &[m]) = (&images.shape[..], &labels.shape[..]) else {
        return Err(Error::data(format!(
            "{name}: images [n,h,w] and labels [n] expected, got {:?} and {:?}",
            images.shape, labels.shape
        )));
    };
    if n != m {
        return Err(Error::data(format!(
            "{} has {n} images, but {} has {m} labels",
            images.path.display(),
            labels.path.display()
        )));
    }
    if let Some((i, label)) = labels.values.iter().enumerate().find(|&(_, &l)| usize::from(l) >= classes) {
        let (path, at) = (labels.path.display(), 8 + i);
        return Err(Error::data(format!("{path}: byte {at} (sample {i}): label {label}, expected below {classes}")));
    }
    Images::new(name, [h, w, 1], classes, images.values, labels.values.into_iter().map(i64::from).collect())
}

/// The file `stem` of the folder `dir`, or else `stem.gz`.
///
/// # Errors
/// If neither is there.
pub(crate) fn find(dir: &Path, stem: &str) -> Result<PathBuf> {
    let all = [dir.join(stem), dir.join(format!("{stem}.gz"))];
    let found = all.iter().find(|p| p.is_file()).cloned();
    found.ok_or_else(|| Error::data(format!("{}: no file {stem} or {stem}.gz", dir.display())))
}

/// A file, uncompressed on the way if it is gzip (known by its first two bytes).
struct Input<'a> {
    path: &'a Path,
    gzip: bool,
    reader: Box<dyn Read>,
}

impl<'a> Input<'a> {
    fn open(path: &'a Path) -> Result<Input<'a>> {
        let mut file = BufReader::with_capacity(1 << 18, File::open(path).map_err(|e| Error::io(path, e))?);
        let gzip = file.fill_buf().map_err(|e| Error::io(path, e))?.starts_with(&[0x1f, 0x8b]);
        let reader: Box<dyn Read> = if gzip { Box::new(MultiGzDecoder::new(file)) } else { Box::new(file) };
        Ok(Input { path, gzip, reader })
    }

    /// Appends the next `n` bytes to `bytes`, or as many as are left.
    fn up_to(&mut self, n: usize, bytes: &mut Vec<u8>) -> Result<()> {
        match self.reader.by_ref().take(n as u64).read_to_end(bytes) {
            Ok(_) => Ok(()),
            Err(e)
                if self.gzip
                    && matches!(
                        e.kind(),
                        ErrorKind::InvalidInput | ErrorKind::InvalidData | ErrorKind::UnexpectedEof
                    ) =>
            {
                Err(self.wrong(format!("damaged gzip after byte {} of its contents: {e}", bytes.len())))
            }
            Err(e) => Err(Error::io(self.path, e)),
        }
    }

    fn short(&self, have: usize, want: usize) -> Error {
        self.wrong(format!("cut off: it ends at byte {have}, expected {want} bytes"))
    }

    fn wrong(&self, message: String) -> Error {
        let kind = if self.gzip { " (uncompressed)" } else { "" };
        Error::data(format!("{}{kind}: {message}", self.path.display()))
    }
}
