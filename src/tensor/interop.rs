//! To and from `ndarray`.
use super::{Device, Element, Tensor};
use crate::{Error, Result};
use ndarray::{Array, ArrayD, ArrayView, Dimension, IxDyn};

impl Tensor {
    /// A tensor with the values of an `ndarray` array of any layout.
    pub fn from_ndarray<T: Element, D: Dimension>(a: ArrayView<T, D>, device: &Device) -> Result<Tensor> {
        let shape = a.shape().to_vec();
        match a.as_slice() {
            Some(values) => Tensor::from_host(values, &shape, device),
            None => Tensor::from_host(&a.iter().copied().collect::<Vec<T>>(), &shape, device),
        }
    }

    /// The values as an `ndarray` array.
    ///
    /// # Errors
    /// If `T` is not the element type.
    pub fn to_ndarray<T: Element>(&self) -> Result<ArrayD<T>> {
        Array::from_shape_vec(IxDyn(self.shape()), self.to_host::<T>()?)
            .map_err(|e| Error::shape(format!("to_ndarray: {e}")))
    }
}
