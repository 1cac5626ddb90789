//! The vectors of AVX-512 and AVX2.
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
    unsafe fn over(self, x: Self) -> Self {
        unsafe { _mm512_div_ps(self, x) }
    }
    #[inline(always)]
    unsafe fn larger(self, x: Self) -> Self {
        unsafe { _mm512_max_ps(self, x) }
    }
    #[inline(always)]
    unsafe fn smaller(self, x: Self) -> Self {
        unsafe { _mm512_min_ps(self, x) }
    }
    #[inline(always)]
    unsafe fn abs(self) -> Self {
        unsafe { _mm512_abs_ps(self) }
    }
    #[inline(always)]
    unsafe fn with_sign(self, of: Self) -> Self {
        unsafe {
            let sign = _mm512_set1_ps(-0.0);
            _mm512_or_ps(_mm512_and_ps(sign, of), _mm512_andnot_ps(sign, self))
        }
    }
    #[inline(always)]
    unsafe fn below(self, limit: Self, yes: Self, no: Self) -> Self {
        unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(self, limit), no, yes) }
    }
    #[inline(always)]
    unsafe fn times_power(self, n: Self) -> Self {
        unsafe { _mm512_scalef_ps(self, n) }
    }
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        unsafe { _mm512_reduce_max_ps(self) }
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
    unsafe fn over(self, x: Self) -> Self {
        unsafe { _mm256_div_ps(self, x) }
    }
    #[inline(always)]
    unsafe fn larger(self, x: Self) -> Self {
        unsafe { _mm256_max_ps(self, x) }
    }
    #[inline(always)]
    unsafe fn smaller(self, x: Self) -> Self {
        unsafe { _mm256_min_ps(self, x) }
    }
    #[inline(always)]
    unsafe fn abs(self) -> Self {
        unsafe { _mm256_andnot_ps(_mm256_set1_ps(-0.0), self) }
    }
    #[inline(always)]
    unsafe fn with_sign(self, of: Self) -> Self {
        unsafe {
            let sign = _mm256_set1_ps(-0.0);
            _mm256_or_ps(_mm256_and_ps(sign, of), _mm256_andnot_ps(sign, self))
        }
    }
    #[inline(always)]
    unsafe fn below(self, limit: Self, yes: Self, no: Self) -> Self {
        unsafe { _mm256_blendv_ps(no, yes, _mm256_cmp_ps::<_CMP_LT_OQ>(self, limit)) }
    }
    #[inline(always)]
    unsafe fn times_power(self, n: Self) -> Self {
        unsafe {
            // Two factors, since 2ⁿ alone may be too large or too small.
            let n = _mm256_cvtps_epi32(n);
            let half = _mm256_srai_epi32::<1>(n);
            let rest = _mm256_sub_epi32(n, half);
            let bias = _mm256_set1_epi32(127);
            let first = _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(half, bias)));
            let second = _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(rest, bias)));
            _mm256_mul_ps(_mm256_mul_ps(self, first), second)
        }
    }
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        let mut x = [0.0f32; 8];
        unsafe { _mm256_storeu_ps(x.as_mut_ptr(), self) };
        x.into_iter().fold(f32::NEG_INFINITY, f32::max)
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
