//! A perceptron with two hidden layers.
use super::{Model, ModelConfig, classify};
use crate::{Result, layers::*};

pub(super) fn build(c: &ModelConfig) -> Result<Model> {
    let image = c.image("mlp")?;
    let (pixels, width) = (image.iter().product(), c.width.unwrap_or(1024));
    let mut g = Graph::new();
    let x = g.input("image", image);
    let layers = Sequential::new()
        .then(Flatten)
        .then(Linear::new(pixels, width))
        .then(Relu)
        .then(Linear::new(width, width))
        .then(Relu)
        .then(Linear::new(width, c.classes));
    let logits = g.chain(layers, x)?;
    classify(g, logits)
}
