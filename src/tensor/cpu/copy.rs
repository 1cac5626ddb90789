//! Copies between any layouts, and conversions of contiguous values.
use super::{Cpu, elementwise::GRAIN};
use crate::{
    Result,
    tensor::{Buffer, DType, Element, Layout, View, ViewMut},
};
use bytemuck::Pod;
use half::{bf16, f16, slice::HalfFloatSliceExt};

/// Copies if there is a fast way; says whether there was.
pub(crate) fn copy(cpu: &Cpu, x: View, mut y: ViewMut) -> Result<bool> {
    if x.dtype == y.dtype {
        let axes = joined(x.layout, y.layout);
        let places = (x.layout.offset(), y.layout.offset());
        match x.dtype.size() {
            1 => strided::<u8>(cpu, x.buf, y.buf, places, &axes),
            2 => strided::<u16>(cpu, x.buf, y.buf, places, &axes),
            4 => strided::<u32>(cpu, x.buf, y.buf, places, &axes),
            _ => strided::<u64>(cpu, x.buf, y.buf, places, &axes),
        }
        return Ok(true);
    }
    if !x.layout.is_contiguous() || !y.layout.is_contiguous() {
        return Ok(false);
    }
    match (x.dtype, y.dtype) {
        (DType::F32, DType::BF16) => convert(cpu, &x, &mut y, |x, y: &mut [bf16]| y.convert_from_f32_slice(x))?,
        (DType::F32, DType::F16) => convert(cpu, &x, &mut y, |x, y: &mut [f16]| y.convert_from_f32_slice(x))?,
        (DType::BF16, DType::F32) => convert(cpu, &x, &mut y, |x: &[bf16], y| x.convert_to_f32_slice(y))?,
        (DType::F16, DType::F32) => convert(cpu, &x, &mut y, |x: &[f16], y| x.convert_to_f32_slice(y))?,
        (DType::U8, DType::F32) => convert(cpu, &x, &mut y, |x, y| {
            y.iter_mut().zip(x).for_each(|(y, &x): (&mut f32, &u8)| *y = f32::from(x));
        })?,
        _ => return Ok(false),
    }
    Ok(true)
}

fn convert<X: Element, Y: Element>(
    cpu: &Cpu,
    x: &View,
    y: &mut ViewMut,
    f: impl Fn(&[X], &mut [Y]) + Sync,
) -> Result<()> {
    let (x, y) = (x.slice::<X>()?, y.slice::<Y>()?);
    let piece = cpu.threads.piece(y.len(), 64, GRAIN);
    cpu.threads.over(x.chunks(piece).zip(y.chunks_mut(piece)), |(x, y)| f(x, y));
    Ok(())
}

/// One axis: its length, and elements from neighbour to neighbour in x and in y.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Axis {
    n: usize,
    x: usize,
    y: usize,
}

/// The axes of a copy, as few as possible: those of length 1 left out, neighbours that lie without a gap in both joined.
fn joined(x: &Layout, y: &Layout) -> Vec<Axis> {
    let mut axes: Vec<Axis> = Vec::new();
    let strides = x.strides().iter().zip(y.strides());
    for (&n, (&x, &y)) in x.shape().iter().zip(strides).filter(|(n, _)| **n != 1) {
        match axes.last_mut() {
            Some(a) if a.x == x * n && a.y == y * n => *a = Axis { n: a.n * n, x, y },
            _ => axes.push(Axis { n, x, y }),
        }
    }
    axes
}

fn strided<T: Pod + Send + Sync>(cpu: &Cpu, x: &Buffer, y: &mut Buffer, (x0, y0): (usize, usize), axes: &[Axis]) {
    let size = size_of::<T>();
    let x: &[T] = bytemuck::cast_slice(&x.bytes()[..x.bytes().len() / size * size]);
    let end = y.bytes().len() / size * size;
    let y: &mut [T] = bytemuck::cast_slice_mut(&mut y.bytes_mut()[..end]);
    if axes.iter().any(|a| a.n == 0) {
        return;
    }
    let Some((&inner, outer)) = axes.split_last() else {
        y[y0] = x[x0];
        return;
    };
    if outer.is_empty() && (inner.x, inner.y) == (1, 1) {
        let piece = cpu.threads.piece(inner.n, 64, GRAIN * 4 / size);
        let pieces = x[x0..][..inner.n].chunks(piece).zip(y[y0..][..inner.n].chunks_mut(piece));
        return cpu.threads.over(pieces, |(x, y)| y.copy_from_slice(x));
    }
    let mut index = vec![0; outer.len()];
    let (mut x0, mut y0) = (x0, y0);
    loop {
        if (inner.x, inner.y) == (1, 1) {
            y[y0..][..inner.n].copy_from_slice(&x[x0..][..inner.n]);
        } else {
            (0..inner.n).for_each(|i| y[y0 + i * inner.y] = x[x0 + i * inner.x]);
        }
        // The next place, like an odometer.
        let mut axis = outer.len();
        loop {
            let Some(next) = axis.checked_sub(1) else { return };
            axis = next;
            let a = outer[axis];
            index[axis] += 1;
            (x0, y0) = (x0 + a.x, y0 + a.y);
            if index[axis] < a.n {
                break;
            }
            (x0, y0) = (x0 - a.x * a.n, y0 - a.y * a.n);
            index[axis] = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_are_joined() {
        let x = Layout::contiguous(&[4, 1, 3, 5]);
        assert_eq!(joined(&x, &x), [Axis { n: 60, x: 1, y: 1 }]);
        let (part, whole) = (x.slice(2, 1, 2).unwrap(), Layout::contiguous(&[4, 1, 2, 5]));
        assert_eq!(joined(&part, &whole), [Axis { n: 4, x: 15, y: 10 }, Axis { n: 10, x: 1, y: 1 }]);
    }
}
