//! Self-attention of the reference backend: one row of scores at a time.
use super::*;

/// Where the elements of one head lie.
struct Head {
    a: Attention,
    n: usize,
    h: usize,
}

impl Head {
    fn all(a: Attention) -> impl Iterator<Item = Head> {
        (0..a.n).flat_map(move |n| (0..a.heads).map(move |h| Head { a, n, h }))
    }

    /// Element j of token i of q (`which` 0), k (1) or v (2).
    fn qkv(&self, which: usize, i: usize, j: usize) -> usize {
        (((self.n * self.a.t + i) * 3 + which) * self.a.heads + self.h) * self.a.d + j
    }

    fn y(&self, i: usize, j: usize) -> usize {
        ((self.n * self.a.t + i) * self.a.heads + self.h) * self.a.d + j
    }

    fn lse(&self, i: usize) -> usize {
        (self.n * self.a.heads + self.h) * self.a.t + i
    }

    /// The scores q·k/√d of token i with those that it sees.
    fn scores<T: Element>(&self, qkv: &[T], i: usize) -> Vec<f64> {
        let Attention { t, d, causal, .. } = self.a;
        let value = |which, i, j| qkv[self.qkv(which, i, j)].to_f64();
        let dot = |k| (0..d).map(|j| value(0, i, j) * value(1, k, j)).sum::<f64>() / (d as f64).sqrt();
        (0..if causal { i + 1 } else { t }).map(dot).collect()
    }
}

pub(super) fn forward<T: Element>(a: Attention, qkv: &[T], y: &mut [T], lse: &mut [T]) -> Result<()> {
    for head in Head::all(a) {
        for i in 0..a.t {
            let scores = head.scores(qkv, i);
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, |a, v| binary(Binary::Max, a, v));
            let sum = max + scores.iter().map(|s| (s - max).exp()).sum::<f64>().ln();
            lse[head.lse(i)] = T::from_f64(sum);
            for j in 0..a.d {
                let terms = scores.iter().enumerate().map(|(k, s)| (s - sum).exp() * qkv[head.qkv(2, k, j)].to_f64());
                y[head.y(i, j)] = T::from_f64(terms.sum());
            }
        }
    }
    Ok(())
}

pub(super) fn backward<T: Element>(
    a: Attention,
    qkv: &[T],
    [y, lse]: [&[T]; 2],
    dy: &[T],
    dqkv: &mut [T],
) -> Result<()> {
    let mut sums = vec![0.0; dqkv.len()];
    let root = (a.d as f64).sqrt();
    for head in Head::all(a) {
        for i in 0..a.t {
            let dot = |f: &dyn Fn(usize) -> f64| (0..a.d).map(|j| dy[head.y(i, j)].to_f64() * f(j)).sum::<f64>();
            let mean = dot(&|j| y[head.y(i, j)].to_f64());
            for (k, score) in head.scores(qkv, i).into_iter().enumerate() {
                let p = (score - lse[head.lse(i)].to_f64()).exp();
                let ds = p * (dot(&|j| qkv[head.qkv(2, k, j)].to_f64()) - mean) / root;
                for j in 0..a.d {
                    sums[head.qkv(0, i, j)] += ds * qkv[head.qkv(1, k, j)].to_f64();
                    sums[head.qkv(1, k, j)] += ds * qkv[head.qkv(0, i, j)].to_f64();
                    sums[head.qkv(2, k, j)] += p * dy[head.y(i, j)].to_f64();
                }
            }
        }
    }
    dqkv.iter_mut().zip(sums).for_each(|(g, s)| *g = T::from_f64(s));
    Ok(())
}
