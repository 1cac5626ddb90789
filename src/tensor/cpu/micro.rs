//! The innermost loops of matrix products, written once over [`Lanes`] and compiled for each set of instructions.
//!
//! This module's unsafe code rests on one invariant: whoever calls through [`Kernels`] has set every pointer of [`Tile`] or
//! [`Dots`] to memory as long as its documentation says, and has taken the `Kernels` from [`Kernels::of`], which needs a
//! [`Simd`], the proof that this machine has the instructions.
use super::isa::Simd;

/// The most elements of the inner dimension that a packed block of `a` holds.
pub(crate) const KC: usize = 256;
/// Elements from row to row in a block of `a` packed by rows; not a power of two, so that rows do not share cache sets.
pub(crate) const ROW: usize = KC + 16;
/// The most rows that any kernel takes.
pub(crate) const MAX_ROWS: usize = 14;

/// A product of `a` (R rows, R given by the choice of function) and `b`, k×(up to nr).
pub(crate) struct Tile {
    /// Inner size; by rows at most [`KC`].
    pub k: usize,
    /// The packed rows: `a[r·ROW + p]` if packed by rows, `a[p·mr + r]` if by columns.
    pub a: *const f32,
    /// `b[p·ldb + j]`, readable for all nr columns.
    pub b: *const f32,
    pub ldb: usize,
    /// Row r of the result starts at `c + rows[r]`.
    pub c: *mut f32,
    pub rows: *const usize,
    /// Columns to be written, at most nr.
    pub cols: usize,
    /// Whether to add to what is in `c`.
    pub add: bool,
    /// One summand per column, or null.
    pub bias: *const f32,
}

/// Products of R rows of `a` with `cols` rows of `b`, both contiguous along k.
pub(crate) struct Dots {
    pub k: usize,
    /// `a[r·ROW + p]`.
    pub a: *const f32,
    /// `b[j·ldb + p]`.
    pub b: *const f32,
    pub ldb: usize,
    /// As in [`Tile`].
    pub c: *mut f32,
    pub rows: *const usize,
    pub cols: usize,
    pub add: bool,
    pub bias: *const f32,
}

type TileFn = unsafe fn(&Tile);
type DotFn = unsafe fn(&Dots);

/// The functions of one set of instructions.
pub(crate) struct Kernels {
    /// Rows and columns of a tile.
    pub mr: usize,
    pub nr: usize,
    /// For 1, 2, … mr rows of `a` packed by rows.
    pub by_rows: &'static [TileFn],
    /// For 1, 2, … mr rows of `a` packed by columns.
    pub by_columns: &'static [TileFn],
    /// For 1, 2, … rows.
    pub dots: &'static [DotFn],
}

impl Kernels {
    pub(crate) fn of(simd: Simd) -> &'static Kernels {
        match simd.isa() {
            #[cfg(target_arch = "x86_64")]
            super::isa::Isa::Avx512 => &x86::AVX512,
            #[cfg(target_arch = "x86_64")]
            super::isa::Isa::Avx2 => &x86::AVX2,
            _ => &PORTABLE,
        }
    }
}

static PORTABLE: Kernels = Kernels {
    mr: 4,
    nr: 8,
    by_rows: &[
        tile::<[f32; 4], 1, ROW, 1>,
        tile::<[f32; 4], 2, ROW, 1>,
        tile::<[f32; 4], 3, ROW, 1>,
        tile::<[f32; 4], 4, ROW, 1>,
    ],
    by_columns: &[
        tile::<[f32; 4], 1, 1, 4>,
        tile::<[f32; 4], 2, 1, 4>,
        tile::<[f32; 4], 3, 1, 4>,
        tile::<[f32; 4], 4, 1, 4>,
    ],
    dots: &[dots::<[f32; 4], 1, 2>, dots::<[f32; 4], 2, 2>],
};

/// A vector of f32.
trait Lanes: Copy {
    const N: usize;
    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(p: *const f32) -> Self;
    /// The first `n` ≤ N elements, then zeros.
    unsafe fn load_first(p: *const f32, n: usize) -> Self;
    unsafe fn store(self, p: *mut f32);
    unsafe fn store_first(self, p: *mut f32, n: usize);
    unsafe fn plus(self, x: Self) -> Self;
    /// self + a·b
    unsafe fn fma(self, a: Self, b: Self) -> Self;
    unsafe fn sum(self) -> f32;
}

/// The product of R rows with two vectors of columns, all sums in registers. RS and CS: strides of `a` along r and p.
///
/// # Safety
/// The pointers are as [`Tile`] says; the machine has the instructions of `L`.
#[inline(always)]
unsafe fn tile<L: Lanes, const R: usize, const RS: usize, const CS: usize>(t: &Tile) {
    // SAFETY: every place lies inside what `Tile` promises: a within R rows and k columns, b within k rows of nr columns, c and
    // bias within `cols` columns.
    unsafe {
        let mut sums = [[L::splat(0.0); 2]; R];
        let (mut a, mut b) = (t.a, t.b);
        for _ in 0..t.k {
            let b0 = L::load(b);
            let b1 = L::load(b.add(L::N));
            for (r, s) in sums.iter_mut().enumerate() {
                let x = L::splat(*a.add(r * RS));
                s[0] = s[0].fma(x, b0);
                s[1] = s[1].fma(x, b1);
            }
            a = a.wrapping_add(CS);
            b = b.wrapping_add(t.ldb);
        }
        // The sums are laid down before the branches that follow: indexed in a loop that is not unrolled they would live in
        // memory all along, not in registers.
        let mut laid = std::mem::MaybeUninit::<[[L; 2]; R]>::uninit();
        let laid: *mut [L; 2] = std::hint::black_box(laid.as_mut_ptr()).cast();
        for (r, &s) in sums.iter().enumerate() {
            laid.add(r).write(s);
        }
        let widths = [t.cols.min(L::N), t.cols.saturating_sub(L::N)];
        for r in 0..R {
            let c = t.c.add(*t.rows.add(r));
            for (j, n) in widths.into_iter().enumerate().filter(|(_, n)| *n > 0) {
                let (s, c, whole) = ((*laid.add(r))[j], c.add(j * L::N), n == L::N);
                let get = |p: *const f32| if whole { L::load(p) } else { L::load_first(p, n) };
                let s = if t.add { s.plus(get(c)) } else { s };
                let s = if t.bias.is_null() { s } else { s.plus(get(t.bias.add(j * L::N))) };
                if whole {
                    s.store(c);
                } else {
                    s.store_first(c, n);
                }
            }
        }
    }
}

/// R rows of `a` times rows of `b`, J of them at a time.
///
/// # Safety
/// The pointers are as [`Dots`] says; the machine has the instructions of `L`.
#[inline(always)]
unsafe fn dots<L: Lanes, const R: usize, const J: usize>(t: &Dots) {
    // SAFETY: the columns j..j + J lie below `cols`.
    unsafe {
        let mut j = 0;
        while j + J <= t.cols {
            dots_at::<L, R, J>(t, j);
            j += J;
        }
        while j < t.cols {
            dots_at::<L, R, 1>(t, j);
            j += 1;
        }
    }
}

/// # Safety
/// As [`dots`], and j + J ≤ cols.
#[inline(always)]
unsafe fn dots_at<L: Lanes, const R: usize, const J: usize>(t: &Dots, j: usize) {
    // SAFETY: a within R rows and k columns, b within cols rows and k columns, c and bias within cols columns.
    unsafe {
        let mut sums = [[L::splat(0.0); J]; R];
        let (a, b) = (t.a, t.b.add(j * t.ldb));
        let mut p = 0;
        while p + L::N <= t.k {
            let mut xs = [L::splat(0.0); R];
            for (r, x) in xs.iter_mut().enumerate() {
                *x = L::load(a.add(r * ROW + p));
            }
            for i in 0..J {
                let y = L::load(b.add(i * t.ldb + p));
                for (s, x) in sums.iter_mut().zip(xs) {
                    s[i] = s[i].fma(x, y);
                }
            }
            p += L::N;
        }
        if p < t.k {
            for i in 0..J {
                let y = L::load_first(b.add(i * t.ldb + p), t.k - p);
                for (r, s) in sums.iter_mut().enumerate() {
                    s[i] = s[i].fma(L::load_first(a.add(r * ROW + p), t.k - p), y);
                }
            }
        }
        for (r, s) in sums.iter().enumerate() {
            for (i, &s) in s.iter().enumerate() {
                let c = t.c.add(*t.rows.add(r) + j + i);
                let s = s.sum() + if t.add { *c } else { 0.0 };
                *c = s + if t.bias.is_null() { 0.0 } else { *t.bias.add(j + i) };
            }
        }
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
    use super::*;
    use std::arch::x86_64::*;

    pub(super) static AVX512: Kernels = Kernels {
        mr: 14,
        nr: 32,
        by_rows: &[
            tile512::<1, ROW, 1>,
            tile512::<2, ROW, 1>,
            tile512::<3, ROW, 1>,
            tile512::<4, ROW, 1>,
            tile512::<5, ROW, 1>,
            tile512::<6, ROW, 1>,
            tile512::<7, ROW, 1>,
            tile512::<8, ROW, 1>,
            tile512::<9, ROW, 1>,
            tile512::<10, ROW, 1>,
            tile512::<11, ROW, 1>,
            tile512::<12, ROW, 1>,
            tile512::<13, ROW, 1>,
            tile512::<14, ROW, 1>,
        ],
        by_columns: &[
            tile512::<1, 1, 14>,
            tile512::<2, 1, 14>,
            tile512::<3, 1, 14>,
            tile512::<4, 1, 14>,
            tile512::<5, 1, 14>,
            tile512::<6, 1, 14>,
            tile512::<7, 1, 14>,
            tile512::<8, 1, 14>,
            tile512::<9, 1, 14>,
            tile512::<10, 1, 14>,
            tile512::<11, 1, 14>,
            tile512::<12, 1, 14>,
            tile512::<13, 1, 14>,
            tile512::<14, 1, 14>,
        ],
        dots: &[dots512::<1>, dots512::<2>, dots512::<3>, dots512::<4>],
    };

    pub(super) static AVX2: Kernels = Kernels {
        mr: 6,
        nr: 16,
        by_rows: &[
            tile256::<1, ROW, 1>,
            tile256::<2, ROW, 1>,
            tile256::<3, ROW, 1>,
            tile256::<4, ROW, 1>,
            tile256::<5, ROW, 1>,
            tile256::<6, ROW, 1>,
        ],
        by_columns: &[
            tile256::<1, 1, 6>,
            tile256::<2, 1, 6>,
            tile256::<3, 1, 6>,
            tile256::<4, 1, 6>,
            tile256::<5, 1, 6>,
            tile256::<6, 1, 6>,
        ],
        dots: &[dots256::<1>, dots256::<2>],
    };

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    unsafe fn tile512<const R: usize, const RS: usize, const CS: usize>(t: &Tile) {
        // SAFETY: the caller's promise.
        unsafe { tile::<__m512, R, RS, CS>(t) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    unsafe fn dots512<const R: usize>(t: &Dots) {
        // SAFETY: the caller's promise.
        unsafe { dots::<__m512, R, 4>(t) }
    }

    #[target_feature(enable = "avx2,fma")]
    unsafe fn tile256<const R: usize, const RS: usize, const CS: usize>(t: &Tile) {
        // SAFETY: the caller's promise.
        unsafe { tile::<__m256, R, RS, CS>(t) }
    }

    #[target_feature(enable = "avx2,fma")]
    unsafe fn dots256<const R: usize>(t: &Dots) {
        // SAFETY: the caller's promise.
        unsafe { dots::<__m256, R, 4>(t) }
    }

    // SAFETY of the two implementations: they are only reached from the four functions above, which have the instructions; the
    // caller of each method gives N (or n) readable or writable elements.
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
