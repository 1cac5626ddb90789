//! Vectors of f32 of each set of instructions, and their safe use.
//!
//! The unsafe code here rests on one invariant: a [`Vectors`] exists only in code that [`Simd::vectors`](super::isa::Simd::vectors)
//! has entered through a function compiled for its instructions, which this machine was found to have. Its methods bound-check
//! every access to memory.
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
    unsafe fn store(self, p: *mut f32);
    unsafe fn store_first(self, p: *mut f32, n: usize);
    unsafe fn plus(self, x: Self) -> Self;
    unsafe fn minus(self, x: Self) -> Self;
    unsafe fn times(self, x: Self) -> Self;
    /// self + a·b
    unsafe fn fma(self, a: Self, b: Self) -> Self;
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
    unsafe fn sum(self) -> f32 {
        (self[0] + self[1]) + (self[2] + self[3])
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Lanes;
    use std::arch::x86_64::*;

    impl Lanes for __m512 {
        const N: usize = 16;
        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            unsafe { _mm512_set1_ps(x) }
        }
        #[inline(always)]
        unsafe fn load(p: *const f32) -> Self {
            unsafe { _mm512_loadu_ps(p) }
        }
        #[inline(always)]
        unsafe fn load_first(p: *const f32, n: usize) -> Self {
            unsafe { _mm512_maskz_loadu_ps(first(n), p) }
        }
        #[inline(always)]
        unsafe fn store(self, p: *mut f32) {
            unsafe { _mm512_storeu_ps(p, self) }
        }
        #[inline(always)]
        unsafe fn store_first(self, p: *mut f32, n: usize) {
            unsafe { _mm512_mask_storeu_ps(p, first(n), self) }
        }
        #[inline(always)]
        unsafe fn plus(self, x: Self) -> Self {
            unsafe { _mm512_add_ps(self, x) }
        }
        #[inline(always)]
        unsafe fn minus(self, x: Self) -> Self {
            unsafe { _mm512_sub_ps(self, x) }
        }
        #[inline(always)]
        unsafe fn times(self, x: Self) -> Self {
            unsafe { _mm512_mul_ps(self, x) }
        }
        #[inline(always)]
        unsafe fn fma(self, a: Self, b: Self) -> Self {
            unsafe { _mm512_fmadd_ps(a, b, self) }
        }
        #[inline(always)]
        unsafe fn sum(self) -> f32 {
            unsafe { _mm512_reduce_add_ps(self) }
        }
    }

    /// The mask of the first `n` of 16 elements.
    fn first(n: usize) -> __mmask16 {
        ((1u32 << n) - 1) as __mmask16
    }

    impl Lanes for __m256 {
        const N: usize = 8;
        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            unsafe { _mm256_set1_ps(x) }
        }
        #[inline(always)]
        unsafe fn load(p: *const f32) -> Self {
            unsafe { _mm256_loadu_ps(p) }
        }
        #[inline(always)]
        unsafe fn load_first(p: *const f32, n: usize) -> Self {
            unsafe { _mm256_maskload_ps(p, mask(n)) }
        }
        #[inline(always)]
        unsafe fn store(self, p: *mut f32) {
            unsafe { _mm256_storeu_ps(p, self) }
        }
        #[inline(always)]
        unsafe fn store_first(self, p: *mut f32, n: usize) {
            unsafe { _mm256_maskstore_ps(p, mask(n), self) }
        }
        #[inline(always)]
        unsafe fn plus(self, x: Self) -> Self {
            unsafe { _mm256_add_ps(self, x) }
        }
        #[inline(always)]
        unsafe fn minus(self, x: Self) -> Self {
            unsafe { _mm256_sub_ps(self, x) }
        }
        #[inline(always)]
        unsafe fn times(self, x: Self) -> Self {
            unsafe { _mm256_mul_ps(self, x) }
        }
        #[inline(always)]
        unsafe fn fma(self, a: Self, b: Self) -> Self {
            unsafe { _mm256_fmadd_ps(a, b, self) }
        }
        #[inline(always)]
        unsafe fn sum(self) -> f32 {
            let mut x = [0.0f32; 8];
            unsafe { _mm256_storeu_ps(x.as_mut_ptr(), self) };
            ((x[0] + x[4]) + (x[1] + x[5])) + ((x[2] + x[6]) + (x[3] + x[7]))
        }
    }

    /// The mask of the first `n` of 8 elements.
    #[inline(always)]
    unsafe fn mask(n: usize) -> __m256i {
        const ONES: [i32; 16] = [-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0];
        // SAFETY: n ≤ 8, so that eight elements from 8 − n on are inside.
        unsafe { _mm256_loadu_si256(ONES.as_ptr().add(8 - n).cast()) }
    }
}
