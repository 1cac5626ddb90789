//! Two convolutions and two fully connected layers, in the manner of LeNet-5 (LeCun et al. 1998) with today's parts.
use super::{Model, ModelConfig, classify};
use crate::{Error, Result, layers::*};

pub(super) fn build(c: &ModelConfig) -> Result<Model> {
    let image @ [h, w, channels] = c.image("lenet")?;
    if h < 4 || w < 4 {
        return Err(Error::config(format!("lenet: images of 4×4 or more expected, got {h}×{w}")));
    }
    let width = c.width.unwrap_or(128);
    let mut g = Graph::new();
    let x = g.input("image", image);
    let layers = Sequential::new()
        .then(Conv2d::new(channels, 32, 3).padding(1))
        .then(Relu)
        .then(MaxPool2d::new(2))
        .then(Conv2d::new(32, 64, 3).padding(1))
        .then(Relu)
        .then(MaxPool2d::new(2))
        .then(Flatten)
        .then(Linear::new(h / 2 / 2 * (w / 2 / 2) * 64, width))
        .then(Relu)
        .then(Linear::new(width, c.classes));
    let logits = g.chain(layers, x)?;
    classify(g, logits)
}
