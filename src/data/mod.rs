//! Data sets and how they reach the network.
//!
//! A [`Dataset`] gives samples by index; a [`Sampler`] says which samples make up which minibatch; [`Transform`]s normalise and
//! augment; a [`Loader`] puts it together as [`Batch`]es of tensors, ahead of time if wanted. All of it is addressed by number
//! and random only by seed and number, so a run can stop and go on anywhere and see the same data.
mod cifar;
mod dataset;
mod fashion;
mod idx;
mod images;
mod loader;
mod sampler;
mod synthetic;
mod transform;

pub use cifar::{cifar10, cifar100};
pub use dataset::{Dataset, Field, Sample};
pub use fashion::{fashion_mnist, fashion_mnist_from};
pub use images::Images;
pub use loader::{Batch, Loader, Prefetch};
pub use sampler::Sampler;
pub use synthetic::{synthetic, synthetic_tokens};
pub use transform::{Random, Transform};

use crate::{Error, Result, tensor::Device};
use std::{path::PathBuf, sync::Arc};

/// What a network is trained on: samples to train with, samples to test with, and what is done to them.
#[derive(Clone)]
pub struct Data {
    /// To train with.
    pub train: Arc<dyn Dataset>,
    /// To test with.
    pub test: Option<Arc<dyn Dataset>>,
    /// In order of application.
    pub transforms: Vec<Transform>,
}

impl Data {
    /// `train` alone, as it is.
    pub fn new(train: impl Dataset + 'static) -> Data {
        Data { train: Arc::new(train), test: None, transforms: Vec::new() }
    }

    /// Tested on `test`, which has the same fields.
    pub fn with_test(self, test: impl Dataset + 'static) -> Data {
        Data { test: Some(Arc::new(test)), ..self }
    }

    /// Changed by `transform` after those given before.
    pub fn with_transform(mut self, transform: Transform) -> Data {
        self.transforms.push(transform);
        self
    }

    /// Loaders of the two sets onto `device`: the first with augmentation, drawn from `seed`, the second without.
    ///
    /// # Errors
    /// If the sets have different fields, or as for [`Loader::new`].
    pub fn loaders(&self, device: &Device, seed: u64) -> Result<(Loader, Option<Loader>)> {
        let load = |set: &Arc<dyn Dataset>, train| Loader::new(set.clone(), &self.transforms, device, seed, train);
        if let Some(test) = self.test.as_ref().filter(|t| t.fields() != self.train.fields()) {
            let (a, b) = (self.train.fields(), test.fields());
            return Err(Error::data(format!(
                "{:?} is trained with the fields {a:?} but tested with {b:?}",
                self.train.name()
            )));
        }
        Ok((load(&self.train, true)?, self.test.as_ref().map(|t| load(t, false)).transpose()?))
    }
}

/// The most samples of a data set: what is held of each in memory stays in proportion.
const MOST_SAMPLES: u64 = 1 << 32;

/// Makes sure that a data set called `name` may have `len` samples.
fn check_len(name: &str, len: usize) -> Result<()> {
    if len as u64 <= MOST_SAMPLES {
        return Ok(());
    }
    Err(Error::data(format!("data set {name:?}: at most {MOST_SAMPLES} samples expected, got {len}")))
}

/// One data set that has a name on the command line.
struct Named {
    name: &'static str,
    /// What may follow the name, each part after a colon.
    parts: &'static str,
    make: fn(&Parts) -> Result<Data>,
}

/// Every data set that has a name on the command line: the list that help and messages come from.
const NAMED: &[Named] = &[
    Named { name: "fashion-mnist", parts: "", make: |_| fashion_mnist() },
    Named { name: "cifar10", parts: "", make: |_| cifar::find_cifar10() },
    Named { name: "cifar100", parts: "", make: |_| cifar::find_cifar100() },
    Named {
        name: "synthetic",
        parts: ":HxWxC:CLASSES:TRAIN:TEST",
        make: |p| synthetic(p.shape(0, [28, 28, 1])?, p.number(1, 10)?, p.number(2, 8192)?, p.number(3, 1024)?, 0),
    },
    Named {
        name: "synthetic-tokens",
        parts: ":LENGTH:VOCABULARY:TRAIN:TEST",
        make: |p| synthetic_tokens(p.number(0, 64)?, p.number(1, 256)?, p.number(2, 8192)?, p.number(3, 1024)?, 0),
    },
];

/// The data set that `text` names: `fashion-mnist`, `cifar10` and `cifar100` (in `$PIPEWRIGHT_DATA`), or
/// `synthetic:HxWxC:CLASSES:TRAIN:TEST` or `synthetic-tokens:LENGTH:VOCABULARY:TRAIN:TEST`, whose parts may be left out from the
/// end.
///
/// ```
/// use pipewright::data;
/// let d = data::by_name("synthetic:32x32x3:100")?;
/// assert_eq!(d.train.fields()[0].shape, [32, 32, 3]);
/// assert_eq!(d.train.classes(), Some(100));
/// # Ok::<(), pipewright::Error>(())
/// ```
///
/// # Errors
/// If there is none of that name, a part of it is not a number, or it cannot be read.
pub fn by_name(text: &str) -> Result<Data> {
    let mut parts = text.split(':');
    let name = parts.next().unwrap_or_default();
    let named = NAMED.iter().find(|n| n.name == name);
    let named =
        named.ok_or_else(|| Error::config(format!("no data set {name:?}; there are {}", names().join(", "))))?;
    let parts = Parts { form: format!("{name}{}", named.parts), text, parts: parts.collect() };
    if parts.parts.len() > named.parts.matches(':').count() {
        return Err(parts.wrong());
    }
    (named.make)(&parts)
}

/// What [`by_name`] takes, each with the parts that may follow.
pub fn names() -> Vec<String> {
    NAMED.iter().map(|n| if n.parts.is_empty() { n.name.into() } else { format!("{}[{}]", n.name, n.parts) }).collect()
}

/// What follows the name of a data set.
struct Parts<'a> {
    form: String,
    text: &'a str,
    parts: Vec<&'a str>,
}

impl Parts<'_> {
    fn number(&self, i: usize, default: usize) -> Result<usize> {
        self.parts.get(i).map_or(Ok(default), |p| p.parse().map_err(|_| self.wrong()))
    }

    fn shape(&self, i: usize, default: [usize; 3]) -> Result<[usize; 3]> {
        let Some(text) = self.parts.get(i) else { return Ok(default) };
        let axes: Option<Vec<usize>> = text.split('x').map(|n| n.parse().ok()).collect();
        axes.and_then(|a| a.try_into().ok()).ok_or_else(|| self.wrong())
    }

    fn wrong(&self) -> Error {
        Error::config(format!("data {:?}: expected {}, whose parts may be left out from the end", self.text, self.form))
    }
}

/// The folder that `$PIPEWRIGHT_DATA` names, if it names any.
///
/// # Errors
/// If there is no such folder.
fn root() -> Result<Option<PathBuf>> {
    let named = std::env::var_os("PIPEWRIGHT_DATA").filter(|v| !v.is_empty()).map(PathBuf::from);
    match named {
        Some(path) if !path.is_dir() => {
            let is = if path.exists() { "is none" } else { "does not exist" };
            Err(Error::config(format!("PIPEWRIGHT_DATA: a folder expected, {} {is}", path.display())))
        }
        named => Ok(named),
    }
}
