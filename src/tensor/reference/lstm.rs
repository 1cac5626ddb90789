//! Long short-term memory of the reference backend: one sample, one token at a time.
use super::*;

/// σ(a) of gates i, f and o, tanh(a) of gate g.
fn activate(gate: usize, a: f64) -> f64 {
    unary(if gate == 2 { Unary::Tanh } else { Unary::Sigmoid }, a)
}

pub(super) fn forward<T: Element>(
    l: Lstm,
    w: &[T],
    start: Option<[&[T]; 2]>,
    (before, gates): (Option<&[T]>, &mut [T]),
    y: &mut [T],
    cells: &mut [T],
) -> Result<()> {
    let Lstm { n, t, d } = l;
    if let Some(before) = before {
        gates.copy_from_slice(before);
    }
    for s in 0..n {
        let state = |which: usize, j: usize| start.map_or(0.0, |s0| s0[which][s * d + j].to_f64());
        let mut h: Vec<f64> = (0..d).map(|j| state(0, j)).collect();
        let mut c: Vec<f64> = (0..d).map(|j| state(1, j)).collect();
        for step in s * t..(s + 1) * t {
            let row = &mut gates[step * 4 * d..][..4 * d];
            for (j, a) in row.iter_mut().enumerate() {
                let dot: f64 = (0..d).map(|p| h[p] * w[j * d + p].to_f64()).sum();
                *a = T::from_f64(activate(j / d, a.to_f64() + dot));
            }
            for j in 0..d {
                let [i, f, g, o] = [0, 1, 2, 3].map(|gate| row[gate * d + j].to_f64());
                c[j] = f * c[j] + i * g;
                h[j] = o * c[j].tanh();
                (cells[step * d + j], y[step * d + j]) = (T::from_f64(c[j]), T::from_f64(h[j]));
            }
        }
    }
    Ok(())
}

pub(super) fn backward<T: Element>(
    l: Lstm,
    w: &[T],
    [gates, cells]: [&[T]; 2],
    c0: Option<&[T]>,
    dy: &[T],
    dlast: Option<[&[T]; 2]>,
    [da, dh0, dc0]: [&mut [T]; 3],
) -> Result<()> {
    let Lstm { n, t, d } = l;
    for s in 0..n {
        let last = |which: usize, j: usize| dlast.map_or(0.0, |last| last[which][s * d + j].to_f64());
        let mut dh: Vec<f64> = (0..d).map(|j| last(0, j)).collect();
        let mut dc: Vec<f64> = (0..d).map(|j| last(1, j)).collect();
        for step in (s * t..(s + 1) * t).rev() {
            let mut slopes = vec![0.0; 4 * d];
            for j in 0..d {
                let [i, f, g, o] = [0, 1, 2, 3].map(|gate| gates[(step * 4 + gate) * d + j].to_f64());
                let before = if step > s * t {
                    cells[(step - 1) * d + j].to_f64()
                } else {
                    c0.map_or(0.0, |c| c[s * d + j].to_f64())
                };
                let (tanh, dy) = (cells[step * d + j].to_f64().tanh(), dy[step * d + j].to_f64() + dh[j]);
                let dcell = dc[j] + dy * o * (1.0 - tanh * tanh);
                slopes[j] = dcell * g * i * (1.0 - i);
                slopes[d + j] = dcell * before * f * (1.0 - f);
                slopes[2 * d + j] = dcell * i * (1.0 - g * g);
                slopes[3 * d + j] = dy * tanh * o * (1.0 - o);
                dc[j] = dcell * f;
            }
            for (j, slope) in slopes.iter().enumerate() {
                da[step * 4 * d + j] = T::from_f64(*slope);
            }
            for (p, dh) in dh.iter_mut().enumerate() {
                *dh = slopes.iter().enumerate().map(|(j, a)| a * w[j * d + p].to_f64()).sum();
            }
        }
        for j in 0..d {
            (dh0[s * d + j], dc0[s * d + j]) = (T::from_f64(dh[j]), T::from_f64(dc[j]));
        }
    }
    Ok(())
}
