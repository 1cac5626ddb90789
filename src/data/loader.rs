//! From sample ids to minibatches of tensors, one after the other or ahead of time in a background thread.
use super::{Dataset, Field, Sample, Sampler, Transform, dataset::Column};
use crate::{
    Context, Error, Result,
    tensor::{Device, Tensor},
};
use std::{
    any::Any,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        mpsc::{Receiver, sync_channel},
    },
    thread,
};

/// How many minibatches a [`Prefetch`] keeps ready.
const DEPTH: usize = 2;

/// A minibatch, or a part of one: samples along axis 0 of every field.
#[derive(Clone, Debug)]
pub struct Batch {
    /// The sample ids, which random numbers depend on.
    pub ids: Vec<u64>,
    /// Name and values of each field, in the order of the data set.
    pub fields: Vec<(String, Tensor)>,
}

impl Batch {
    /// The number of samples.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether there are no samples.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// The values of field `name`: [samples, shape of the field …].
    ///
    /// # Errors
    /// If there is no such field; the message names those there are.
    pub fn field(&self, name: &str) -> Result<&Tensor> {
        self.fields
            .iter()
            .find(|(n, _)| n == name)
            .map(|(_, t)| t)
            .ok_or_else(|| no_field(name, self.fields.iter().map(|(n, _)| n)))
    }

    /// The samples `start..start + len`, without a copy.
    ///
    /// # Errors
    /// If it has fewer.
    pub fn slice(&self, start: usize, len: usize) -> Result<Batch> {
        let ids = start.checked_add(len).and_then(|end| self.ids.get(start..end));
        let ids =
            ids.ok_or_else(|| Error::shape(format!("{len} samples from {start} on, of a batch of {}", self.len())))?;
        let fields =
            self.fields.iter().map(|(n, t)| Ok((n.clone(), t.slice(0, start, len)?))).collect::<Result<_>>()?;
        Ok(Batch { ids: ids.to_vec(), fields })
    }
}

fn no_field<'a>(name: &str, have: impl Iterator<Item = &'a String>) -> Error {
    let have: Vec<_> = have.map(|n| format!("{n:?}")).collect();
    Error::data(format!("no field {name:?}; there are {}", have.join(", ")))
}

/// Loads minibatches of a data set onto a device.
#[derive(Clone)]
pub struct Loader {
    source: Arc<Source>,
    device: Device,
}

/// What the background thread needs.
struct Source {
    dataset: Arc<dyn Dataset>,
    /// Bytes of one sample of each field.
    rows: Vec<usize>,
    /// Each with the number of its field.
    transforms: Vec<(usize, Transform)>,
    seed: u64,
}

/// A minibatch in host memory.
struct Staged {
    ids: Vec<u64>,
    columns: Vec<Column>,
}

impl Loader {
    /// Loads `dataset` onto `device` through `transforms`; those for training only are left out unless `train`.
    ///
    /// # Errors
    /// If the data set has no samples, or two fields of one name, or a transform does not fit its field.
    pub fn new(
        dataset: Arc<dyn Dataset>,
        transforms: &[Transform],
        device: &Device,
        seed: u64,
        train: bool,
    ) -> Result<Loader> {
        let place = || format!("data set {:?}", dataset.name());
        super::check_len(dataset.name(), dataset.len())?;
        let transforms = chosen(&*dataset, transforms, train).context(place)?;
        let rows = dataset.fields().iter().map(Field::bytes).collect::<Result<_>>().context(place)?;
        Ok(Loader { source: Arc::new(Source { dataset, rows, transforms, seed }), device: device.clone() })
    }

    /// What it loads.
    pub fn dataset(&self) -> &dyn Dataset {
        &*self.source.dataset
    }

    /// The samples `ids` as `epoch` sees them.
    ///
    /// # Errors
    /// If the data set has no such sample, or cannot read it.
    pub fn load(&self, epoch: u64, ids: &[u64]) -> Result<Batch> {
        self.source.stage(epoch, ids)?.onto(self.dataset().fields(), &self.device)
    }

    /// The minibatches `numbers` (counted from the start of the run) that `sampler` makes up, read ahead in a thread.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn prefetch(&self, sampler: &Sampler, numbers: Range<u64>) -> Result<Prefetch> {
        self.prefetch_every(sampler, numbers, 1)
    }

    /// The same with only the first of every `stride` (at least 1) of them.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn prefetch_every(&self, sampler: &Sampler, numbers: Range<u64>, stride: usize) -> Result<Prefetch> {
        let (sender, receiver) = sync_channel(DEPTH);
        let stride = stride.max(1);
        let left = numbers.end.saturating_sub(numbers.start).div_ceil(stride as u64);
        let numbers = numbers.step_by(stride);
        let (source, sampler) = (self.source.clone(), sampler.clone());
        let work = move || {
            for number in numbers {
                let one = || sampler.minibatch(number).and_then(|(epoch, ids)| source.stage(epoch, &ids));
                let staged = catch_unwind(AssertUnwindSafe(one)).unwrap_or_else(|panic| Err(panicked(&*panic)));
                let staged = staged.context(|| format!("minibatch {number}"));
                let failed = staged.is_err();
                // Nobody waits for it any more.
                if sender.send(staged).is_err() || failed {
                    return;
                }
            }
        };
        let name = format!("loader {}", self.dataset().name());
        thread::Builder::new()
            .name(name)
            .spawn(work)
            .map_err(|e| Error::data(format!("cannot start the loader's thread: {e}")))?;
        Ok(Prefetch { loader: self.clone(), receiver: Some(receiver), left })
    }
}

/// The transforms to apply, each with the number of its field.
fn chosen(dataset: &dyn Dataset, transforms: &[Transform], train: bool) -> Result<Vec<(usize, Transform)>> {
    let fields = dataset.fields();
    if dataset.is_empty() {
        return Err(Error::data("no samples"));
    }
    for (i, f) in fields.iter().enumerate() {
        if fields[..i].iter().any(|g| g.name == f.name) {
            return Err(Error::data(format!("two fields are called {:?}", f.name)));
        }
    }
    let mut chosen = Vec::new();
    for t in transforms {
        let number = fields.iter().position(|f| f.name == t.field());
        let number =
            number.ok_or_else(|| no_field(t.field(), fields.iter().map(|f| &f.name)).context(t.to_string()))?;
        t.check(&fields[number])?;
        if train || !t.is_train_only() {
            chosen.push((number, t.clone()));
        }
    }
    Ok(chosen)
}

impl Source {
    fn stage(&self, epoch: u64, ids: &[u64]) -> Result<Staged> {
        let fields = self.dataset.fields();
        let mut columns = self.rows.iter().map(|&row| Column::new(row, ids.len())).collect::<Result<Vec<_>>>()?;
        let mut sample = Sample::new(fields, &mut columns);
        for (row, &id) in ids.iter().enumerate() {
            sample.start(row);
            self.read(epoch, id, &mut sample)
                .context(|| format!("sample {id} of data set {:?}", self.dataset.name()))?;
        }
        Ok(Staged { ids: ids.to_vec(), columns })
    }

    fn read(&self, epoch: u64, id: u64, sample: &mut Sample) -> Result<()> {
        let len = self.dataset.len();
        let index = usize::try_from(id).ok().filter(|&i| i < len);
        self.dataset.read(index.ok_or_else(|| Error::data(format!("there are {len} samples")))?, sample)?;
        sample.finish()?;
        for (field, t) in &self.transforms {
            let shape = &self.dataset.fields()[*field].shape;
            let values = bytemuck::try_cast_slice_mut(sample.bytes_mut(*field));
            let values = values.map_err(|e| Error::data(format!("{t}: {e}")))?;
            t.apply(values, shape, self.seed, epoch, id).context(|| t.to_string())?;
        }
        Ok(())
    }
}

impl Staged {
    fn onto(self, fields: &[Field], device: &Device) -> Result<Batch> {
        let tensor = |f: &Field, c: &Column| {
            let shape: Vec<usize> = [self.ids.len()].into_iter().chain(f.shape.iter().copied()).collect();
            Ok((f.name.clone(), Tensor::from_bytes(c.bytes(), f.dtype, &shape, device)?))
        };
        let fields = fields.iter().zip(&self.columns).map(|(f, c)| tensor(f, c)).collect::<Result<_>>()?;
        Ok(Batch { ids: self.ids, fields })
    }
}

fn panicked(panic: &(dyn Any + Send)) -> Error {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    Error::data(format!("reading panicked: {}", text.unwrap_or("without a message")))
}

/// Minibatches in order, read ahead by a thread: see [`Loader::prefetch`]. An error or a panic while reading is the last
/// item. Dropped, it does not wait for the thread, which ends after the minibatch at hand.
///
/// Device memory is taken where the minibatch is asked for and not in the thread, so that how much is in use does not depend
/// on how fast the thread is.
pub struct Prefetch {
    loader: Loader,
    receiver: Option<Receiver<Result<Staged>>>,
    left: u64,
}

impl Iterator for Prefetch {
    type Item = Result<Batch>;

    fn next(&mut self) -> Option<Result<Batch>> {
        let receiver = self.receiver.as_ref().filter(|_| self.left > 0)?;
        let staged = receiver.recv().unwrap_or_else(|_| Err(Error::data("the loader's thread ended early")));
        self.left -= 1;
        let batch = staged.and_then(|s| s.onto(self.loader.dataset().fields(), &self.loader.device));
        if batch.is_err() {
            self.receiver = None;
        }
        Some(batch)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        // An error may end it before.
        (0, usize::try_from(self.left).ok())
    }
}
