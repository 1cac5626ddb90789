//! Memory: aligned buffers that return to the pool they came from.
use super::pages;
use bytemuck::{Pod, Zeroable};
use std::{
    collections::HashMap,
    ops::Range,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
};

/// Bytes of a cache line: the unit and the alignment of buffers.
const LINE: usize = 64;

/// What memory is made of. The system gives zeros that take no memory until they are written only where they need not be aligned
/// more than this.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(16))]
struct Piece([u8; PIECE]);

const PIECE: usize = 16;

/// Whole lines of zeros, or of what was written there.
#[derive(Default)]
struct Memory(Box<[Piece]>);

impl Memory {
    /// Of `lines` lines, on huge pages where they are long enough; taken from the system when it is first written.
    fn new(lines: usize) -> Memory {
        if lines == 0 {
            return Memory::default();
        }
        // One line more, less a piece, so that as many lines begin at a whole one.
        let mut pieces = bytemuck::zeroed_slice_box((lines + 1) * (LINE / PIECE) - 1);
        pages::prefer_huge(&mut pieces);
        Memory(pieces)
    }

    fn lines(&self) -> usize {
        self.0.len() / (LINE / PIECE)
    }

    /// Where its lines are.
    fn range(&self) -> Range<usize> {
        let start = self.0.as_ptr().align_offset(LINE).min(self.0.len());
        start..start + self.lines() * (LINE / PIECE)
    }

    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0[self.range()])
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        let range = self.range();
        bytemuck::cast_slice_mut(&mut self.0[range])
    }
}

/// Host memory of a tensor, aligned to 64 bytes. Dropped, it returns to its home pool.
pub struct Buffer {
    memory: Memory,
    bytes: usize,
    counted: usize,
    home: Option<Arc<Pool>>,
    /// Whether it came from [`Pool::scratch`].
    scratch: bool,
}

impl Buffer {
    /// Its size in bytes, as asked for.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether it holds no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Its contents; empty on a device that keeps no data.
    pub fn bytes(&self) -> &[u8] {
        let all = self.memory.bytes();
        &all[..self.bytes.min(all.len())]
    }

    /// Its contents, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let n = self.bytes;
        let all = self.memory.bytes_mut();
        let n = n.min(all.len());
        &mut all[..n]
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(home) = self.home.take() {
            home.take_back(std::mem::take(&mut self.memory), self.counted, self.scratch);
        }
    }
}

/// A device's memory: buffers that were given back wait here by size for the next request.
pub struct Pool {
    waiting: Mutex<Waiting>,
    keeps_data: bool,
    hits: AtomicU64,
    misses: AtomicU64,
    live: AtomicUsize,
    peak: AtomicUsize,
}

/// Buffers that were given back.
#[derive(Default)]
struct Waiting {
    /// By their lines.
    free: HashMap<usize, Vec<Memory>>,
    /// Memory for kernels while they run, of any size.
    spare: Vec<Memory>,
    /// Bytes of all of them.
    bytes: usize,
}

/// What a [`Pool`] has counted so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Requests served from returned buffers.
    pub hits: u64,
    /// Requests that needed new memory.
    pub misses: u64,
    /// Bytes in use now.
    pub live_bytes: usize,
    /// The most bytes ever in use at once since the last [`Pool::reset_peak`].
    pub peak_bytes: usize,
    /// Bytes waiting for the next request.
    pub held_bytes: usize,
}

impl Pool {
    /// An empty pool; with `keeps_data` false its buffers are counted but hold nothing.
    pub(crate) fn new(keeps_data: bool) -> Arc<Pool> {
        Arc::new(Pool {
            waiting: Mutex::default(),
            keeps_data,
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            live: AtomicUsize::new(0),
            peak: AtomicUsize::new(0),
        })
    }

    /// A buffer of `bytes` bytes with unspecified (but initialised) contents.
    pub fn get(self: &Arc<Pool>, bytes: usize) -> Buffer {
        let lines = size_class(bytes.div_ceil(LINE));
        let counted = self.lend(lines);
        if !self.keeps_data {
            return Buffer { memory: Memory::default(), bytes, counted, home: Some(self.clone()), scratch: false };
        }
        let reused = if lines == 0 { Some(Memory::default()) } else { self.lock().take(lines) };
        let memory = match reused {
            Some(memory) => {
                self.hits.fetch_add(1, Relaxed);
                memory
            }
            None => {
                self.misses.fetch_add(1, Relaxed);
                Memory::new(lines)
            }
        };
        Buffer { memory, bytes, counted, home: Some(self.clone()), scratch: false }
    }

    /// Like [`get`](Pool::get), for a kernel while it runs: one piece of memory, as long as the longest need, serves all that run
    /// one after the other.
    pub(crate) fn scratch(self: &Arc<Pool>, bytes: usize) -> Buffer {
        let lines = bytes.div_ceil(LINE);
        let counted = self.lend(lines);
        let longest = self.lock().take_longest();
        let memory = if longest.lines() >= lines {
            self.hits.fetch_add(1, Relaxed);
            longest
        } else {
            self.misses.fetch_add(1, Relaxed);
            // Before the longer one is taken from the system.
            drop(longest);
            Memory::new(lines)
        };
        Buffer { memory, bytes, counted, home: Some(self.clone()), scratch: true }
    }

    /// Lays by `count` buffers of `bytes` bytes, for requests that no returned buffer is there for. They take memory from the
    /// system when they are first written.
    pub fn reserve(&self, bytes: usize, count: usize) {
        let lines = size_class(bytes.div_ceil(LINE));
        if lines == 0 || !self.keeps_data {
            return;
        }
        let spare: Vec<_> = (0..count).map(|_| Memory::new(lines)).collect();
        let mut waiting = self.lock();
        waiting.bytes += lines * LINE * count;
        // At the other end than where returned ones are taken from.
        waiting.free.entry(lines).or_default().splice(0..0, spare);
    }

    /// Counts `lines` lines as in use; gives their bytes.
    fn lend(&self, lines: usize) -> usize {
        let counted = lines * LINE;
        let live = self.live.fetch_add(counted, Relaxed) + counted;
        self.peak.fetch_max(live, Relaxed);
        counted
    }

    fn take_back(&self, memory: Memory, counted: usize, scratch: bool) {
        self.live.fetch_sub(counted, Relaxed);
        let lines = memory.lines();
        if lines == 0 {
            return;
        }
        let mut waiting = self.lock();
        waiting.bytes += lines * LINE;
        if scratch {
            waiting.spare.push(memory);
        } else {
            waiting.free.entry(lines).or_default().push(memory);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The counters.
    pub fn stats(&self) -> PoolStats {
        PoolStats {
            hits: self.hits.load(Relaxed),
            misses: self.misses.load(Relaxed),
            live_bytes: self.live.load(Relaxed),
            peak_bytes: self.peak.load(Relaxed),
            held_bytes: self.lock().bytes,
        }
    }

    /// Starts a new measurement of the peak.
    pub fn reset_peak(&self) {
        self.peak.store(self.live.load(Relaxed), Relaxed);
    }

    /// Gives the waiting buffers back to the system.
    pub fn trim(&self) {
        let all = std::mem::take(&mut *self.lock());
        // Not while others wait.
        drop(all);
    }
}

impl Waiting {
    /// A buffer of `lines` lines, if there is one.
    fn take(&mut self, lines: usize) -> Option<Memory> {
        let found = self.free.get_mut(&lines).and_then(Vec::pop)?;
        self.bytes -= lines * LINE;
        Some(found)
    }

    /// The longest memory for kernels; none if there is no such.
    fn take_longest(&mut self) -> Memory {
        let longest = (0..self.spare.len()).max_by_key(|&i| self.spare[i].lines());
        let longest = longest.map(|i| self.spare.swap_remove(i)).unwrap_or_default();
        self.bytes -= longest.lines() * LINE;
        longest
    }
}

/// Rounds up to 8 sizes per power of two (at most 12.5 % more), so that nearly equal requests share buffers.
fn size_class(lines: usize) -> usize {
    if lines <= 16 {
        return lines;
    }
    let step = 1 << (lines.ilog2() - 3);
    lines.next_multiple_of(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_piece_of_memory_is_scratch_for_all() {
        let pool = Pool::new(true);
        for bytes in [1000, 4000, 64, 4000, 3000] {
            let mut scratch = pool.scratch(bytes);
            scratch.bytes_mut().fill(7);
            assert_eq!(scratch.len(), bytes);
        }
        let stats = pool.stats();
        assert_eq!((stats.misses, stats.hits, stats.live_bytes, stats.held_bytes), (2, 3, 0, 4032));
        // Two at a time take two pieces; tensors take none of them.
        let (a, b, tensor) = (pool.scratch(10), pool.scratch(20), pool.get(4000));
        assert_eq!((pool.stats().misses, pool.stats().live_bytes), (4, 64 + 64 + tensor.counted));
        drop((a, b, tensor));
        assert_eq!(pool.stats().live_bytes, 0);
        pool.trim();
        assert_eq!(pool.stats().held_bytes, 0);
        assert!(!pool.scratch(4000).is_empty() && pool.stats().misses == 5);
    }

    #[test]
    fn what_waits_is_counted_exactly_whoever_trims() {
        let pool = Pool::new(true);
        let end = std::time::Instant::now() + std::time::Duration::from_millis(300);
        std::thread::scope(|s| {
            for user in 0..3 {
                let pool = &pool;
                s.spawn(move || {
                    while std::time::Instant::now() < end {
                        drop((pool.get(5000), pool.scratch(3000)));
                        if user == 0 {
                            pool.trim();
                        }
                        assert!(pool.stats().held_bytes < 1 << 20, "{:?}", pool.stats());
                    }
                });
            }
        });
        pool.trim();
        assert_eq!((pool.stats().held_bytes, pool.stats().live_bytes), (0, 0));
    }
}
