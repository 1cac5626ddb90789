//! What is done to a sample between the data set and the network.
//!
//! Images are x[h,w,c].
use super::Field;
use crate::{
    Error, Result,
    tensor::{DType, Philox},
};
use std::{fmt, sync::Arc};

/// A change to one `f32` field of a sample that keeps its shape. Applied in the order given; those that augment, only in
/// training.
///
/// Random ones draw from (seed, epoch, sample id, name of the transform), so the same sample looks the same in the same epoch
/// wherever and whenever it is loaded. Two of the same name draw the same numbers: an image and its mask are cropped alike.
#[derive(Clone)]
pub struct Transform {
    name: String,
    field: String,
    train_only: bool,
    what: What,
}

/// The function of [`Transform::custom`].
type Custom = dyn Fn(&mut [f32], &[usize], &mut Random) -> Result<()> + Send + Sync;

#[derive(Clone)]
enum What {
    Normalise { mean: Vec<f32>, std: Vec<f32> },
    RandomCrop { padding: usize },
    HorizontalFlip,
    Custom(Arc<Custom>),
}

impl Transform {
    fn new(name: &str, field: &str, train_only: bool, what: What) -> Transform {
        Transform { name: name.into(), field: field.into(), train_only, what }
    }

    /// (x − mean) / std, with one mean and one standard deviation for each channel (last axis) of `field`.
    pub fn normalise(field: &str, mean: &[f32], std: &[f32]) -> Transform {
        Transform::new("normalise", field, false, What::Normalise { mean: mean.to_vec(), std: std.to_vec() })
    }

    /// In training: surrounds the image `field` with `padding` zeros on each side and cuts out its size at random.
    pub fn random_crop(field: &str, padding: usize) -> Transform {
        Transform::new("random-crop", field, true, What::RandomCrop { padding })
    }

    /// In training: mirrors the image `field` left to right in half of the cases.
    pub fn horizontal_flip(field: &str) -> Transform {
        Transform::new("horizontal-flip", field, true, What::HorizontalFlip)
    }

    /// A function of one's own over the values of `field`, its shape and random numbers.
    ///
    /// ```
    /// use pipewright::data::Transform;
    /// let brightness = Transform::custom("brightness", "image", |x, _shape, random| {
    ///     let by = random.unit() * 0.2 - 0.1;
    ///     x.iter_mut().for_each(|v| *v += by);
    ///     Ok(())
    /// })
    /// .train_only();
    /// assert_eq!(brightness.name(), "brightness");
    /// ```
    pub fn custom(
        name: &str,
        field: &str,
        f: impl Fn(&mut [f32], &[usize], &mut Random) -> Result<()> + Send + Sync + 'static,
    ) -> Transform {
        Transform::new(name, field, false, What::Custom(Arc::new(f)))
    }

    /// Leaves out evaluation.
    pub fn train_only(self) -> Transform {
        Transform { train_only: true, ..self }
    }

    /// In training and in evaluation.
    pub fn always(self) -> Transform {
        Transform { train_only: false, ..self }
    }

    /// Its name, which random numbers depend on.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The field it changes.
    pub fn field(&self) -> &str {
        &self.field
    }

    /// Whether evaluation leaves it out.
    pub fn is_train_only(&self) -> bool {
        self.train_only
    }

    /// Whether it can be applied to `field`.
    ///
    /// # Errors
    /// Of kind `DType` or `Shape`, naming what was expected.
    pub(crate) fn check(&self, field: &Field) -> Result<()> {
        if field.dtype != DType::F32 {
            return Err(Error::dtype(format!("{self}: f32 expected, the field is {}", field.dtype)));
        }
        match &self.what {
            What::Normalise { mean, std } => {
                let channels = field.shape.last().copied().unwrap_or(1);
                if mean.len() != channels || std.len() != channels {
                    let (m, s) = (mean.len(), std.len());
                    return Err(Error::shape(format!(
                        "{self}: {channels} channels, but {m} means and {s} standard deviations"
                    )));
                }
                let usable = mean.iter().all(|m| m.is_finite()) && std.iter().all(|s| s.is_finite() && *s > 0.0);
                if !usable {
                    return Err(Error::data(format!(
                        "{self}: finite means and positive standard deviations expected, got {mean:?} and {std:?}"
                    )));
                }
            }
            What::RandomCrop { .. } | What::HorizontalFlip => {
                let &[h, w, _] = &field.shape[..] else {
                    return Err(Error::shape(format!(
                        "{self}: an image [h, w, c] expected, the field is {:?}",
                        field.shape
                    )));
                };
                if let What::RandomCrop { padding } = self.what
                    && padding >= h.min(w)
                {
                    return Err(Error::shape(format!(
                        "{self}: {padding} pixels of padding, expected fewer than an image {h}×{w} has"
                    )));
                }
            }
            What::Custom(_) => {}
        }
        Ok(())
    }

    /// Changes the values `x` of shape `shape`, which was checked, of sample `id` in `epoch` of a run with `seed`.
    pub(crate) fn apply(&self, x: &mut [f32], shape: &[usize], seed: u64, epoch: u64, id: u64) -> Result<()> {
        let mut random =
            Random { stream: Philox::new(seed, epoch, &format!("data/{}", self.name)), sample: id, drawn: 0 };
        match &self.what {
            What::Normalise { mean, std } => {
                for pixel in x.chunks_exact_mut(mean.len()) {
                    for ((v, m), s) in pixel.iter_mut().zip(mean).zip(std) {
                        *v = (*v - m) / s;
                    }
                }
            }
            What::RandomCrop { padding } => {
                let choices = 2 * *padding as u64 + 1;
                let (dy, dx) = (random.below(choices) as isize, random.below(choices) as isize);
                let p = *padding as isize;
                shift(x, [shape[0], shape[1], shape[2]], dy - p, dx - p);
            }
            What::HorizontalFlip => {
                if random.below(2) == 1 {
                    mirror(x, shape[1], shape[2]);
                }
            }
            What::Custom(f) => f(x, shape, &mut random)?,
        }
        Ok(())
    }
}

impl fmt::Display for Transform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "transform {:?} of field {:?}", self.name, self.field)
    }
}

impl fmt::Debug for Transform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}{}", if self.train_only { ", in training only" } else { "" })
    }
}

/// Random numbers for one sample in one epoch.
pub struct Random {
    stream: Philox,
    sample: u64,
    drawn: u64,
}

impl Random {
    /// A uniform integer below `n`; 0 if `n` is 0.
    pub fn below(&mut self, n: u64) -> u64 {
        self.drawn += 1;
        self.stream.below(self.sample, self.drawn - 1, n)
    }

    /// A uniform number in [0, 1).
    pub fn unit(&mut self) -> f32 {
        self.drawn += 1;
        Philox::unit(self.stream.block(self.sample, self.drawn - 1)[0])
    }
}

/// x[y,x] ← x[y+dy, x+dx], zero where that lies outside. In place: rows are taken in the order in which none is overwritten
/// before it is read.
fn shift(image: &mut [f32], [h, w, c]: [usize; 3], dy: isize, dx: isize) {
    let row = w * c;
    let skip = dx.unsigned_abs().min(w) * c;
    for step in 0..h {
        let y = if dy >= 0 { step } else { h - 1 - step };
        let at = y * row;
        let Some(from) = y.checked_add_signed(dy).filter(|&from| from < h) else {
            image[at..at + row].fill(0.0);
            continue;
        };
        let from = from * row;
        if dx >= 0 {
            image.copy_within(from + skip..from + row, at);
            image[at + row - skip..at + row].fill(0.0);
        } else {
            image.copy_within(from..from + row - skip, at + skip);
            image[at..at + skip].fill(0.0);
        }
    }
}

/// Reverses the columns of an image of `w` columns of `c` channels.
fn mirror(image: &mut [f32], w: usize, c: usize) {
    if w * c == 0 {
        return;
    }
    for row in image.chunks_exact_mut(w * c) {
        for x in 0..w / 2 {
            for k in 0..c {
                row.swap(x * c + k, (w - 1 - x) * c + k);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every shift of a small image against its definition, also beyond its edges.
    #[test]
    fn shift_is_its_definition() {
        let (h, w, c) = (3, 4, 2);
        let image: Vec<f32> = (1..=h * w * c).map(|v| v as f32).collect();
        for dy in -4..=4isize {
            for dx in -5..=5isize {
                let mut got = image.clone();
                shift(&mut got, [h, w, c], dy, dx);
                for (i, &v) in got.iter().enumerate() {
                    let (y, x, k) = (i / (w * c), i / c % w, i % c);
                    let from =
                        (y.checked_add_signed(dy).filter(|&y| y < h), x.checked_add_signed(dx).filter(|&x| x < w));
                    let want = if let (Some(y), Some(x)) = from { image[(y * w + x) * c + k] } else { 0.0 };
                    assert_eq!(v, want, "shift by {dy}, {dx} at {y}, {x}, {k}");
                }
            }
        }
    }

    #[test]
    fn mirror_twice_is_nothing() {
        let image: Vec<f32> = (0..2 * 5 * 3).map(|v| v as f32).collect();
        let mut got = image.clone();
        mirror(&mut got, 5, 3);
        assert_eq!(got[..3], image[12..15]);
        assert_eq!(got[6..9], image[6..9]);
        mirror(&mut got, 5, 3);
        assert_eq!(got, image);
    }
}
