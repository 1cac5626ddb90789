//! How a tensor's elements lie in its buffer.
use crate::{Error, Result};

/// Shape, strides and offset of a tensor, counted in elements. A stride of 0 repeats an axis (broadcasting).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    shape: Vec<usize>,
    strides: Vec<usize>,
    offset: usize,
}

impl Layout {
    /// Row-major, from the start of the buffer.
    pub fn contiguous(shape: &[usize]) -> Layout {
        Layout { shape: shape.to_vec(), strides: row_major(shape), offset: 0 }
    }

    /// The length of each axis.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Elements between neighbours along each axis.
    pub fn strides(&self) -> &[usize] {
        &self.strides
    }

    /// The position of the first element in the buffer.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// The number of elements (1 for a scalar).
    pub fn len(&self) -> usize {
        // Of a shape without elements the other lengths may be too long for a product.
        if self.shape.contains(&0) { 0 } else { self.shape.iter().product() }
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether the elements lie row-major without gaps (from `offset` on).
    pub fn is_contiguous(&self) -> bool {
        let mut expect = 1;
        for (&n, &s) in self.shape.iter().zip(&self.strides).rev() {
            if n != 1 && s != expect {
                return self.is_empty();
            }
            // As `row_major` has it.
            expect = usize::saturating_mul(expect, n);
        }
        true
    }

    /// The same elements under another shape; the layout must be contiguous.
    pub(crate) fn reshape(&self, shape: &[usize]) -> Result<Layout> {
        let len = shape.iter().try_fold(1usize, |len, &n| len.checked_mul(n));
        if len != Some(self.len()) {
            let len = len.map_or("too many".to_string(), |len| len.to_string());
            return Err(Error::shape(format!(
                "reshape: {:?} has {} elements, {shape:?} has {len}",
                self.shape,
                self.len()
            )));
        }
        Ok(Layout { shape: shape.to_vec(), strides: row_major(shape), offset: self.offset })
    }

    /// Axis `i` of the result is axis `axes[i]` of this one.
    pub(crate) fn permute(&self, axes: &[usize]) -> Result<Layout> {
        let mut seen = vec![false; self.shape.len()];
        let ok =
            axes.len() == seen.len() && axes.iter().all(|&a| a < seen.len() && !std::mem::replace(&mut seen[a], true));
        if !ok {
            return Err(Error::shape(format!(
                "permute: {axes:?} is not an order of the {} axes of {:?}",
                self.shape.len(),
                self.shape
            )));
        }
        Ok(Layout {
            shape: axes.iter().map(|&a| self.shape[a]).collect(),
            strides: axes.iter().map(|&a| self.strides[a]).collect(),
            offset: self.offset,
        })
    }

    /// The elements `start..start + len` along `axis`.
    pub(crate) fn slice(&self, axis: usize, start: usize, len: usize) -> Result<Layout> {
        let n = *self.shape.get(axis).ok_or_else(|| Error::shape(format!("slice: axis {axis} of {:?}", self.shape)))?;
        if start.checked_add(len).is_none_or(|end| end > n) {
            return Err(Error::shape(format!("slice: {start}..{start}+{len} of axis {axis} of {:?}", self.shape)));
        }
        let mut l = self.clone();
        l.shape[axis] = len;
        if len > 0 {
            l.offset += start * self.strides[axis];
        }
        Ok(l)
    }

    /// Repeats axes of length 1, and adds leading axes, up to `shape` (NumPy's rule).
    pub(crate) fn broadcast_to(&self, shape: &[usize]) -> Result<Layout> {
        let extra = shape.len().checked_sub(self.shape.len());
        let fits = extra.is_some_and(|e| self.shape.iter().zip(&shape[e..]).all(|(&a, &b)| a == b || a == 1));
        let (Some(extra), true) = (extra, fits) else {
            return Err(Error::shape(format!("broadcast: {:?} does not fit {shape:?}", self.shape)));
        };
        if !shape.contains(&0) && shape.iter().try_fold(1usize, |len, &n| len.checked_mul(n)).is_none() {
            return Err(Error::shape(format!("broadcast: {shape:?} is too large")));
        }
        let mut strides = vec![0; shape.len()];
        for (i, (&n, &s)) in self.shape.iter().zip(&self.strides).enumerate() {
            strides[extra + i] = if n == shape[extra + i] { s } else { 0 };
        }
        Ok(Layout { shape: shape.to_vec(), strides, offset: self.offset })
    }

    /// The positions of all elements in row-major order.
    pub(crate) fn positions(&self) -> Positions<'_> {
        Positions { layout: self, index: vec![0; self.shape.len()], at: self.offset, left: self.len() }
    }
}

/// See [`Layout::positions`].
pub(crate) struct Positions<'a> {
    layout: &'a Layout,
    index: Vec<usize>,
    at: usize,
    left: usize,
}

impl Iterator for Positions<'_> {
    type Item = usize;
    fn next(&mut self) -> Option<usize> {
        self.left = self.left.checked_sub(1)?;
        let at = self.at;
        for axis in (0..self.index.len()).rev() {
            self.index[axis] += 1;
            self.at += self.layout.strides[axis];
            if self.index[axis] < self.layout.shape[axis] {
                break;
            }
            self.at -= self.layout.strides[axis] * self.layout.shape[axis];
            self.index[axis] = 0;
        }
        Some(at)
    }
}

fn row_major(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1usize; shape.len()];
    for i in (1..shape.len()).rev() {
        // Only a shape without elements can be too long for its strides.
        strides[i - 1] = strides[i].saturating_mul(shape[i]);
    }
    strides
}

/// The shape that both broadcast to (NumPy's rule).
pub(crate) fn broadcast(a: &[usize], b: &[usize]) -> Result<Vec<usize>> {
    let n = a.len().max(b.len());
    let at = |s: &[usize], i: usize| if i + s.len() >= n { s[i + s.len() - n] } else { 1 };
    (0..n)
        .map(|i| match (at(a, i), at(b, i)) {
            (x, y) if x == y => Ok(x),
            (1, y) => Ok(y),
            (x, 1) => Ok(x),
            _ => Err(Error::shape(format!("broadcast: {a:?} and {b:?} do not fit"))),
        })
        .collect()
}
