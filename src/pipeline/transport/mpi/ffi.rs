//! The only place that calls MPI. It makes sure of what its functions need to be safe:
//!
//! - MPI is called by one thread: [`Mpi`] is made by the thread that initialises MPI and can be neither sent nor shared, and all
//!   calls need it (but [`abort_if_owner`], which asks a thread-local flag).
//! - A started operation's memory is owned by [`Outstanding`] until it completes: [`Outstanding::release`] gives it back only
//!   then, and if `Outstanding` goes before, the memory is leaked. Its bytes do not move: they are on the heap, behind a box or
//!   a reference count, and nothing looks at them meanwhile. A tensor that is sent is only read: it is shared, so nothing
//!   writes into it either.
//! - A range that leaves its memory, or is longer than a C `int` can count, is refused.
use crate::{
    Error, Result,
    tensor::{Buffer, Tensor},
};
use mpi::ffi::{self, MPI_Comm, MPI_Request, MPI_Status};
use std::{cell::Cell, collections::HashMap, ffi::c_int, marker::PhantomData, mem::MaybeUninit, ops::Range, ptr};

thread_local! {
    /// Whether this thread initialised MPI and has not ended it.
    static OWNER: Cell<bool> = const { Cell::new(false) };
}

/// MPI, on the thread that initialised it.
pub(super) struct Mpi {
    data: MPI_Comm,
    control: MPI_Comm,
    rank: usize,
    size: usize,
    tags: usize,
    /// The lowest of the ranks that share memory with this one.
    host: usize,
    /// Neither `Send` nor `Sync`.
    thread: PhantomData<*const ()>,
}

/// Which of the two communicators a message takes: what flows on one never meets what flows on the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    Data,
    Control,
}

/// The other end of a message.
#[derive(Clone, Copy, Debug)]
pub(super) struct Peer {
    pub(super) lane: Lane,
    pub(super) rank: usize,
    pub(super) tag: usize,
}

/// Memory that operations read or write while they are outstanding.
pub(super) enum Memory {
    /// Only sent.
    Tensor(Tensor),
    Buffer(Buffer),
    Bytes(Vec<u8>),
}

impl Mpi {
    /// Initialises MPI on this thread and makes both communicators, on all ranks at once.
    pub(super) fn init() -> Result<Mpi> {
        let mut mpi = Mpi {
            // SAFETY: constants of the MPI library.
            data: unsafe { ffi::RSMPI_COMM_WORLD },
            control: unsafe { ffi::RSMPI_COMM_WORLD },
            rank: 0,
            size: 0,
            tags: 0,
            host: 0,
            thread: PhantomData,
        };
        let (world, mut provided, mut rank, mut size) = (mpi.data, 0, 0, 0);
        // SAFETY: null is allowed for both arguments; the results are written to live places. The caller starts MPI once.
        unsafe {
            let funneled = ffi::RSMPI_THREAD_FUNNELED;
            check(ffi::MPI_Init_thread(ptr::null_mut(), ptr::null_mut(), funneled, &mut provided), "MPI_Init_thread")?;
            OWNER.set(true);
            if provided < funneled {
                return Err(Error::transport(format!("MPI gives thread level {provided}, {funneled} is needed")));
            }
            check(ffi::MPI_Comm_set_errhandler(world, ffi::RSMPI_ERRORS_RETURN), "MPI_Comm_set_errhandler")?;
            check(ffi::MPI_Comm_rank(world, &mut rank), "MPI_Comm_rank")?;
            check(ffi::MPI_Comm_size(world, &mut size), "MPI_Comm_size")?;
            // The copies take over the error handler.
            check(ffi::MPI_Comm_dup(world, &mut mpi.data), "MPI_Comm_dup")?;
            check(ffi::MPI_Comm_dup(world, &mut mpi.control), "MPI_Comm_dup")?;
        }
        (mpi.rank, mpi.size, mpi.tags) = (index(rank)?, index(size)?, largest_tag(world)?);
        mpi.host = index(lowest_beside(world, rank)?)?;
        Ok(mpi)
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    pub(super) fn size(&self) -> usize {
        self.size
    }

    /// The largest tag.
    pub(super) fn tags(&self) -> usize {
        self.tags
    }

    /// The lowest of the ranks that share memory with this one.
    pub(super) fn host(&self) -> usize {
        self.host
    }

    /// Ends MPI, on all ranks at once. Nothing may be called afterwards.
    fn finalize(&self) -> Result<()> {
        // SAFETY: MPI is initialised, this is its thread, and [`Outstanding`], the only caller, goes without another call.
        let code = unsafe { ffi::MPI_Finalize() };
        OWNER.set(false);
        check(code, "MPI_Finalize")
    }

    fn comm(&self, lane: Lane) -> MPI_Comm {
        match lane {
            Lane::Data => self.data,
            Lane::Control => self.control,
        }
    }
}

/// Ends the job if this thread owns MPI; else it returns.
pub(super) fn abort_if_owner(code: i32) {
    if OWNER.get() {
        // SAFETY: MPI is initialised and this is its thread.
        unsafe { ffi::MPI_Abort(ffi::RSMPI_COMM_WORLD, code) };
        std::process::abort();
    }
}

/// Memory that is held for operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Held(u64);

struct Slot {
    memory: Memory,
    start: *mut u8,
    len: usize,
    /// Operations outstanding on it.
    uses: usize,
}

/// One outstanding operation: beside its request.
struct Operation<K> {
    key: K,
    held: Option<Held>,
    receives: bool,
}

/// All outstanding operations and their memory. `K` says what an operation is for.
pub(super) struct Outstanding<K> {
    mpi: Mpi,
    requests: Vec<MPI_Request>,
    operations: Vec<Operation<K>>,
    slots: HashMap<Held, Slot>,
    next: u64,
    indices: Vec<c_int>,
    statuses: Vec<MPI_Status>,
}

/// An operation that has ended.
pub(super) struct Ended<K> {
    pub(super) key: K,
    /// Bytes received, 0 for what is no receive.
    pub(super) bytes: Result<usize>,
}

impl<K> Outstanding<K> {
    pub(super) fn new(mpi: Mpi) -> Outstanding<K> {
        let (requests, operations, slots) = (Vec::new(), Vec::new(), HashMap::new());
        Outstanding { mpi, requests, operations, slots, next: 0, indices: Vec::new(), statuses: Vec::new() }
    }

    pub(super) fn mpi(&self) -> &Mpi {
        &self.mpi
    }

    /// The number of outstanding operations.
    pub(super) fn len(&self) -> usize {
        self.requests.len()
    }

    /// Takes memory over, for operations on ranges of it.
    ///
    /// # Errors
    /// If it is a tensor that is not contiguous or has no data.
    pub(super) fn hold(&mut self, mut memory: Memory) -> Result<Held> {
        let (start, len) = match &mut memory {
            Memory::Tensor(t) => (t.host_bytes()?.as_ptr().cast_mut(), t.byte_len()),
            Memory::Buffer(b) => (b.bytes_mut().as_mut_ptr(), b.bytes().len()),
            Memory::Bytes(b) => (b.as_mut_ptr(), b.len()),
        };
        let held = Held(self.next);
        self.next += 1;
        self.slots.insert(held, Slot { memory, start, len, uses: 0 });
        Ok(held)
    }

    /// Gives memory back; `None` while an operation uses it.
    pub(super) fn release(&mut self, held: Held) -> Option<Memory> {
        if self.slots.get(&held)?.uses > 0 {
            return None;
        }
        self.slots.remove(&held).map(|slot| slot.memory)
    }

    /// Starts sending a range of `held`; `synchronous`: it ends only once the receive has begun.
    pub(super) fn send(&mut self, held: Held, range: Range<usize>, to: Peer, synchronous: bool, key: K) -> Result<()> {
        let (start, count) = self.place(held, range)?;
        let (comm, rank, tag) = (self.mpi.comm(to.lane), int(to.rank)?, int(to.tag)?);
        let mut request = MaybeUninit::uninit();
        // SAFETY: `start` and the `count` bytes after it belong to `held`, which stays until the request has ended.
        let code = unsafe {
            let byte = ffi::RSMPI_UINT8_T;
            let send = if synchronous { ffi::MPI_Issend } else { ffi::MPI_Isend };
            send(start.cast(), count, byte, rank, tag, comm, request.as_mut_ptr())
        };
        check(code, "MPI_Isend")?;
        // SAFETY: the call succeeded, so it wrote the request.
        self.push(unsafe { request.assume_init() }, Operation { key, held: Some(held), receives: false });
        Ok(())
    }

    /// Starts receiving at most the length of the range into it.
    pub(super) fn receive(&mut self, held: Held, range: Range<usize>, from: Peer, key: K) -> Result<()> {
        if matches!(self.slots.get(&held), Some(Slot { memory: Memory::Tensor(_), .. })) {
            return Err(Error::transport("a tensor cannot be received into"));
        }
        let (start, count) = self.place(held, range)?;
        let (comm, rank, tag) = (self.mpi.comm(from.lane), int(from.rank)?, int(from.tag)?);
        let mut request = MaybeUninit::uninit();
        // SAFETY: `start` and the `count` bytes after it belong to `held`, which is not a shared tensor and stays, unseen, until
        // the request has ended.
        let code =
            unsafe { ffi::MPI_Irecv(start.cast(), count, ffi::RSMPI_UINT8_T, rank, tag, comm, request.as_mut_ptr()) };
        check(code, "MPI_Irecv")?;
        // SAFETY: the call succeeded, so it wrote the request.
        self.push(unsafe { request.assume_init() }, Operation { key, held: Some(held), receives: true });
        Ok(())
    }

    /// Starts a barrier of all ranks.
    pub(super) fn barrier(&mut self, key: K) -> Result<()> {
        let mut request = MaybeUninit::uninit();
        // SAFETY: no memory is involved but the request.
        check(unsafe { ffi::MPI_Ibarrier(self.mpi.control, request.as_mut_ptr()) }, "MPI_Ibarrier")?;
        // SAFETY: the call succeeded, so it wrote the request.
        self.push(unsafe { request.assume_init() }, Operation { key, held: None, receives: false });
        Ok(())
    }

    /// Lets MPI work and adds what has ended to `ended`.
    pub(super) fn poll(&mut self, ended: &mut Vec<Ended<K>>) -> Result<()> {
        if self.requests.is_empty() {
            return self.progress();
        }
        let n = self.requests.len();
        self.indices.resize(n, 0);
        // SAFETY: a status is a C struct of integers, for which zeros are a value.
        self.statuses.resize_with(n, || unsafe { MaybeUninit::zeroed().assume_init() });
        let mut count = 0;
        // SAFETY: three arrays of at least `n` elements, and `n` live requests.
        let code = unsafe {
            let (indices, statuses) = (self.indices.as_mut_ptr(), self.statuses.as_mut_ptr());
            ffi::MPI_Testsome(int(n)?, self.requests.as_mut_ptr(), &mut count, indices, statuses)
        };
        let each = class(code) == ffi::MPI_ERR_IN_STATUS as c_int;
        if !each {
            check(code, "MPI_Testsome")?;
        }
        let mut done: Vec<(usize, MPI_Status)> = Vec::new();
        for (&i, &status) in self.indices.iter().zip(&self.statuses).take(usize::try_from(count).unwrap_or(0)) {
            done.push((index(i)?, status));
        }
        // From the back, so that what takes the place of a removed request is one that was seen or is not done.
        done.sort_by_key(|d| std::cmp::Reverse(d.0));
        for (i, status) in done {
            self.requests.swap_remove(i);
            let Operation { key, held, receives } = self.operations.swap_remove(i);
            if let Some(slot) = held.and_then(|h| self.slots.get_mut(&h)) {
                slot.uses -= 1;
            }
            let failed = if each { check(status.MPI_ERROR, "a message") } else { Ok(()) };
            let bytes = failed.and_then(|()| if receives { received(&status) } else { Ok(0) });
            ended.push(Ended { key, bytes });
        }
        Ok(())
    }

    /// Lets MPI work on what it has accepted but not yet put on the wire.
    fn progress(&self) -> Result<()> {
        let (mut found, mut status) = (0, MaybeUninit::uninit());
        // SAFETY: asks only; both results are written to live places.
        let code = unsafe {
            let (source, tag) = (ffi::RSMPI_ANY_SOURCE, ffi::RSMPI_ANY_TAG);
            ffi::MPI_Iprobe(source, tag, self.mpi.control, &mut found, status.as_mut_ptr())
        };
        check(code, "MPI_Iprobe")
    }

    /// Ends MPI.
    ///
    /// # Errors
    /// If something is outstanding: a peer would lose it.
    pub(super) fn finalize(self) -> Result<()> {
        if !self.requests.is_empty() {
            let n = self.requests.len();
            return Err(Error::transport(format!("{n} messages are outstanding at the end; wait for all of them")));
        }
        self.mpi.finalize()
    }

    fn push(&mut self, request: MPI_Request, operation: Operation<K>) {
        if let Some(slot) = operation.held.and_then(|h| self.slots.get_mut(&h)) {
            slot.uses += 1;
        }
        self.requests.push(request);
        self.operations.push(operation);
    }

    /// Where a range of `held` begins, and its length.
    fn place(&self, held: Held, range: Range<usize>) -> Result<(*mut u8, c_int)> {
        let slot = self.slots.get(&held).ok_or_else(|| Error::transport("memory that is not held"))?;
        if range.start > range.end || range.end > slot.len {
            return Err(Error::transport(format!("bytes {range:?} of a message of {}", slot.len)));
        }
        // SAFETY: `range.start` is at most the length of the memory.
        Ok((unsafe { slot.start.add(range.start) }, int(range.len())?))
    }
}

impl<K> Drop for Outstanding<K> {
    fn drop(&mut self) {
        // MPI may still write there.
        let used = self.slots.drain().filter(|(_, slot)| slot.uses > 0);
        used.for_each(|(_, slot)| std::mem::forget(slot.memory));
    }
}

/// The lowest of the ranks that can share memory with `rank`, which is this one. All ranks call it at once.
fn lowest_beside(comm: MPI_Comm, rank: c_int) -> Result<c_int> {
    let mut beside = MaybeUninit::uninit();
    // SAFETY: a live communicator, constants of the MPI library, and a live place for the result.
    let code = unsafe {
        let (shared, none) = (ffi::RSMPI_COMM_TYPE_SHARED, ffi::RSMPI_INFO_NULL);
        ffi::MPI_Comm_split_type(comm, shared, rank, none, beside.as_mut_ptr())
    };
    check(code, "MPI_Comm_split_type")?;
    let mut lowest = rank;
    // SAFETY: the call succeeded, so it wrote the communicator, which is freed once. Its first rank is the lowest one, by the order
    // asked for; it tells the others its number, an integer that lives as long as the call.
    unsafe {
        let mut beside = beside.assume_init();
        let place: *mut c_int = &mut lowest;
        check(ffi::MPI_Bcast(place.cast(), 1, ffi::RSMPI_INT32_T, 0, beside), "MPI_Bcast")?;
        check(ffi::MPI_Comm_free(&mut beside), "MPI_Comm_free")?;
    }
    Ok(lowest)
}

/// The largest tag that messages can have.
fn largest_tag(comm: MPI_Comm) -> Result<usize> {
    let (mut value, mut found) = (ptr::null_mut::<c_int>(), 0);
    // SAFETY: for this attribute MPI writes a pointer to an integer that lives as long as the communicator.
    let tag = unsafe {
        let place: *mut *mut c_int = &mut value;
        check(ffi::MPI_Comm_get_attr(comm, ffi::MPI_TAG_UB as c_int, place.cast(), &mut found), "MPI_Comm_get_attr")?;
        if found != 0 && !value.is_null() { *value } else { LEAST_TAGS }
    };
    index(tag)
}

/// The largest tag that every MPI has.
const LEAST_TAGS: c_int = 32767;

fn received(status: &MPI_Status) -> Result<usize> {
    let mut count = 0;
    // SAFETY: the status of a receive that has ended.
    check(unsafe { ffi::MPI_Get_count(status, ffi::RSMPI_UINT8_T, &mut count) }, "MPI_Get_count")?;
    index(count)
}

/// The class of an error code.
fn class(code: c_int) -> c_int {
    let mut class = 0;
    // SAFETY: writes a live place.
    if unsafe { ffi::MPI_Error_class(code, &mut class) } == ffi::MPI_SUCCESS as c_int { class } else { code }
}

/// What a code that MPI returned from `what` means.
fn check(code: c_int, what: &str) -> Result<()> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let (mut text, mut len) = ([0u8; ffi::MPI_MAX_ERROR_STRING as usize], 0);
    // SAFETY: `text` has the length that MPI asks for.
    let known = unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &mut len) };
    let len = if known == ffi::MPI_SUCCESS as c_int { usize::try_from(len).unwrap_or(0) } else { 0 };
    let text = String::from_utf8_lossy(&text[..len.min(text.len())]);
    Err(Error::transport(format!("{what}: MPI error {code}: {text}")))
}

fn int(n: usize) -> Result<c_int> {
    c_int::try_from(n).map_err(|_| Error::transport(format!("{n} is more than MPI can count")))
}

fn index(n: c_int) -> Result<usize> {
    usize::try_from(n).map_err(|_| Error::transport(format!("MPI gave the negative number {n}")))
}
