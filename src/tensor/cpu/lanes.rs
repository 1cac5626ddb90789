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
        unsafe fn prefetch(p: *const f32) {
            unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
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
        unsafe fn transpose(from: *const f32, from_step: usize, to: *mut f32, to_step: usize) {
            unsafe {
                let mut rows = [_mm512_setzero_ps(); 16];
                for (r, row) in rows.iter_mut().enumerate() {
                    *row = _mm512_loadu_ps(from.add(r * from_step));
                }
                // By quarters of a vector: of four rows at a time, column 4·q + c to quarter q of vector c …
                for i in [0, 4, 8, 12] {
                    let ab = _mm512_castps_pd(_mm512_unpacklo_ps(rows[i], rows[i + 1]));
                    let ab2 = _mm512_castps_pd(_mm512_unpackhi_ps(rows[i], rows[i + 1]));
                    let cd = _mm512_castps_pd(_mm512_unpacklo_ps(rows[i + 2], rows[i + 3]));
                    let cd2 = _mm512_castps_pd(_mm512_unpackhi_ps(rows[i + 2], rows[i + 3]));
                    rows[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd));
                    rows[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
                    rows[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab2, cd2));
                    rows[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab2, cd2));
                }
                // … then the quarters q of all four together.
                for c in 0..4 {
                    let even = _mm512_shuffle_f32x4::<0x88>(rows[c], rows[4 + c]);
                    let odd = _mm512_shuffle_f32x4::<0xdd>(rows[c], rows[4 + c]);
                    let even2 = _mm512_shuffle_f32x4::<0x88>(rows[8 + c], rows[12 + c]);
                    let odd2 = _mm512_shuffle_f32x4::<0xdd>(rows[8 + c], rows[12 + c]);
                    _mm512_storeu_ps(to.add(c * to_step), _mm512_shuffle_f32x4::<0x88>(even, even2));
                    _mm512_storeu_ps(to.add((4 + c) * to_step), _mm512_shuffle_f32x4::<0x88>(odd, odd2));
                    _mm512_storeu_ps(to.add((8 + c) * to_step), _mm512_shuffle_f32x4::<0xdd>(even, even2));
                    _mm512_storeu_ps(to.add((12 + c) * to_step), _mm512_shuffle_f32x4::<0xdd>(odd, odd2));
                }
            }
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
        unsafe fn prefetch(p: *const f32) {
            unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
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
        unsafe fn transpose(from: *const f32, from_step: usize, to: *mut f32, to_step: usize) {
            unsafe {
                let mut rows = [_mm256_setzero_ps(); 8];
                for (r, row) in rows.iter_mut().enumerate() {
                    *row = _mm256_loadu_ps(from.add(r * from_step));
                }
                // As above, by halves.
                for i in [0, 4] {
                    let ab = _mm256_castps_pd(_mm256_unpacklo_ps(rows[i], rows[i + 1]));
                    let ab2 = _mm256_castps_pd(_mm256_unpackhi_ps(rows[i], rows[i + 1]));
                    let cd = _mm256_castps_pd(_mm256_unpacklo_ps(rows[i + 2], rows[i + 3]));
                    let cd2 = _mm256_castps_pd(_mm256_unpackhi_ps(rows[i + 2], rows[i + 3]));
                    rows[i] = _mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd));
                    rows[i + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd));
                    rows[i + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(ab2, cd2));
                    rows[i + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(ab2, cd2));
                }
                for c in 0..4 {
                    let (above, below) = (rows[c], rows[4 + c]);
                    _mm256_storeu_ps(to.add(c * to_step), _mm256_permute2f128_ps::<0x20>(above, below));
                    _mm256_storeu_ps(to.add((4 + c) * to_step), _mm256_permute2f128_ps::<0x31>(above, below));
                }
            }
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
