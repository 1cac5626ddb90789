//! Tensors: immutable, reference-counted, strided arrays on a device.
//!
//! Images are `x[n,h,w,c]`; weights of a convolution `w[kh,kw,ci,co]`. [`backend`] is the list of all kernels.
pub mod backend;
mod buffer;
mod cpu;
mod device;
mod dtype;
mod interop;
mod machine;
mod meta;
mod ops;
mod ops_nn;
mod pages;
mod reference;
mod rng;
mod shape;

pub use backend::{Backend, InOut, View, ViewMut};
pub use buffer::{Buffer, Pool, PoolStats};
pub use cpu::Isa;
pub(crate) use cpu::{MOST_THREADS, check_threads};
pub use device::{CpuOptions, Device};
pub use dtype::{DType, Element};
pub(crate) use dtype::{with_dtype, with_float};
pub use machine::Machine;
pub use rng::Philox;
pub use shape::Layout;

use crate::{Error, Result, memory};
use std::{fmt, sync::Arc};

/// An immutable array. A clone shares the memory; [`update`](Tensor::update) writes in place only where nothing else does.
///
/// ```
/// use pipewright::tensor::{Device, Tensor};
/// let d = Device::reference();
/// let a = Tensor::from_host(&[1.0f32, 2.0, 3.0, 4.0], &[2, 2], &d)?;
/// let b = a.matmul(&a.transpose()?)?;
/// assert_eq!(b.to_host::<f32>()?, [5.0, 11.0, 11.0, 25.0]);
/// # Ok::<(), pipewright::Error>(())
/// ```
#[derive(Clone)]
pub struct Tensor {
    storage: Arc<Buffer>,
    layout: Layout,
    dtype: DType,
    device: Device,
}

impl Tensor {
    /// A tensor of `shape` with the values of `data` in row-major order.
    ///
    /// # Errors
    /// If `data` has another number of elements than `shape`.
    pub fn from_host<T: Element>(data: &[T], shape: &[usize], device: &Device) -> Result<Tensor> {
        Tensor::from_bytes(bytemuck::cast_slice(data), T::DTYPE, shape, device)
    }

    /// A tensor of `shape` and `dtype` from the bytes of its elements in this machine's order.
    ///
    /// # Errors
    /// If the number of bytes is not what shape and type need.
    pub fn from_bytes(data: &[u8], dtype: DType, shape: &[usize], device: &Device) -> Result<Tensor> {
        let need = checked_len(shape)?.checked_mul(dtype.size());
        if need != Some(data.len()) {
            return Err(Error::shape(format!("{} bytes given for {dtype}{shape:?}, which needs {need:?}", data.len())));
        }
        let mut buf = device.pool().get(data.len());
        if device.backend().has_data() {
            buf.bytes_mut().copy_from_slice(data);
        }
        Ok(Tensor::from_buffer(buf, dtype, shape, device))
    }

    /// A tensor of `shape` filled with `value`.
    pub fn full(value: f64, shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
        Tensor::build(device, dtype, shape, |b, y| b.fill(value, y))
    }

    /// A tensor of `shape` filled with zeros.
    pub fn zeros(shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
        Tensor::full(0.0, shape, dtype, device)
    }

    /// Takes over a buffer whose first bytes are the elements: one that a message shorter than the longest was received into
    /// has more.
    pub(crate) fn from_buffer(buf: Buffer, dtype: DType, shape: &[usize], device: &Device) -> Tensor {
        debug_assert!(buf.len() >= shape.iter().product::<usize>() * dtype.size());
        Tensor { storage: Arc::new(buf), layout: Layout::contiguous(shape), dtype, device: device.clone() }
    }

    /// Allocates `shape` and lets `fill` write it: how every operation makes its output.
    pub(crate) fn build(
        device: &Device,
        dtype: DType,
        shape: &[usize],
        fill: impl FnOnce(&dyn Backend, ViewMut) -> Result<()>,
    ) -> Result<Tensor> {
        let mut t = Tensor::uninit(device, dtype, shape)?;
        fill(device.backend(), t.view_mut()?)?;
        Ok(t)
    }

    /// A tensor whose contents are leftovers, to be written before it is seen (several outputs of one kernel).
    pub(crate) fn uninit(device: &Device, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        let bytes = checked_bytes(shape, dtype, device)?;
        Ok(Tensor::from_buffer(device.pool().get(bytes), dtype, shape, device))
    }

    /// To write into a tensor that nothing else holds.
    pub(crate) fn view_mut(&mut self) -> Result<ViewMut<'_>> {
        let buf = Arc::get_mut(&mut self.storage).ok_or_else(|| Error::device("a shared tensor cannot be written"))?;
        Ok(ViewMut { buf, layout: &self.layout, dtype: self.dtype })
    }

    /// To be read by a kernel.
    pub(crate) fn view(&self) -> View<'_> {
        View { buf: &self.storage, layout: &self.layout, dtype: self.dtype }
    }

    /// Replaces the contents by what `f` makes of them: in place if nothing else holds the memory, else into a fresh
    /// pooled buffer, so that whoever holds the old value keeps it.
    pub fn update(&mut self, f: impl FnOnce(&dyn Backend, InOut) -> Result<()>) -> Result<()> {
        update_many([self], |b, [io]| f(b, io))
    }

    /// The length of each axis.
    pub fn shape(&self) -> &[usize] {
        self.layout.shape()
    }

    /// The number of axes.
    pub fn rank(&self) -> usize {
        self.shape().len()
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.layout.len()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Whether its elements lie row-major without gaps, as messages and files need them.
    pub fn is_contiguous(&self) -> bool {
        self.layout.is_contiguous()
    }

    /// Where it lives.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Bytes of its elements.
    pub fn byte_len(&self) -> usize {
        self.len() * self.dtype.size()
    }

    /// Whether `self` and `other` share memory.
    pub fn shares_storage(&self, other: &Tensor) -> bool {
        Arc::ptr_eq(&self.storage, &other.storage)
    }

    /// How many tensors share its memory.
    pub fn holders(&self) -> usize {
        Arc::strong_count(&self.storage)
    }

    /// The identity of its memory, for statistics.
    pub(crate) fn storage_id(&self) -> usize {
        Arc::as_ptr(&self.storage) as usize
    }

    /// The values in row-major order.
    ///
    /// # Errors
    /// If `T` is not the element type, or the device keeps no data.
    pub fn to_host<T: Element>(&self) -> Result<Vec<T>> {
        if T::DTYPE != self.dtype {
            return Err(Error::dtype(format!("to_host: asked for {}, the tensor is {}", T::DTYPE, self.dtype)));
        }
        self.need_data("to_host")?;
        Ok(self.contiguous()?.view().slice::<T>()?.to_vec())
    }

    /// The values in row-major order, whatever the type, as `f64`.
    pub fn to_f64(&self) -> Result<Vec<f64>> {
        self.need_data("to_f64")?;
        let c = self.contiguous()?;
        with_dtype!(self.dtype, T => Ok(c.view().slice::<T>()?.iter().map(|v| v.to_f64()).collect()))
    }

    /// The value of a tensor with one element.
    pub fn item(&self) -> Result<f64> {
        match self.to_f64()?[..] {
            [v] => Ok(v),
            _ => Err(Error::shape(format!("item: one element expected, got shape {:?}", self.shape()))),
        }
    }

    /// The bytes of a contiguous tensor's elements.
    pub(crate) fn host_bytes(&self) -> Result<&[u8]> {
        self.need_data("host_bytes")?;
        if !self.layout.is_contiguous() {
            return Err(Error::shape("host_bytes: the tensor is not contiguous"));
        }
        // A cut of nothing may lie beyond the end.
        let start = if self.is_empty() { 0 } else { self.layout.offset() * self.dtype.size() };
        Ok(&self.storage.bytes()[start..start + self.byte_len()])
    }

    /// Shape and type without the data.
    pub(crate) fn shape_only(&self) -> Tensor {
        let meta = Device::shapes();
        Tensor::from_buffer(meta.pool().get(self.byte_len()), self.dtype, self.shape(), &meta)
    }

    fn need_data(&self, what: &str) -> Result<()> {
        if self.device.backend().has_data() {
            Ok(())
        } else {
            Err(Error::device(format!("{what}: tensors of the meta device hold no data")))
        }
    }

    /// The same values on `device`: without a copy between devices that share the host's memory.
    pub fn to_device(&self, device: &Device) -> Result<Tensor> {
        if *device == self.device {
            return Ok(self.clone());
        }
        match (self.device.backend().has_data(), device.backend().has_data()) {
            (true, true) => Ok(Tensor { device: device.clone(), ..self.clone() }),
            (_, false) => Tensor::uninit(device, self.dtype, self.shape()),
            (false, true) => Err(Error::device("to_device: tensors of the meta device hold no data")),
        }
    }
}

/// Updates several tensors together, each in place where nothing else holds it, else into a fresh buffer; see [`Tensor::update`].
pub(crate) fn update_many<const N: usize>(
    tensors: [&mut Tensor; N],
    f: impl FnOnce(&dyn Backend, [InOut; N]) -> Result<()>,
) -> Result<()> {
    let device = tensors.first().map(|t| t.device.clone()).ok_or_else(|| Error::device("update: no tensors"))?;
    let mut fresh = tensors.each_ref().map(|_| None);
    let mut tensors = tensors;
    for (t, fresh) in tensors.iter_mut().zip(&mut fresh) {
        same_device(&device, t)?;
        let whole = t.layout.is_contiguous() && t.layout.offset() == 0 && t.byte_len() == t.storage.len();
        if !whole {
            **t = t.copied()?;
        }
        if Arc::get_mut(&mut t.storage).is_none() {
            *fresh = Some(Tensor::uninit(&device, t.dtype, t.shape())?);
        }
    }
    {
        let mut views = Vec::with_capacity(N);
        for (t, fresh) in tensors.iter_mut().zip(&mut fresh) {
            views.push(match fresh {
                Some(new) => InOut { src: Some(t.view()), dst: new.view_mut()? },
                None => InOut { src: None, dst: t.view_mut()? },
            });
        }
        let views = <[InOut; N]>::try_from(views).map_err(|_| Error::device("update: wrong number of tensors"))?;
        f(device.backend(), views)?;
    }
    for (t, fresh) in tensors.into_iter().zip(fresh) {
        if let Some(new) = fresh {
            *t = new;
        }
    }
    Ok(())
}

fn same_device(d: &Device, t: &Tensor) -> Result<()> {
    if *d == t.device {
        Ok(())
    } else {
        Err(Error::device(format!("tensors of two devices mixed: {d:?} and {:?}", t.device)))
    }
}

/// Bytes that no tensor has more of, with data or without: sums of some operands' bytes are numbers.
const LARGEST: usize = 1 << 48;

/// The bytes of a tensor that can be: with data, one that fits into this machine's memory.
pub(crate) fn checked_bytes(shape: &[usize], dtype: DType, device: &Device) -> Result<usize> {
    let bytes = checked_len(shape)?.checked_mul(dtype.size()).filter(|&b| b <= LARGEST);
    let bytes = bytes.ok_or_else(|| Error::shape(format!("{dtype}{shape:?} is too large")))?;
    if device.backend().has_data() {
        memory::check(|| format!("a tensor {dtype}{shape:?}"), bytes as u128)?;
    }
    Ok(bytes)
}

fn checked_len(shape: &[usize]) -> Result<usize> {
    shape
        .iter()
        .try_fold(1usize, |n, &d| n.checked_mul(d))
        .ok_or_else(|| Error::shape(format!("{shape:?} is too large")))
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:?}", self.dtype, self.shape())?;
        if self.len() <= 16 && self.device.backend().has_data() {
            write!(f, " {:?}", self.to_f64().unwrap_or_default())?;
        }
        Ok(())
    }
}
