//! ResNet-18 for small images (He et al. 2016): as published, but a 3×3 stem without pooling.
use super::{Model, ModelConfig, classify};
use crate::{Error, Result, layers::*};

/// Channels, in units of the first block's, and stride of each block.
const BLOCKS: [(usize, usize); 8] = [(1, 1), (1, 1), (2, 2), (2, 1), (4, 2), (4, 1), (8, 2), (8, 1)];

pub(super) fn build(c: &ModelConfig) -> Result<Model> {
    let (size @ [h, w, channels], width) = (c.image("resnet18")?, c.width.unwrap_or(64));
    if h == 0 || w == 0 {
        return Err(Error::config(format!("resnet18: images of 1×1 or more expected, got {h}×{w}")));
    }
    let mut g = Graph::new();
    let image = g.input("image", size);
    let mut x = g.chain(convolution(channels, width, 3, 1).then(Relu), image)?;
    let mut ci = width;
    for (times, stride) in BLOCKS {
        let co =
            width.checked_mul(times).ok_or_else(|| Error::config(format!("resnet18: width {width} is too large")))?;
        x = block(&mut g, x, ci, co, stride)?;
        ci = co;
    }
    let logits = g.chain(Sequential::new().then(GlobalAvgPool).then(Linear::new(ci, c.classes)), x)?;
    classify(g, logits)
}

/// Two convolutions around which a shortcut leads: one of 1×1 where the shape changes.
fn block(g: &mut Graph, x: Value, ci: usize, co: usize, stride: usize) -> Result<Value> {
    let y = g.chain(convolution(ci, co, 3, stride).then(Relu), x)?;
    let y = g.chain(convolution(co, co, 3, 1), y)?;
    let short = if stride == 1 && ci == co { x } else { g.chain(convolution(ci, co, 1, stride), x)? };
    let sum = g.add(Add, [y, short])?;
    g.add(Relu, [sum])
}

/// Normalisation makes a bias superfluous.
fn convolution(ci: usize, co: usize, kernel: usize, stride: usize) -> Sequential {
    let conv = Conv2d::new(ci, co, kernel).stride(stride).padding(kernel / 2).bias(false);
    Sequential::new().then(conv).then(BatchNorm::new(co))
}
