//! Counter-based random numbers: Philox4x32-10 (Salmon et al., SC 2011, "Parallel random numbers: as easy as 1, 2, 3").
//!
//! A number depends on its key and its position only, so initialisation, dropout and shuffling are the same under every
//! partition, number of ranks and order of execution.

/// A stream of random numbers: the key, and the words of the counter that do not change within the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Philox {
    key: [u32; 2],
    step: u32,
}

impl Philox {
    /// The stream of `name` (a node or parameter, or what the numbers are for) at `step` under `seed`.
    pub fn new(seed: u64, step: u64, name: &str) -> Philox {
        let key = seed ^ fnv1a(name.as_bytes());
        // Steps beyond 2³² go on in the key.
        let key = key.wrapping_add((step >> 32).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        Philox { key: [key as u32, (key >> 32) as u32], step: step as u32 }
    }

    /// The four numbers of block `block` of item (sample) `item`; item and block below 2⁴⁸ each.
    #[inline(always)]
    pub fn block(&self, item: u64, block: u64) -> [u32; 4] {
        let high = ((item >> 32) as u32) << 16 | (block >> 32) as u32 & 0xFFFF;
        philox4x32([item as u32, block as u32, high, self.step], self.key)
    }

    /// Uniform in [0, 1) with 24 bits: what `f32` holds exactly.
    pub fn unit(word: u32) -> f32 {
        (word >> 8) as f32 * (1.0 / (1 << 24) as f32)
    }

    /// `len` numbers uniform in [0, 1) with 53 bits.
    pub fn uniform(&self, item: u64, len: usize) -> impl Iterator<Item = f64> + '_ {
        (0..len.div_ceil(2) as u64)
            .flat_map(move |b| {
                let [a, b, c, d] = self.block(item, b);
                [unit53(a, b), unit53(c, d)]
            })
            .take(len)
    }

    /// `len` numbers of the standard normal distribution (Box–Muller).
    pub fn normal(&self, item: u64, len: usize) -> impl Iterator<Item = f64> + '_ {
        (0..len.div_ceil(2) as u64)
            .flat_map(move |b| {
                let [a, b, c, d] = self.block(item, b);
                let r = (-2.0 * (1.0 - unit53(a, b)).ln()).sqrt();
                let angle = std::f64::consts::TAU * unit53(c, d);
                [r * angle.cos(), r * angle.sin()]
            })
            .take(len)
    }

    /// A uniform integer below `n` (n > 0), by multiplication of 64 bits.
    pub fn below(&self, item: u64, block: u64, n: u64) -> u64 {
        let [a, b, ..] = self.block(item, block);
        ((((u128::from(a) << 32) | u128::from(b)) * u128::from(n)) >> 64) as u64
    }

    /// The numbers 0..n in random order (Fisher–Yates).
    pub fn permutation(&self, n: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..n).collect();
        for i in (1..n).rev() {
            order.swap(i, self.below(0, i as u64, i as u64 + 1) as usize);
        }
        order
    }
}

fn unit53(hi: u32, lo: u32) -> f64 {
    ((u64::from(hi) << 32 | u64::from(lo)) >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

/// FNV-1a, 64 bits: a hash of names that is the same on every machine.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |h, &b| (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// Ten rounds; inlined, so that a loop over blocks becomes vector code.
#[inline(always)]
fn philox4x32(mut c: [u32; 4], mut k: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let p = u64::from(c[0]) * 0xD251_1F53;
        let q = u64::from(c[2]) * 0xCD9E_8D57;
        c = [(q >> 32) as u32 ^ c[1] ^ k[0], q as u32, (p >> 32) as u32 ^ c[3] ^ k[1], p as u32];
        k = [k[0].wrapping_add(0x9E37_79B9), k[1].wrapping_add(0xBB67_AE85)];
    }
    c
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers that Random123 publishes for philox4x32-10.
    #[test]
    fn known_answers() {
        assert_eq!(philox4x32([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox4x32([u32::MAX; 4], [u32::MAX; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        assert_eq!(
            philox4x32([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn moments_and_permutation() {
        let p = Philox::new(3, 5, "x");
        let n = 100_000;
        let mean = p.uniform(1, n).sum::<f64>() / n as f64;
        let var = p.normal(2, n).map(|v| v * v).sum::<f64>() / n as f64;
        assert!((mean - 0.5).abs() < 5e-3 && (var - 1.0).abs() < 2e-2, "{mean} {var}");
        let mut order = p.permutation(1000);
        assert_ne!(order[..10], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
        order.sort_unstable();
        assert!(order.into_iter().eq(0..1000));
        assert_ne!(Philox::new(3, 6, "x"), p);
    }
}
