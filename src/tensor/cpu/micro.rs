//! The innermost loops of matrix products, written once over [`Lanes`] and compiled for each set of instructions.
//!
//! This module's unsafe code rests on one invariant: whoever calls through [`Kernels`] has set every pointer of [`Tile`] or
//! [`Dots`] to memory as long as its documentation says, and has taken the `Kernels` from [`Kernels::of`], which needs a
//! [`Simd`], the proof that this machine has the instructions.
use super::{
    ahead::{Ahead, BETWEEN},
    isa::Simd,
    lanes::Lanes,
};

/// The most elements of the inner dimension that a packed block of `a` holds.
pub(crate) const KC: usize = 512;
/// Elements from row to row in a block of `a` packed by rows; not a power of two, so that rows do not share cache sets.
pub(crate) const ROW: usize = KC + 16;
/// The most rows that any kernel takes.
pub(crate) const MAX_ROWS: usize = 14;
/// Rows of `b` that are asked for before they are needed, so that they come from the second-level cache in time.
const AHEAD: usize = 16;

/// A product of `a` (R rows, R given by the choice of function) and `b`, k×(up to nr).
pub(crate) struct Tile {
    /// Inner size; by rows at most [`KC`].
    pub k: usize,
    /// The packed rows: `a[r·ROW + p]` if packed by rows, `a[p·step + r]` if by columns.
    pub a: *const f32,
    /// Elements from one column of `a` to the next: 1 if packed by rows.
    pub step: usize,
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

/// What is done ahead is not among what the tile reads or writes.
type TileFn = unsafe fn(&Tile, &mut Ahead);
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

/// A product of at most mr rows and nr columns, its operands as slices.
pub(crate) struct Product<'a> {
    /// As in [`Tile`].
    pub a: &'a [f32],
    pub layout: Layout,
    pub b: &'a [f32],
    pub ldb: usize,
    /// Rows and columns of the result, and the inner size.
    pub rows: usize,
    pub cols: usize,
    pub k: usize,
    pub add: bool,
}

/// How `a` lies in memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Layout {
    /// Rows, [`ROW`] apart.
    Rows,
    /// Columns, so many elements apart.
    Columns(usize),
}

/// Where the rows of a tile lie that are equally far apart.
pub(crate) struct Pitch([usize; MAX_ROWS]);

impl Pitch {
    /// Rows `ld` elements apart.
    pub(crate) fn new(ld: usize) -> Pitch {
        Pitch(std::array::from_fn(|r| r * ld))
    }
}

impl Kernels {
    /// Multiplies; `pitch` says where the rows of the result lie in `c`.
    pub(crate) fn product(&self, p: &Product, c: &mut [f32], Pitch(starts): &Pitch) {
        let Product { rows, cols, k, ldb, .. } = *p;
        if rows == 0 || cols == 0 || k == 0 {
            return;
        }
        let (functions, step, needed) = match p.layout {
            Layout::Rows => (self.by_rows, 1, (rows - 1) * ROW + k),
            Layout::Columns(step) => (self.by_columns, step, (k - 1) * step + rows),
        };
        assert!(cols <= self.nr && (k <= KC || p.layout != Layout::Rows), "a product of {cols} columns, {k} long");
        let (a, b) = (&p.a[..needed], &p.b[..(k - 1) * ldb + self.nr]);
        let c = &mut c[..starts[rows - 1] + cols];
        let tile = Tile {
            k,
            a: a.as_ptr(),
            step,
            b: b.as_ptr(),
            ldb,
            c: c.as_mut_ptr(),
            rows: starts.as_ptr(),
            cols,
            add: p.add,
            bias: std::ptr::null(),
        };
        let mut nothing = Ahead::NOTHING;
        // SAFETY: the slices were cut to what the tile reads and writes; `self` comes from `Kernels::of`.
        unsafe { functions[rows - 1](&tile, &mut nothing) };
    }

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
    by_rows: &[tile::<[f32; 4], 1, ROW>, tile::<[f32; 4], 2, ROW>, tile::<[f32; 4], 3, ROW>, tile::<[f32; 4], 4, ROW>],
    by_columns: &[tile::<[f32; 4], 1, 1>, tile::<[f32; 4], 2, 1>, tile::<[f32; 4], 3, 1>, tile::<[f32; 4], 4, 1>],
    dots: &[dots::<[f32; 4], 1, 2>, dots::<[f32; 4], 2, 2>],
};

/// The product of R rows with two vectors of columns, all sums in registers. RS: the stride of `a` along r.
///
/// # Safety
/// The pointers are as [`Tile`] says; the machine has the instructions of `L`.
#[inline(always)]
unsafe fn tile<L: Lanes, const R: usize, const RS: usize>(t: &Tile, ahead: &mut Ahead) {
    // SAFETY: every place lies inside what `Tile` promises: a within R rows and k columns, b within k rows of nr columns, c and
    // bias within `cols` columns.
    unsafe {
        let mut sums = [[L::splat(0.0); 2]; R];
        // The result's lines are asked for little by little in the first half: all at once would keep a and b from coming.
        let each = (2 * R * BETWEEN).div_ceil(t.k.max(1));
        let mut asked = 0;
        let (mut a, mut b, mut left) = (t.a, t.b, t.k);
        while left > 0 {
            for r in asked..R.min(asked + each) {
                let c = t.c.add(*t.rows.add(r));
                L::prefetch(c);
                L::prefetch(c.wrapping_add(L::N));
            }
            asked = R.min(asked + each);
            if !ahead.is_nothing() {
                ahead.some::<L>();
            }
            let now = left.min(BETWEEN);
            steps::<L, R, RS>(t, &mut sums, a, b, now);
            (a, b, left) = (a.wrapping_add(now * t.step), b.wrapping_add(now * t.ldb), left - now);
        }
        if t.cols == 2 * L::N && t.bias.is_null() {
            for (r, &[s0, s1]) in sums.iter().enumerate() {
                let c = t.c.add(*t.rows.add(r));
                let d = c.add(L::N);
                let (s0, s1) = if t.add { (s0.plus(L::load(c)), s1.plus(L::load(d))) } else { (s0, s1) };
                s0.store(c);
                s1.store(d);
            }
            return;
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

/// Adds `n` products to each sum, from `a` and `b` on.
///
/// # Safety
/// As [`tile`]; the columns of a and rows of b from there on are as many as `n`.
#[inline(always)]
unsafe fn steps<L: Lanes, const R: usize, const RS: usize>(
    t: &Tile,
    sums: &mut [[L; 2]; R],
    mut a: *const f32,
    mut b: *const f32,
    n: usize,
) {
    // SAFETY: as in `tile`.
    unsafe {
        // Where b is not packed its rows may lie pages apart.
        let ahead = if t.ldb == 2 * L::N { AHEAD * t.ldb } else { 0 };
        for _ in 0..n {
            L::prefetch(b.wrapping_add(ahead));
            L::prefetch(b.wrapping_add(ahead + L::N));
            let b0 = L::load(b);
            let b1 = L::load(b.add(L::N));
            for (r, s) in sums.iter_mut().enumerate() {
                let x = L::splat(*a.add(r * RS));
                s[0] = s[0].fma(x, b0);
                s[1] = s[1].fma(x, b1);
            }
            a = a.wrapping_add(t.step);
            b = b.wrapping_add(t.ldb);
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

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::*;
    use std::arch::x86_64::*;

    pub(super) static AVX512: Kernels = Kernels {
        mr: 14,
        nr: 32,
        by_rows: &[
            tile512::<1, ROW>,
            tile512::<2, ROW>,
            tile512::<3, ROW>,
            tile512::<4, ROW>,
            tile512::<5, ROW>,
            tile512::<6, ROW>,
            tile512::<7, ROW>,
            tile512::<8, ROW>,
            tile512::<9, ROW>,
            tile512::<10, ROW>,
            tile512::<11, ROW>,
            tile512::<12, ROW>,
            tile512::<13, ROW>,
            tile512::<14, ROW>,
        ],
        by_columns: &[
            tile512::<1, 1>,
            tile512::<2, 1>,
            tile512::<3, 1>,
            tile512::<4, 1>,
            tile512::<5, 1>,
            tile512::<6, 1>,
            tile512::<7, 1>,
            tile512::<8, 1>,
            tile512::<9, 1>,
            tile512::<10, 1>,
            tile512::<11, 1>,
            tile512::<12, 1>,
            tile512::<13, 1>,
            tile512::<14, 1>,
        ],
        dots: &[dots512::<1>, dots512::<2>, dots512::<3>, dots512::<4>],
    };

    pub(super) static AVX2: Kernels = Kernels {
        mr: 6,
        nr: 16,
        by_rows: &[
            tile256::<1, ROW>,
            tile256::<2, ROW>,
            tile256::<3, ROW>,
            tile256::<4, ROW>,
            tile256::<5, ROW>,
            tile256::<6, ROW>,
        ],
        by_columns: &[
            tile256::<1, 1>,
            tile256::<2, 1>,
            tile256::<3, 1>,
            tile256::<4, 1>,
            tile256::<5, 1>,
            tile256::<6, 1>,
        ],
        dots: &[dots256::<1>, dots256::<2>],
    };

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    unsafe fn tile512<const R: usize, const RS: usize>(t: &Tile, ahead: &mut Ahead) {
        // SAFETY: the caller's promise.
        unsafe { tile::<__m512, R, RS>(t, ahead) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    unsafe fn dots512<const R: usize>(t: &Dots) {
        // SAFETY: the caller's promise.
        unsafe { dots::<__m512, R, 4>(t) }
    }

    #[target_feature(enable = "avx2,fma")]
    unsafe fn tile256<const R: usize, const RS: usize>(t: &Tile, ahead: &mut Ahead) {
        // SAFETY: the caller's promise.
        unsafe { tile::<__m256, R, RS>(t, ahead) }
    }

    #[target_feature(enable = "avx2,fma")]
    unsafe fn dots256<const R: usize>(t: &Dots) {
        // SAFETY: the caller's promise.
        unsafe { dots::<__m256, R, 4>(t) }
    }
}
