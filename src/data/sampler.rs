//! Which samples make up which minibatch.
use crate::{Error, Result, memory, tensor::Philox};
use std::{
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
};

/// Cuts every epoch's order of samples into minibatches. A minibatch is addressed by its epoch and its index within it, or by
/// its number counted from the start of the run, and is the same whatever was asked for before: a run may resume anywhere.
///
/// The last minibatch of an epoch may be smaller: no sample is left out.
///
/// ```
/// use pipewright::data::Sampler;
/// let s = Sampler::new(10, 4, 7, true)?;
/// assert_eq!(s.batches_per_epoch(), 3);
/// assert_eq!(s.locate(5), (1, 2));
/// assert_eq!(s.minibatch(5)?, (1, s.ids(1, 2)?));
/// assert_eq!(s.ids(1, 2)?.len(), 2);
/// # Ok::<(), pipewright::Error>(())
/// ```
#[derive(Clone)]
pub struct Sampler {
    len: usize,
    batch: usize,
    seed: u64,
    shuffle: bool,
    /// The order of the epoch asked for last.
    order: Arc<Mutex<Option<Order>>>,
}

/// An epoch and the sample ids in its order.
type Order = (u64, Arc<[u64]>);

impl Sampler {
    /// Minibatches of `batch` out of `len` samples, in an order drawn for each epoch from `seed`, or in their own order
    /// without `shuffle`.
    ///
    /// # Errors
    /// If there are no samples, `batch` is 0, or the order of so many samples has no room in memory.
    pub fn new(len: usize, batch: usize, seed: u64, shuffle: bool) -> Result<Sampler> {
        if len == 0 {
            return Err(Error::data("the data set has no samples"));
        }
        if batch == 0 {
            return Err(Error::config("batch: 1 or more expected, got 0"));
        }
        if shuffle {
            // The order is drawn in numbers of this machine, and kept in ids.
            let each = size_of::<usize>() + size_of::<u64>();
            memory::check(|| format!("the order of {len} samples"), len as u128 * each as u128)?;
        }
        Ok(Sampler { len, batch, seed, shuffle, order: Arc::default() })
    }

    /// The number of samples of an epoch.
    pub fn samples(&self) -> usize {
        self.len
    }

    /// The most samples of a minibatch.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// The number of minibatches of an epoch.
    pub fn batches_per_epoch(&self) -> u64 {
        self.len.div_ceil(self.batch) as u64
    }

    /// The epoch of minibatch `number` of the run, and its index in that epoch.
    pub fn locate(&self, number: u64) -> (u64, u64) {
        (number / self.batches_per_epoch(), number % self.batches_per_epoch())
    }

    /// The number of samples in minibatch `index` of every epoch.
    ///
    /// # Errors
    /// If an epoch has no such minibatch.
    pub fn size(&self, index: u64) -> Result<usize> {
        Ok(self.range(index)?.len())
    }

    /// The sample ids of minibatch `index` of `epoch`.
    ///
    /// # Errors
    /// If an epoch has no such minibatch.
    pub fn ids(&self, epoch: u64, index: u64) -> Result<Vec<u64>> {
        let range = self.range(index)?;
        if !self.shuffle {
            return Ok((range.start as u64..range.end as u64).collect());
        }
        let order = {
            let mut last = self.order.lock().unwrap_or_else(PoisonError::into_inner);
            match &*last {
                Some((e, order)) if *e == epoch => order.clone(),
                _ => {
                    let order = Philox::new(self.seed, epoch, "data/sampler").permutation(self.len);
                    let order: Arc<[u64]> = order.into_iter().map(|i| i as u64).collect();
                    *last = Some((epoch, order.clone()));
                    order
                }
            }
        };
        Ok(order[range].to_vec())
    }

    /// The epoch and the sample ids of minibatch `number` of the run.
    pub fn minibatch(&self, number: u64) -> Result<(u64, Vec<u64>)> {
        let (epoch, index) = self.locate(number);
        Ok((epoch, self.ids(epoch, index)?))
    }

    fn range(&self, index: u64) -> Result<Range<usize>> {
        if index >= self.batches_per_epoch() {
            let n = self.batches_per_epoch();
            return Err(Error::data(format!("minibatch {index} of an epoch of {n}")));
        }
        // The check has shown that it fits.
        let start = index as usize * self.batch;
        Ok(start..self.len.min(start.saturating_add(self.batch)))
    }
}
