//! The threads of a device, and how work is cut for them.
use crate::{Error, Result};
use std::{ops::Range, sync::Mutex};

/// The caller's thread and `n − 1` others, which belong to one device.
pub(crate) struct Threads {
    others: Option<rayon::ThreadPool>,
    n: usize,
}

impl Threads {
    pub(crate) fn new(n: usize) -> Result<Threads> {
        let start =
            |n| rayon::ThreadPoolBuilder::new().num_threads(n).thread_name(|i| format!("cpu-{}", i + 1)).build();
        let others = match n {
            0 => return Err(Error::device("cpu: at least one thread is needed, got 0")),
            1 => None,
            _ => Some(start(n - 1).map_err(|e| Error::device(format!("cpu: {n} threads cannot be started: {e}")))?),
        };
        Ok(Threads { others, n })
    }

    pub(crate) fn count(&self) -> usize {
        self.n
    }

    /// Into how many parts to cut `work` of which less than `grain` is not worth a thread.
    pub(crate) fn parts(&self, work: usize, grain: usize) -> usize {
        (work / grain.max(1)).clamp(1, self.n)
    }

    /// The length of the pieces, a multiple of `unit`, into which to cut `len` elements of which less than `grain` is not worth
    /// a thread; never 0.
    pub(crate) fn piece(&self, len: usize, unit: usize, grain: usize) -> usize {
        len.div_ceil(self.parts(len, grain)).next_multiple_of(unit.max(1)).max(1)
    }

    /// Calls `f` with every item, the first in this thread and each of the rest in another one where there is one.
    pub(crate) fn over<T: Send>(&self, items: impl ExactSizeIterator<Item = T>, f: impl Fn(T) + Sync) {
        let Some(pool) = self.others.as_ref().filter(|_| items.len() > 1) else {
            return items.for_each(f);
        };
        let mut items = items;
        let first = items.next();
        pool.in_place_scope(|s| {
            for item in items {
                s.spawn(|_| f(item));
            }
            first.into_iter().for_each(&f);
        });
    }

    /// Like [`over`](Threads::over), for work that may fail: the error of the earliest item.
    pub(crate) fn try_over<T: Send>(
        &self,
        items: impl ExactSizeIterator<Item = T>,
        f: impl Fn(T) -> Result<()> + Sync,
    ) -> Result<()> {
        let failed: Mutex<Option<(usize, Error)>> = Mutex::new(None);
        self.over(items.enumerate(), |(i, item)| {
            if let Err(e) = f(item) {
                let mut failed = failed.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                if failed.as_ref().is_none_or(|&(j, _)| i < j) {
                    *failed = Some((i, e));
                }
            }
        });
        match failed.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) {
            Some((_, e)) => Err(e),
            None => Ok(()),
        }
    }
}

/// The `i`th of `parts` nearly equal ranges of 0..len, cut at multiples of `unit`.
pub(crate) fn part(len: usize, unit: usize, parts: usize, i: usize) -> Range<usize> {
    let units = len.div_ceil(unit);
    let at = |i: usize| (units * i / parts * unit).min(len);
    at(i)..at(i + 1)
}

/// Memory that several threads write at once, each at places of its own.
pub(crate) struct Shared<'a> {
    start: *mut f32,
    len: usize,
    owner: std::marker::PhantomData<&'a mut [f32]>,
}

// SAFETY: a `Shared` gives out only a raw pointer; whoever writes through it promises to touch no place that another thread
// reads or writes meanwhile (see `gemm::Problem::row`).
unsafe impl Sync for Shared<'_> {}

impl<'a> Shared<'a> {
    pub(crate) fn new(all: &'a mut [f32]) -> Shared<'a> {
        Shared { start: all.as_mut_ptr(), len: all.len(), owner: std::marker::PhantomData }
    }

    pub(crate) fn start(&self) -> *mut f32 {
        self.start
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_everything_once() {
        for (len, unit, parts) in [(0, 4, 3), (1, 4, 3), (37, 4, 3), (64, 16, 2), (5, 1, 8)] {
            let all: Vec<usize> = (0..parts).flat_map(|i| part(len, unit, parts, i)).collect();
            assert!(all.into_iter().eq(0..len));
        }
    }

    #[test]
    fn the_earliest_error_is_reported() {
        let t = Threads::new(3).unwrap();
        let fail = |i: usize| if i > 3 { Err(Error::data(format!("item {i}"))) } else { Ok(()) };
        assert!(t.try_over(0..4, fail).is_ok());
        assert_eq!(t.try_over(0..9, fail).unwrap_err().message(), "item 4");
        assert!(Threads::new(0).is_err());
    }
}
