//! The patches of an image that a convolution multiplies, gathered straight from x[n,h,w,c]: nothing is unfolded in memory.
//!
//! A *pixel* is a position of a grid laid over the images; it sees a patch of taps, each with `run` channels. Taps that are
//! neighbours in memory form a *segment*, so that a patch of a 3×3 kernel is three copies, not nine.
use super::{isa::Simd, micro::ROW, pack::Pieces};
use std::ops::Range;

pub(crate) struct Patches<'a> {
    /// The images, [n,hw,channels].
    data: &'a [f32],
    hw: [usize; 2],
    channels: usize,
    /// The channels that are seen: `run` of them from `first` on.
    first: usize,
    run: usize,
    /// Height and width of the grid, and image pixels from one of its pixels to the next.
    grid: [usize; 2],
    step: [usize; 2],
    /// Where each segment's first tap is, relative to the grid's pixel; in order of the patch's elements.
    segments: Vec<[isize; 2]>,
    /// Taps of a segment.
    taps: usize,
}

/// Where the patches come from.
pub(crate) struct Source<'a> {
    pub data: &'a [f32],
    pub hw: [usize; 2],
    pub channels: usize,
    pub first: usize,
    pub run: usize,
}

/// A pixel of the grid: image, row and column.
#[derive(Clone, Copy)]
struct Pixel {
    n: usize,
    at: [usize; 2],
}

impl<'a> Patches<'a> {
    /// `rows` and `columns`: the offsets of the taps along both axes, ascending.
    pub(crate) fn new(
        source: Source<'a>,
        grid: [usize; 2],
        step: [usize; 2],
        rows: &[isize],
        columns: &[isize],
    ) -> Patches<'a> {
        let Source { data, hw, channels, first, run } = source;
        let joined = run == channels && columns.windows(2).all(|w| w[1] == w[0] + 1);
        let (starts, taps) = if joined { (&columns[..columns.len().min(1)], columns.len()) } else { (columns, 1) };
        let segments = rows.iter().flat_map(|&h| starts.iter().map(move |&w| [h, w])).collect();
        Patches { data, hw, channels, first, run, grid, step, segments, taps: taps.max(1) }
    }

    fn pixel(&self, i: usize) -> Pixel {
        let [h, w] = self.grid;
        Pixel { n: i / (h * w), at: [i / w % h, i % w] }
    }

    /// Where the image row of segment `s` as seen from grid row `i` of image `n` starts, if it is not padding.
    fn image_row(&self, n: usize, i: usize, s: [isize; 2]) -> Option<usize> {
        let h = (i * self.step[0]) as isize + s[0];
        let h = usize::try_from(h).ok().filter(|&h| h < self.hw[0])?;
        Some((n * self.hw[0] + h) * self.hw[1] * self.channels + self.first)
    }

    /// The elements `part` of the segment whose first tap is at column `w` of the image row at `row`; padding is zero.
    fn copy(&self, row: usize, w: isize, part: Range<usize>, out: &mut [f32]) {
        let lo = w.min(0).unsigned_abs().min(self.taps) * self.run;
        let hi = (self.hw[1] as isize - w).clamp(0, self.taps as isize) as usize * self.run;
        let inside = part.start.max(lo)..part.end.min(hi);
        if inside.is_empty() {
            return out.fill(0.0);
        }
        let (before, after) = (inside.start - part.start, inside.end - part.start);
        out[..before].fill(0.0);
        out[after..].fill(0.0);
        let at = (row as isize + w * self.channels as isize) as usize;
        let from = &self.data[at.wrapping_add(inside.start)..][..inside.len()];
        out[before..after].copy_from_slice(from);
    }

    /// Packs the elements `ks` of the patches of the pixels `rows`, by rows.
    pub(crate) fn pack_pixels(&self, simd: Simd, rows: Range<usize>, ks: Range<usize>, out: &mut [f32]) {
        let len = self.taps * self.run;
        let mut i = rows.start;
        while i < rows.end {
            let first = self.pixel(i);
            let count = (self.grid[1] - first.at[1]).min(rows.end - i);
            let mut p = ks.start;
            while p < ks.end {
                let (s, start) = (self.segments[p / len], p % len);
                let part = start..len.min(start + ks.end - p);
                let out = &mut out[(i - rows.start) * ROW + p - ks.start..];
                p += part.len();
                self.pack_line(simd, first, count, s, part, ROW, out);
            }
            i += count;
        }
    }

    /// Packs the elements `rows` of the patches of the pixels `ks`, by columns.
    pub(crate) fn pack_taps(&self, simd: Simd, rows: Range<usize>, ks: Range<usize>, mr: usize, out: &mut [f32]) {
        let len = self.taps * self.run;
        let mut m = rows.start;
        while m < rows.end {
            let (s, start) = (self.segments[m / len], m % len);
            let part = start..len.min(start + rows.end - m);
            let column = m - rows.start;
            m += part.len();
            let mut p = ks.start;
            while p < ks.end {
                let Pixel { n, at } = self.pixel(p);
                let count = (self.grid[1] - at[1]).min(ks.end - p);
                let out = &mut out[(p - ks.start) * mr + column..];
                self.pack_line(simd, Pixel { n, at }, count, s, part.clone(), mr, out);
                p += count;
            }
        }
    }

    /// Packs the elements `part` of segment `s` of `count` pixels of one grid row, from `first` on, to places `apart`.
    fn pack_line(
        &self,
        simd: Simd,
        first: Pixel,
        count: usize,
        s: [isize; 2],
        part: Range<usize>,
        apart: usize,
        out: &mut [f32],
    ) {
        let Some(row) = self.image_row(first.n, first.at[0], s) else {
            return (0..count).for_each(|i| out[i * apart..][..part.len()].fill(0.0));
        };
        let step = self.step[1];
        let w = |i: usize| ((first.at[1] + i) * step) as isize + s[1];
        // The pixels lo..hi see no padding in this part: taps t0..=t1 of the segment are inside for 0 ≤ w + t0, w + t1 < W.
        let (t0, t1) = ((part.start / self.run) as isize, ((part.end - 1) / self.run) as isize);
        let steps_to = |x: isize| (x.max(0) as usize).div_ceil(step).min(count);
        let lo = steps_to(-t0 - w(0));
        let hi = steps_to(self.hw[1] as isize - t1 - w(0)).max(lo);
        for i in (0..lo).chain(hi..count) {
            self.copy(row, w(i), part.clone(), &mut out[i * apart..][..part.len()]);
        }
        if lo < hi {
            let at = (row as isize + w(lo) * self.channels as isize) as usize;
            let from = &self.data[at.wrapping_add(part.start)..];
            let (to, from_step) = (&mut out[lo * apart..], step * self.channels);
            simd.run(Pieces { from, from_step, to, to_step: apart, count: hi - lo, len: part.len() });
        }
    }
}
