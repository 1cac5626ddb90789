//! The threads of a device, and how work is cut for them.
use super::team::Team;
use crate::{Error, Result};
use std::{
    ops::Range,
    sync::{Mutex, PoisonError},
};

/// The caller's thread and `n − 1` others, which belong to one device.
pub(crate) struct Threads {
    others: Option<Team>,
    n: usize,
}

/// More threads than any machine has cores for.
pub(crate) const MOST_THREADS: usize = 4096;

/// An error unless a device may have `n` threads.
pub(crate) fn check_threads(n: usize) -> Result<()> {
    match n {
        0 => Err(Error::device("cpu: at least one thread is needed, got 0")),
        1..=MOST_THREADS => Ok(()),
        _ => Err(Error::device(format!("cpu: at most {MOST_THREADS} threads expected, got {n}"))),
    }
}

/// Pieces for each thread, so that one that is held up leaves its share to others.
const PIECES: usize = 4;

impl Threads {
    pub(crate) fn new(n: usize) -> Result<Threads> {
        check_threads(n)?;
        let others = if n > 1 { Some(Team::new(n - 1)?) } else { None };
        Ok(Threads { others, n })
    }

    pub(crate) fn count(&self) -> usize {
        self.n
    }

    /// Into how many parts to cut `work` of which less than `grain` is not worth a thread.
    pub(crate) fn parts(&self, work: usize, grain: usize) -> usize {
        (work / grain.max(1)).clamp(1, self.n)
    }

    /// Into how many pieces to cut such work so that threads can take one after the other.
    pub(crate) fn pieces(&self, work: usize, grain: usize) -> usize {
        let most = if self.n > 1 { PIECES * self.n } else { 1 };
        (work / grain.max(1)).clamp(1, most)
    }

    /// The length of the pieces, a multiple of `unit`, into which to cut `len` elements of which less than `grain` is not worth
    /// a thread; never 0.
    pub(crate) fn piece(&self, len: usize, unit: usize, grain: usize) -> usize {
        len.div_ceil(self.pieces(len, grain)).next_multiple_of(unit.max(1)).max(1)
    }

    /// Calls `f` with every item; each thread takes the next one when it is done with one.
    pub(crate) fn over<T: Send>(&self, items: impl ExactSizeIterator<Item = T> + Send, f: impl Fn(T) + Sync) {
        self.over_with(std::iter::repeat_n((), self.n), items, |(), item| f(item));
    }

    /// The same; each thread that takes part takes one of `own` for all its items: no more take part than there are.
    pub(crate) fn over_with<S, T>(
        &self,
        own: impl Iterator<Item = S> + Send,
        items: impl ExactSizeIterator<Item = T> + Send,
        f: impl Fn(&mut S, T) + Sync,
    ) {
        let alone = items.len() <= 1;
        let (own, items) = (Mutex::new(own), Mutex::new(items));
        let job = || {
            let mine = own.lock().unwrap_or_else(PoisonError::into_inner).next();
            if let Some(mut mine) = mine {
                while let Some(item) = next(&items) {
                    f(&mut mine, item);
                }
            }
        };
        match &self.others {
            Some(team) if !alone => team.run(&job),
            _ => job(),
        }
    }

    /// Like [`over`](Threads::over), for work that may fail: the error of the earliest item.
    pub(crate) fn try_over<T: Send>(
        &self,
        items: impl ExactSizeIterator<Item = T> + Send,
        f: impl Fn(T) -> Result<()> + Sync,
    ) -> Result<()> {
        let failed: Mutex<Option<(usize, Error)>> = Mutex::new(None);
        self.over(items.enumerate(), |(i, item)| {
            if let Err(e) = f(item) {
                let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
                if failed.as_ref().is_none_or(|&(j, _)| i < j) {
                    *failed = Some((i, e));
                }
            }
        });
        match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some((_, e)) => Err(e),
            None => Ok(()),
        }
    }
}

fn next<T>(items: &Mutex<impl Iterator<Item = T>>) -> Option<T> {
    items.lock().unwrap_or_else(PoisonError::into_inner).next()
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
