//! Operations on tensors, without gradients: checks of shape and type, then one kernel.
use super::{
    DType, Device, InOut, Tensor, View,
    backend::{Binary, Gemm, Reduce, Unary},
    checked_bytes, checked_len, same_device, shape,
};
use crate::{Error, Result};

impl Tensor {
    // ---- views ----

    /// The same elements in another shape; one length may be given as `usize::MAX` and is worked out. A copy only if the
    /// tensor is not contiguous.
    pub fn reshape(&self, shape: &[usize]) -> Result<Tensor> {
        let known: Vec<usize> = shape.iter().copied().filter(|&n| n != usize::MAX).collect();
        let known = checked_len(&known)?;
        let shape: Vec<usize> = shape
            .iter()
            .map(|&n| if n == usize::MAX { self.len().checked_div(known).unwrap_or(0) } else { n })
            .collect();
        let c = self.contiguous()?;
        Ok(Tensor { layout: c.layout.reshape(&shape)?, ..c })
    }

    /// A view whose axis `i` is axis `axes[i]` of this one.
    pub fn permute(&self, axes: &[usize]) -> Result<Tensor> {
        Ok(Tensor { layout: self.layout.permute(axes)?, ..self.clone() })
    }

    /// A view with the last two axes swapped.
    pub fn transpose(&self) -> Result<Tensor> {
        let n = self.rank();
        if n < 2 {
            return Err(Error::shape(format!("transpose: two axes or more expected, got {:?}", self.shape())));
        }
        let mut axes: Vec<usize> = (0..n).collect();
        axes.swap(n - 2, n - 1);
        self.permute(&axes)
    }

    /// A view of the elements `start..start + len` along `axis`.
    pub fn slice(&self, axis: usize, start: usize, len: usize) -> Result<Tensor> {
        Ok(Tensor { layout: self.layout.slice(axis, start, len)?, ..self.clone() })
    }

    /// A view repeated along axes of length 1 and new leading axes.
    pub fn broadcast_to(&self, shape: &[usize]) -> Result<Tensor> {
        Ok(Tensor { layout: self.layout.broadcast_to(shape)?, ..self.clone() })
    }

    /// Itself if the elements lie row-major without gaps, else a copy that does.
    pub fn contiguous(&self) -> Result<Tensor> {
        if self.layout.is_contiguous() { Ok(self.clone()) } else { self.copied() }
    }

    /// A fresh contiguous copy.
    pub(crate) fn copied(&self) -> Result<Tensor> {
        self.copy_as(self.dtype)
    }

    /// The values converted to `dtype` (itself if it is that already).
    pub fn cast(&self, dtype: DType) -> Result<Tensor> {
        if dtype == self.dtype { Ok(self.clone()) } else { self.copy_as(dtype) }
    }

    fn copy_as(&self, dtype: DType) -> Result<Tensor> {
        Tensor::build(&self.device, dtype, self.shape(), |b, y| b.copy(self.view(), y))
    }

    /// Joins tensors along `axis`; all other axes must agree.
    pub fn concat(parts: &[Tensor], axis: usize) -> Result<Tensor> {
        let first = parts.first().ok_or_else(|| Error::shape("concat: nothing to join"))?;
        let fits = |t: &Tensor| {
            t.rank() == first.rank()
                && t.dtype == first.dtype
                && (0..t.rank()).all(|i| i == axis || t.shape()[i] == first.shape()[i])
        };
        if axis >= first.rank() || !parts.iter().all(fits) {
            let all: Vec<_> = parts.iter().map(|t| format!("{}{:?}", t.dtype, t.shape())).collect();
            return Err(Error::shape(format!("concat along axis {axis}: {} do not fit", all.join(", "))));
        }
        let mut shape = first.shape().to_vec();
        shape[axis] = parts.iter().map(|t| t.shape()[axis]).sum();
        Tensor::build(&first.device, first.dtype, &shape, |b, y| {
            let mut start = 0;
            let (buf, whole) = (y.buf, y.layout);
            for t in parts {
                same_device(&first.device, t)?;
                let layout = whole.slice(axis, start, t.shape()[axis])?;
                b.copy(t.view(), super::ViewMut { buf, layout: &layout, dtype: t.dtype })?;
                start += t.shape()[axis];
            }
            Ok(())
        })
    }

    // ---- elementwise ----

    /// `op` of every element.
    pub fn unary(&self, op: Unary) -> Result<Tensor> {
        let x = self.contiguous()?;
        Tensor::build(&self.device, self.dtype, self.shape(), |b, y| b.unary(op, x.view(), y))
    }

    /// `self·op′` where `saved` is the argument or the result of `op`, as [`Unary::saves_result`] says.
    pub fn unary_grad(&self, op: Unary, saved: &Tensor) -> Result<Tensor> {
        self.expect_like(saved, "unary_grad")?;
        let (dy, saved) = (self.contiguous()?, saved.contiguous()?);
        Tensor::build(&self.device, self.dtype, self.shape(), |b, dx| b.unary_grad(op, saved.view(), dy.view(), dx))
    }

    /// `op(self, other)` with broadcasting.
    pub fn binary(&self, op: Binary, other: &Tensor) -> Result<Tensor> {
        same_device(&self.device, other)?;
        if self.dtype != other.dtype {
            return Err(Error::dtype(format!("{op:?}: {} and {} do not mix; cast one", self.dtype, other.dtype)));
        }
        let shape = shape::broadcast(self.shape(), other.shape())?;
        let a = self.broadcast_to(&shape)?.contiguous()?;
        // A suffix of the shape is repeated by the kernel, anything else is spread out first.
        let suffix = shape.ends_with(other.shape());
        let b = if suffix { other.contiguous()? } else { other.broadcast_to(&shape)?.contiguous()? };
        Tensor::build(&self.device, self.dtype, &shape, |back, y| back.binary(op, a.view(), b.view(), y))
    }

    /// `self + other`, broadcast.
    pub fn add(&self, other: &Tensor) -> Result<Tensor> {
        self.binary(Binary::Add, other)
    }

    /// `self − other`, broadcast.
    pub fn sub(&self, other: &Tensor) -> Result<Tensor> {
        self.binary(Binary::Sub, other)
    }

    /// `self · other`, elementwise and broadcast.
    pub fn mul(&self, other: &Tensor) -> Result<Tensor> {
        self.binary(Binary::Mul, other)
    }

    /// `self / other`, broadcast.
    pub fn div(&self, other: &Tensor) -> Result<Tensor> {
        self.binary(Binary::Div, other)
    }

    /// `scale·self + shift`.
    pub fn affine(&self, scale: f64, shift: f64) -> Result<Tensor> {
        self.unary(Unary::Affine { scale, shift })
    }

    /// `self ← self + alpha·x`.
    pub fn axpy(&mut self, alpha: f64, x: &Tensor) -> Result<()> {
        self.expect_like(x, "axpy")?;
        let x = x.contiguous()?;
        self.update(|b, y: InOut| b.axpy(alpha, x.view(), y))
    }

    /// `self ← self + g`: how gradients are folded.
    pub fn accumulate(&mut self, g: &Tensor) -> Result<()> {
        self.axpy(1.0, g)
    }

    /// Whether every element is a finite number.
    pub fn all_finite(&self) -> Result<bool> {
        if !self.dtype.is_float() {
            return Ok(true);
        }
        let x = self.contiguous()?;
        self.device.backend().all_finite(x.view())
    }

    // ---- reductions ----

    /// Folds `axis` away.
    pub fn reduce(&self, op: Reduce, axis: usize) -> Result<Tensor> {
        if axis >= self.rank() {
            return Err(Error::shape(format!("{op:?}: axis {axis} of {:?}", self.shape())));
        }
        let (s, x) = (self.shape(), self.contiguous()?);
        let dims = [s[..axis].iter().product(), s[axis], s[axis + 1..].iter().product()];
        let shape: Vec<usize> = s.iter().enumerate().filter(|&(i, _)| i != axis).map(|(_, &n)| n).collect();
        Tensor::build(&self.device, self.dtype, &shape, |b, y| b.reduce(op, dims, x.view(), y))
    }

    /// The sum of all elements, as a scalar of shape [].
    pub fn sum(&self) -> Result<Tensor> {
        self.reshape(&[self.len()])?.reduce(Reduce::Sum, 0)
    }

    /// The mean of all elements, as a scalar of shape [].
    pub fn mean(&self) -> Result<Tensor> {
        self.sum()?.affine(1.0 / self.len() as f64, 0.0)
    }

    /// Sums so that a gradient of the broadcast shape becomes one of `shape`.
    pub(crate) fn sum_to(&self, shape: &[usize]) -> Result<Tensor> {
        if self.shape() == shape {
            return Ok(self.clone());
        }
        let extra = self.rank() - shape.len();
        let lead: usize = self.shape()[..extra].iter().product();
        let mut t = self.reshape(&[&[lead], &self.shape()[extra..]].concat())?.reduce(Reduce::Sum, 0)?;
        for (axis, &n) in shape.iter().enumerate() {
            if n == 1 && t.shape()[axis] != 1 {
                let mut kept = t.shape().to_vec();
                kept[axis] = 1;
                t = t.reduce(Reduce::Sum, axis)?.reshape(&kept)?;
            }
        }
        Ok(t)
    }

    // ---- products ----

    /// The matrix product of `a[m,k]` and `b[k,n]`, or of two stacks `a[…,m,k]` and `b[…,k,n]` with equal leading axes.
    pub fn matmul(&self, other: &Tensor) -> Result<Tensor> {
        self.gemm(false, other, false, None)
    }

    /// `op(self) · op(other) (+ bias)`, each operand read transposed where its flag says so; transposed views cost no copy.
    pub fn gemm(&self, ta: bool, other: &Tensor, tb: bool, bias: Option<&Tensor>) -> Result<Tensor> {
        same_device(&self.device, other)?;
        let (a, ta) = self.untransposed(ta)?;
        let (b, tb) = other.untransposed(tb)?;
        let what = || Error::shape(format!("matmul: {:?}{} × {:?}{}", a.shape(), mark(ta), b.shape(), mark(tb)));
        let (sa, sb) = (a.shape(), b.shape());
        if sa.len() < 2 || sa.len() != sb.len() || sa[..sa.len() - 2] != sb[..sb.len() - 2] || a.dtype != b.dtype {
            return Err(what());
        }
        let lead = sa.len() - 2;
        let (m, k) = if ta { (sa[lead + 1], sa[lead]) } else { (sa[lead], sa[lead + 1]) };
        let (k2, n) = if tb { (sb[lead + 1], sb[lead]) } else { (sb[lead], sb[lead + 1]) };
        if k != k2 || bias.is_some_and(|t| t.shape() != [n] || t.dtype != a.dtype) {
            return Err(what());
        }
        let shape = [&sa[..lead], &[m, n]].concat();
        let g = Gemm { batch: sa[..lead].iter().product(), m, n, k, ta, tb };
        let bias = bias.map(|t| t.contiguous()).transpose()?;
        Tensor::build(&a.device, a.dtype, &shape, |back, y| {
            back.gemm(g, a.view(), b.view(), bias.as_ref().map(Tensor::view), y)
        })
    }

    /// A contiguous operand and whether the kernel must read it transposed.
    fn untransposed(&self, t: bool) -> Result<(Tensor, bool)> {
        if !self.layout.is_contiguous() && self.rank() >= 2 {
            let swapped = self.transpose()?;
            if swapped.layout.is_contiguous() {
                return Ok((swapped, !t));
            }
        }
        Ok((self.contiguous()?, t))
    }

    pub(crate) fn expect_like(&self, other: &Tensor, what: &str) -> Result<()> {
        same_device(&self.device, other)?;
        if self.shape() != other.shape() || self.dtype != other.dtype {
            return Err(Error::shape(format!(
                "{what}: {}{:?} expected, got {}{:?}",
                self.dtype,
                self.shape(),
                other.dtype,
                other.shape()
            )));
        }
        Ok(())
    }
}

fn mark(t: bool) -> &'static str {
    if t { "ᵀ" } else { "" }
}

/// All views, contiguous, of one device: what a kernel with several operands needs.
pub(crate) fn contiguous_all<const N: usize>(tensors: [&Tensor; N]) -> Result<[Tensor; N]> {
    let mut out = Vec::with_capacity(N);
    for t in tensors {
        same_device(&tensors[0].device, t)?;
        out.push(t.contiguous()?);
    }
    out.try_into().map_err(|_| Error::device("no tensors"))
}

/// The view of an optional operand.
pub(crate) fn view_of(t: &Option<Tensor>) -> Option<View<'_>> {
    t.as_ref().map(Tensor::view)
}

impl Device {
    /// Uniform numbers in [lo, hi) for `shape`, from the stream of `rng`.
    pub fn uniform(&self, rng: super::Philox, lo: f64, hi: f64, shape: &[usize], dtype: DType) -> Result<Tensor> {
        let n = checked_bytes(shape, dtype, self)? / dtype.size();
        self.from_f64(rng.uniform(0, n).map(|u| lo + (hi - lo) * u), shape, dtype)
    }

    /// Normally distributed numbers for `shape`, from the stream of `rng`.
    pub fn normal(&self, rng: super::Philox, std: f64, shape: &[usize], dtype: DType) -> Result<Tensor> {
        let n = checked_bytes(shape, dtype, self)? / dtype.size();
        self.from_f64(rng.normal(0, n).map(|v| std * v), shape, dtype)
    }

    /// A tensor of `dtype` from values given as `f64`.
    pub fn from_f64(&self, values: impl Iterator<Item = f64>, shape: &[usize], dtype: DType) -> Result<Tensor> {
        if !self.backend().has_data() {
            return Tensor::uninit(self, dtype, shape);
        }
        super::with_dtype!(dtype, T => {
            let v: Vec<T> = values.map(<T as super::Element>::from_f64).collect();
            Tensor::from_host(&v, shape, self)
        })
    }
}
