//! The limit that products are measured against: multiply-adds whose operands never leave the registers.
use super::{
    Isa,
    isa::{Simd, VectorJob},
    lanes::{Lanes, Vectors},
};
use crate::Result;
use std::{
    hint::black_box,
    time::{Duration, Instant},
};

/// Multiply-adds between two looks at the clock, some 60 µs.
const BETWEEN: usize = 3 << 16;

impl Isa {
    /// Floating-point operations a second that multiply-adds of these instructions reach on the core that the caller runs on, as
    /// a mean over about `time`. Less than at other times means that something else uses the core, or the one that it shares
    /// units with.
    ///
    /// # Errors
    /// If this machine lacks the instructions.
    pub fn peak_flops(self, time: Duration) -> Result<f64> {
        let simd = Simd::new(self)?;
        let (mut operations, start) = (0, Instant::now());
        loop {
            simd.vectors(MultiplyAdds { operations: &mut operations });
            let passed = start.elapsed();
            if passed >= time {
                return Ok(operations as f64 / passed.as_secs_f64());
            }
        }
    }
}

struct MultiplyAdds<'a> {
    operations: &'a mut u64,
}

impl VectorJob for MultiplyAdds<'_> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self, v: Vectors<L>) {
        // Sums that do not wait for each other: many times the units times their latency, as many as there are registers for.
        if L::N == 16 {
            multiply_adds::<L, 24>(v)
        } else {
            multiply_adds::<L, 12>(v)
        }
        *self.operations += (2 * BETWEEN * L::N) as u64;
    }
}

#[inline(always)]
fn multiply_adds<L: Lanes, const SUMS: usize>(v: Vectors<L>) {
    let (x, y) = (v.splat(black_box(0.999)), v.splat(black_box(1e-3)));
    let mut sums = [y; SUMS];
    for _ in 0..BETWEEN / SUMS {
        for s in &mut sums {
            *s = v.fma(y, *s, x);
        }
    }
    let mut seen = [0.0; 16];
    for s in sums {
        v.store(s, &mut seen, 0);
        black_box(&seen);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_set_is_measured() {
        let peak = |isa: Isa| isa.peak_flops(Duration::from_millis(20)).unwrap();
        let all: Vec<f64> = Isa::available().into_iter().map(peak).collect();
        assert!(all.iter().all(|&flops| flops > 1e8 && flops < 1e13), "{all:?}");
    }
}
