//! Vectors of f32 of each set of instructions, and their safe use.
//!
//! The unsafe code here rests on one invariant: a [`Vectors`] exists only in code that [`Simd::vectors`](super::isa::Simd::vectors)
//! has entered through a function compiled for its instructions, which this machine was found to have. Its methods bound-check
//! every access to memory.
#[cfg(target_arch = "x86_64")]
mod x86;

use std::marker::PhantomData;

/// A vector of f32.
///
/// # Safety
/// Of every method: the machine has the instructions of the type, and is running a function that was compiled for them; pointers
/// lead to N (or n) elements that may be read or written.
pub(crate) trait Lanes: Copy {
    const N: usize;
    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(p: *const f32) -> Self;
    /// The first `n` ≤ N elements, then zeros.
    unsafe fn load_first(p: *const f32, n: usize) -> Self;
    /// Asks for the cache line of any address, which need not be one of memory.
    unsafe fn prefetch(p: *const f32);
    unsafe fn store(self, p: *mut f32);
    unsafe fn store_first(self, p: *mut f32, n: usize);
    /// Copies N rows of N elements, `from_step` apart, to columns: element (r, c) to c·`to_step` + r.
    unsafe fn transpose(from: *const f32, from_step: usize, to: *mut f32, to_step: usize);
    unsafe fn plus(self, x: Self) -> Self;
    unsafe fn minus(self, x: Self) -> Self;
    unsafe fn times(self, x: Self) -> Self;
    /// self + a·b
    unsafe fn fma(self, a: Self, b: Self) -> Self;
    unsafe fn over(self, x: Self) -> Self;
    /// Each self > x ? self : x, so that of two of which one is a NaN it is x.
    unsafe fn larger(self, x: Self) -> Self;
    /// Each self < x ? self : x.
    unsafe fn smaller(self, x: Self) -> Self;
    unsafe fn abs(self) -> Self;
    /// The magnitudes of self with the signs of `of`.
    unsafe fn with_sign(self, of: Self) -> Self;
    /// Each self < limit ? yes : no.
    unsafe fn below(self, limit: Self, yes: Self, no: Self) -> Self;
    /// self·2ⁿ for integers n of at most 250 in magnitude.
    unsafe fn times_power(self, n: Self) -> Self;
    /// Of numbers, not NaNs.
    unsafe fn largest(self) -> f32;
    unsafe fn sum(self) -> f32;
}

/// The proof that vectors of type L may be used here, and their operations.
#[derive(Clone, Copy)]
pub(crate) struct Vectors<L>(PhantomData<L>);

impl<L: Lanes> Vectors<L> {
    /// # Safety
    /// The machine has the instructions of L, and is running a function that was compiled for them.
    #[inline(always)]
    pub(crate) unsafe fn new() -> Vectors<L> {
        Vectors(PhantomData)
    }

    #[inline(always)]
    pub(crate) fn zero(self) -> L {
        self.splat(0.0)
    }

    #[inline(always)]
    pub(crate) fn splat(self, x: f32) -> L {
        // SAFETY: `self` proves that the instructions are there; so below.
        unsafe { L::splat(x) }
    }

    /// The N elements from `at` on.
    #[inline(always)]
    pub(crate) fn load(self, from: &[f32], at: usize) -> L {
        let from = &from[at..at + L::N];
        // SAFETY: N elements were cut out.
        unsafe { L::load(from.as_ptr()) }
    }

    /// The `n` elements from `at` on, then zeros; all N if there are more.
    #[inline(always)]
    pub(crate) fn load_first(self, from: &[f32], at: usize, n: usize) -> L {
        if n >= L::N {
            return self.load(from, at);
        }
        let from = &from[at..at + n];
        // SAFETY: n elements were cut out.
        unsafe { L::load_first(from.as_ptr(), n) }
    }

    #[inline(always)]
    pub(crate) fn store(self, v: L, to: &mut [f32], at: usize) {
        let to = &mut to[at..at + L::N];
        // SAFETY: N elements were cut out.
        unsafe { v.store(to.as_mut_ptr()) }
    }

    /// The first `n` elements; all N if n is larger.
    #[inline(always)]
    pub(crate) fn store_first(self, v: L, to: &mut [f32], at: usize, n: usize) {
        if n >= L::N {
            return self.store(v, to, at);
        }
        let to = &mut to[at..at + n];
        // SAFETY: n elements were cut out.
        unsafe { v.store_first(to.as_mut_ptr(), n) }
    }

    /// Copies N rows of N elements, `from_step` apart, to columns: element (r, c) to c·`to_step` + r.
    #[inline(always)]
    pub(crate) fn transpose(self, from: &[f32], from_step: usize, to: &mut [f32], to_step: usize) {
        let from = &from[..(L::N - 1) * from_step + L::N];
        let to = &mut to[..(L::N - 1) * to_step + L::N];
        // SAFETY: all rows and all columns were cut out.
        unsafe { L::transpose(from.as_ptr(), from_step, to.as_mut_ptr(), to_step) }
    }

    #[inline(always)]
    pub(crate) fn add(self, a: L, b: L) -> L {
        // SAFETY: as in `splat`.
        unsafe { a.plus(b) }
    }

    #[inline(always)]
    pub(crate) fn sub(self, a: L, b: L) -> L {
        // SAFETY: as in `splat`.
        unsafe { a.minus(b) }
    }

    #[inline(always)]
    pub(crate) fn mul(self, a: L, b: L) -> L {
        // SAFETY: as in `splat`.
        unsafe { a.times(b) }
    }

    #[inline(always)]
    pub(crate) fn div(self, a: L, b: L) -> L {
        // SAFETY: as in `splat`.
        unsafe { a.over(b) }
    }

    /// Each a > b ? a : b, so that of two of which one is a NaN it is b.
    #[inline(always)]
    pub(crate) fn max(self, a: L, b: L) -> L {
        // SAFETY: as in `splat`.
        unsafe { a.larger(b) }
    }

    /// Each a < b ? a : b.
    #[inline(always)]
    pub(crate) fn min(self, a: L, b: L) -> L {
        // SAFETY: as in `splat`.
        unsafe { a.smaller(b) }
    }

    #[inline(always)]
    pub(crate) fn abs(self, x: L) -> L {
        // SAFETY: as in `splat`.
        unsafe { x.abs() }
    }

    /// The magnitudes of x with the signs of `of`.
    #[inline(always)]
    pub(crate) fn with_sign(self, x: L, of: L) -> L {
        // SAFETY: as in `splat`.
        unsafe { x.with_sign(of) }
    }

    /// Each x < limit ? yes : no.
    #[inline(always)]
    pub(crate) fn if_below(self, x: L, limit: L, [yes, no]: [L; 2]) -> L {
        // SAFETY: as in `splat`.
        unsafe { x.below(limit, yes, no) }
    }

    /// x·2ⁿ for integers n of at most 250 in magnitude.
    #[inline(always)]
    pub(crate) fn times_power(self, x: L, n: L) -> L {
        // SAFETY: as in `splat`.
        unsafe { x.times_power(n) }
    }

    /// The largest number of a vector without NaNs.
    #[inline(always)]
    pub(crate) fn largest(self, x: L) -> f32 {
        // SAFETY: as in `splat`.
        unsafe { x.largest() }
    }

    /// The sum of a vector.
    #[inline(always)]
    pub(crate) fn sum(self, x: L) -> f32 {
        // SAFETY: as in `splat`.
        unsafe { x.sum() }
    }

    /// c + a·b
    #[inline(always)]
    pub(crate) fn fma(self, c: L, a: L, b: L) -> L {
        // SAFETY: as in `splat`.
        unsafe { c.fma(a, b) }
    }
}

impl Lanes for [f32; 4] {
    const N: usize = 4;
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        [x; 4]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: the caller gives four readable elements.
        unsafe { p.cast::<[f32; 4]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_first(p: *const f32, n: usize) -> Self {
        // SAFETY: the caller gives n readable elements.
        std::array::from_fn(|i| if i < n { unsafe { *p.add(i) } } else { 0.0 })
    }
    #[inline(always)]
    unsafe fn prefetch(_: *const f32) {}
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: the caller gives four writable elements.
        unsafe { p.cast::<[f32; 4]>().write_unaligned(self) }
    }
    #[inline(always)]
    unsafe fn store_first(self, p: *mut f32, n: usize) {
        for (i, &x) in self.iter().enumerate().take(n) {
            // SAFETY: the caller gives n writable elements.
            unsafe { *p.add(i) = x };
        }
    }
    #[inline(always)]
    unsafe fn transpose(from: *const f32, from_step: usize, to: *mut f32, to_step: usize) {
        // SAFETY: the caller gives four rows of four readable elements, and four columns of four writable ones.
        unsafe {
            let rows: [Self; 4] = std::array::from_fn(|r| Self::load(from.add(r * from_step)));
            for c in 0..4 {
                rows.map(|row| row[c]).store(to.add(c * to_step));
            }
        }
    }
    #[inline(always)]
    unsafe fn plus(self, x: Self) -> Self {
        std::array::from_fn(|i| self[i] + x[i])
    }
    #[inline(always)]
    unsafe fn minus(self, x: Self) -> Self {
        std::array::from_fn(|i| self[i] - x[i])
    }
    #[inline(always)]
    unsafe fn times(self, x: Self) -> Self {
        std::array::from_fn(|i| self[i] * x[i])
    }
    #[inline(always)]
    unsafe fn fma(self, a: Self, b: Self) -> Self {
        std::array::from_fn(|i| self[i] + a[i] * b[i])
    }
    #[inline(always)]
    unsafe fn over(self, x: Self) -> Self {
        std::array::from_fn(|i| self[i] / x[i])
    }
    #[inline(always)]
    unsafe fn larger(self, x: Self) -> Self {
        std::array::from_fn(|i| if self[i] > x[i] { self[i] } else { x[i] })
    }
    #[inline(always)]
    unsafe fn smaller(self, x: Self) -> Self {
        std::array::from_fn(|i| if self[i] < x[i] { self[i] } else { x[i] })
    }
    #[inline(always)]
    unsafe fn abs(self) -> Self {
        self.map(f32::abs)
    }
    #[inline(always)]
    unsafe fn with_sign(self, of: Self) -> Self {
        std::array::from_fn(|i| self[i].copysign(of[i]))
    }
    #[inline(always)]
    unsafe fn below(self, limit: Self, yes: Self, no: Self) -> Self {
        std::array::from_fn(|i| if self[i] < limit[i] { yes[i] } else { no[i] })
    }
    #[inline(always)]
    unsafe fn times_power(self, n: Self) -> Self {
        // Two factors, since 2ⁿ alone may be too large or too small.
        let power = |n: i32| f32::from_bits(((n + 127) << 23) as u32);
        std::array::from_fn(|i| {
            let n = n[i] as i32;
            self[i] * power(n >> 1) * power(n - (n >> 1))
        })
    }
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        self.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        (self[0] + self[1]) + (self[2] + self[3])
    }
}
