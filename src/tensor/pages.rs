//! Huge pages: with pages of 4 KiB a matrix product spends a good part of its time on looking up addresses, and how much depends
//! on which pages the system happens to give.
/// The size of a huge page on the machines that we know.
#[cfg(target_os = "linux")]
const HUGE: usize = 2 << 20;

/// Asks the system to back memory that was not written yet with huge pages, as far as whole ones fit in.
#[cfg(target_os = "linux")]
pub(super) fn prefer_huge<T>(memory: &mut [T]) {
    let range = memory.as_mut_ptr_range();
    let start = (range.start as usize).next_multiple_of(HUGE);
    let end = range.end as usize / HUGE * HUGE;
    if end > start {
        let at = range.start.wrapping_byte_add(start - range.start as usize);
        // SAFETY: the pages lie within `memory`, which is borrowed mutably, and the advice does not change what they hold.
        // Where it is refused everything works as without.
        unsafe { libc::madvise(at.cast(), end - start, libc::MADV_HUGEPAGE) };
    }
}

/// Other systems decide by themselves.
#[cfg(not(target_os = "linux"))]
pub(super) fn prefer_huge<T>(_memory: &mut [T]) {}
