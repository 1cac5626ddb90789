//! Labelled images in memory: what the file formats are read into.
use super::{Dataset, Field, Sample};
use crate::{Error, Result, tensor::DType};

/// Images of bytes with class labels. Fields: `image: f32[h,w,c]`, in `[0, 1]`, and `label: i64[]`.
pub struct Images {
    name: String,
    fields: [Field; 2],
    /// Bytes of one image.
    size: usize,
    classes: usize,
    pixels: Vec<u8>,
    labels: Vec<i64>,
}

impl Images {
    /// Images of `shape` [h, w, c], one after the other in `pixels`, row-major, and a label below `classes` for each.
    ///
    /// # Errors
    /// If the numbers of pixels and labels do not fit together, or a label is out of range.
    pub fn new(name: &str, shape: [usize; 3], classes: usize, pixels: Vec<u8>, labels: Vec<i64>) -> Result<Images> {
        let image = Field::new("image", shape, DType::U8);
        let size = image.bytes()?;
        if size == 0 {
            return Err(Error::data(format!("{name}: images of shape {shape:?} have no pixels")));
        }
        if labels.len().checked_mul(size) != Some(pixels.len()) {
            let (n, have) = (labels.len(), pixels.len());
            return Err(Error::data(format!(
                "{name}: {have} pixel values for {n} labels of {shape:?} images; {size} each expected"
            )));
        }
        if let Some((i, label)) =
            labels.iter().enumerate().find(|&(_, &l)| usize::try_from(l).map_or(true, |l| l >= classes))
        {
            return Err(Error::data(format!(
                "{name}: label {label} of image {i}; 0 or more and below {classes} expected"
            )));
        }
        let fields = [Field { dtype: DType::F32, ..image }, Field::new("label", [], DType::I64)];
        Ok(Images { name: name.into(), fields, size, classes, pixels, labels })
    }
}

impl Dataset for Images {
    fn name(&self) -> &str {
        &self.name
    }

    fn len(&self) -> usize {
        self.labels.len()
    }

    fn fields(&self) -> &[Field] {
        &self.fields
    }

    fn read(&self, index: usize, out: &mut Sample) -> Result<()> {
        let (Some(&label), Some(pixels)) = (self.labels.get(index), self.pixels.chunks_exact(self.size).nth(index))
        else {
            return Err(Error::data(format!("image {index} of {}", self.labels.len())));
        };
        let values: Vec<f32> = pixels.iter().map(|&p| f32::from(p) / 255.0).collect();
        out.put(0, &values)?;
        out.put(1, &[label])
    }

    fn classes(&self) -> Option<usize> {
        Some(self.classes)
    }
}
