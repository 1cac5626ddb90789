//! CIFAR-10 and CIFAR-100 (Krizhevsky 2009) in their binary version: records of one label byte (CIFAR-100: a coarse and a fine
//! one) and 3,072 pixels, first all red, then all green, then all blue ones.
use super::{Data, Images, Transform, root};
use crate::{Error, Result};
use std::{
    fs,
    path::{Path, PathBuf},
};

const SIDE: usize = 32;
const PLANE: usize = SIDE * SIDE;

/// One of the two sets.
struct Layout {
    name: &'static str,
    /// The folder inside the published archive.
    folder: &'static str,
    archive: &'static str,
    /// Label bytes before the pixels; the last one is the class.
    labels: usize,
    classes: usize,
    train: &'static [&'static str],
    test: &'static str,
    /// Records of each file of `train`, and of `test`.
    records: [usize; 2],
    /// Of the training images, by channel.
    mean: [f32; 3],
    std: [f32; 3],
}

const CIFAR10: Layout = Layout {
    name: "cifar10",
    folder: "cifar-10-batches-bin",
    archive: "cifar-10-binary.tar.gz",
    labels: 1,
    classes: 10,
    train: &["data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin", "data_batch_4.bin", "data_batch_5.bin"],
    test: "test_batch.bin",
    records: [10_000, 10_000],
    mean: [0.4914, 0.4822, 0.4465],
    std: [0.2470, 0.2435, 0.2616],
};

const CIFAR100: Layout = Layout {
    name: "cifar100",
    folder: "cifar-100-binary",
    archive: "cifar-100-binary.tar.gz",
    labels: 2,
    classes: 100,
    train: &["train.bin"],
    test: "test.bin",
    records: [50_000, 10_000],
    mean: [0.5071, 0.4865, 0.4409],
    std: [0.2673, 0.2564, 0.2762],
};

/// CIFAR-10 from the folder `dir` (or its folder `cifar-10-batches-bin`): 50,000 and 10,000 images. Fields: `image`
/// `f32[32,32,3]`, normalised, in training cropped (4 pixels) and flipped at random, and `label: i64[]`, below 10.
///
/// # Errors
/// If a file is missing, or has another size, or a label out of range.
pub fn cifar10(dir: impl AsRef<Path>) -> Result<Data> {
    CIFAR10.read(dir.as_ref())
}

/// CIFAR-100 from the folder `dir` (or its folder `cifar-100-binary`), with the fine labels, below 100; otherwise like
/// [`cifar10`].
///
/// # Errors
/// As for [`cifar10`].
pub fn cifar100(dir: impl AsRef<Path>) -> Result<Data> {
    CIFAR100.read(dir.as_ref())
}

/// CIFAR-10 from `$PIPEWRIGHT_DATA`.
pub(crate) fn find_cifar10() -> Result<Data> {
    CIFAR10.find()
}

/// CIFAR-100 from `$PIPEWRIGHT_DATA`.
pub(crate) fn find_cifar100() -> Result<Data> {
    CIFAR100.find()
}

impl Layout {
    fn find(&self) -> Result<Data> {
        let Layout { name, folder, archive, .. } = self;
        let root = root()?.ok_or_else(|| {
            Error::data(format!("{name}: the environment variable PIPEWRIGHT_DATA must name the folder that holds {folder} (of {archive})"))
        })?;
        self.read(&root)
    }

    fn read(&self, dir: &Path) -> Result<Data> {
        let inner = dir.join(self.folder);
        let dir = if inner.is_dir() { &inner } else { dir };
        let train: Vec<PathBuf> = self.train.iter().map(|f| dir.join(f)).collect();
        let test = [dir.join(self.test)];
        if let Some(missing) = train.iter().chain(&test).find(|p| !p.is_file()) {
            return Err(Error::data(format!("{}: no such file; unpack {} there", missing.display(), self.archive)));
        }
        let [per_train, per_test] = self.records;
        Ok(Data::new(self.images(self.name.into(), &train, per_train)?)
            .with_test(self.images(format!("{} test", self.name), &test, per_test)?)
            .with_transform(Transform::random_crop("image", 4))
            .with_transform(Transform::horizontal_flip("image"))
            .with_transform(Transform::normalise("image", &self.mean, &self.std)))
    }

    fn images(&self, name: String, files: &[PathBuf], records: usize) -> Result<Images> {
        let (mut pixels, mut labels) = (Vec::with_capacity(files.len() * records * 3 * PLANE), Vec::new());
        for path in files {
            self.append(path, records, &mut pixels, &mut labels)?;
        }
        Images::new(&name, [SIDE, SIDE, 3], self.classes, pixels, labels)
    }

    /// Reads one file of `records` records.
    fn append(&self, path: &Path, records: usize, pixels: &mut Vec<u8>, labels: &mut Vec<i64>) -> Result<()> {
        let bytes = fs::read(path).map_err(|e| Error::io(path, e))?;
        let (path, size) = (path.display(), self.labels + 3 * PLANE);
        if bytes.len() != records * size {
            let (have, want, at) = (bytes.len(), records * size, bytes.len() / size);
            let how = if have < want { format!("cut off in record {at}") } else { "too long".into() };
            return Err(Error::data(format!(
                "{path}: {how}: {have} bytes, expected {want} ({records} records of {size})"
            )));
        }
        for (i, record) in bytes.chunks_exact(size).enumerate() {
            let (label, planes) = record.split_at(self.labels);
            let class = label[self.labels - 1];
            if usize::from(class) >= self.classes {
                let (at, n) = (i * size + self.labels - 1, self.classes);
                return Err(Error::data(format!("{path}: byte {at} (record {i}): label {class}, expected below {n}")));
            }
            labels.push(i64::from(class));
            pixels.extend((0..PLANE).flat_map(|p| [planes[p], planes[PLANE + p], planes[2 * PLANE + p]]));
        }
        Ok(())
    }
}
