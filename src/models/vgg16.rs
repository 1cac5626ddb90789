//! VGG-16, configuration D (Simonyan and Zisserman 2015).
use super::{Model, ModelConfig, classify};
use crate::{Error, Result, layers::*};

/// Output channels of the convolutions of each block; a pooling follows.
const BLOCKS: [&[usize]; 5] = [&[64, 64], &[128, 128], &[256, 256, 256], &[512, 512, 512], &[512, 512, 512]];

pub(super) fn build(c: &ModelConfig) -> Result<Model> {
    let image @ [h, w, mut channels] = c.image("vgg16")?;
    if h % 32 != 0 || w % 32 != 0 || h * w == 0 {
        return Err(Error::config(format!("vgg16: height and width must be multiples of 32, got {h}×{w}")));
    }
    // As published for 224×224; small images take a small classifier.
    let width = c.width.unwrap_or(if h * w > 64 * 64 { 4096 } else { 512 });
    let mut g = Graph::new();
    let mut x = g.input("image", image);
    for block in BLOCKS {
        for &co in block {
            x = g.add(Conv2d::new(channels, co, 3).padding(1), [x])?;
            x = g.add(Relu, [x])?;
            channels = co;
        }
        x = g.add(MaxPool2d::new(2), [x])?;
    }
    let classifier = Sequential::new()
        .then(Flatten)
        .then(Linear::new(512 * (h / 32) * (w / 32), width))
        .then(Relu)
        .then(Linear::new(width, width))
        .then(Relu)
        .then(Linear::new(width, c.classes));
    let logits = g.chain(classifier, x)?;
    classify(g, logits)
}
