//! The memory of a status page: atomic words, of this process or shared by the processes of a host.
#[cfg(feature = "mpi")]
use memmap2::{MmapOptions, MmapRaw};
use std::sync::atomic::AtomicU64;

/// Words that several threads or processes write and read.
pub(super) enum Words {
    Local(Box<[AtomicU64]>),
    #[cfg(feature = "mpi")]
    Shared(MmapRaw),
}

impl Words {
    /// `n` words that are 0, of this process.
    pub(super) fn local(n: usize) -> Words {
        Words::Local((0..n).map(|_| AtomicU64::new(0)).collect())
    }

    /// The first `n` words of a file, which grows to hold them.
    #[cfg(feature = "mpi")]
    pub(super) fn shared(file: &std::fs::File, n: usize) -> std::io::Result<Words> {
        let bytes = n * size_of::<AtomicU64>();
        file.set_len(bytes as u64)?;
        Ok(Words::Shared(MmapOptions::new().len(bytes).map_raw(file)?))
    }

    /// All of them.
    pub(super) fn all(&self) -> &[AtomicU64] {
        match self {
            Words::Local(words) => words,
            #[cfg(feature = "mpi")]
            // SAFETY: the mapping is aligned to a page, has this many bytes, can be read and written, and lives as long as
            // `self`; whoever has it looks at it as atomic words only, for which all bits are valid. Its file has no name
            // once all have it, so nobody shortens it.
            Words::Shared(map) => unsafe {
                std::slice::from_raw_parts(map.as_mut_ptr().cast(), map.len() / size_of::<AtomicU64>())
            },
        }
    }
}
