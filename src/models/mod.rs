//! Published models, one file each.
mod lenet;
mod mlp;
mod resnet18;
mod vgg16;

use crate::{
    Error, Result,
    layers::{Graph, Value},
};

/// What a model is built for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelConfig {
    /// Height, width and channels of an image.
    pub image: [usize; 3],
    /// Classes.
    pub classes: usize,
    /// Width of the hidden fully connected layers, or channels of the first block of a network without any; each model has its own
    /// default.
    pub width: Option<usize>,
}

/// A classifier of images: fields `image` and `label`.
#[derive(Clone)]
pub struct Model {
    /// The layers, with the loss.
    pub graph: Graph,
    /// What is minimised.
    pub loss: Value,
    /// What is predicted.
    pub logits: Value,
}

/// The names that [`by_name`] knows.
pub const NAMES: &[&str] = &["mlp", "lenet", "vgg16", "resnet18"];

/// The model called `name`.
///
/// # Errors
/// If there is none, or it does not fit images of that size.
pub fn by_name(name: &str, config: &ModelConfig) -> Result<Model> {
    match name {
        "mlp" => mlp::build(config),
        "lenet" => lenet::build(config),
        "vgg16" => vgg16::build(config),
        "resnet18" => resnet18::build(config),
        _ => Err(Error::config(format!("model {name:?}: one of {} expected", NAMES.join(", ")))),
    }
}

/// Ends a classifier with its loss.
fn classify(mut graph: Graph, logits: Value) -> Result<Model> {
    let label = graph.label("label");
    let loss = graph.add(crate::layers::CrossEntropy::new(), [logits, label])?;
    Ok(Model { graph: graph.with_loss(loss)?, loss, logits })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_the_published_ones() -> Result<()> {
        let parameters = |name: &str, image, width| -> Result<usize> {
            let m = by_name(name, &ModelConfig { image, classes: 10, width })?;
            Ok(m.graph.params().iter().map(|p| p.spec.shape.iter().product::<usize>()).sum())
        };
        assert_eq!(parameters("mlp", [28, 28, 1], None)?, 784 * 1024 + 1024 + 1024 * 1024 + 1024 + 10240 + 10);
        assert_eq!(parameters("lenet", [28, 28, 1], None)?, 320 + 18_496 + 3136 * 128 + 128 + 1290);
        // The convolutions of VGG-16 hold 14,714,688 numbers.
        assert_eq!(parameters("vgg16", [32, 32, 3], None)?, 14_714_688 + 2 * (512 * 512 + 512) + 5130);
        // The CIFAR variant of ResNet-18 holds 11,173,962.
        assert_eq!(parameters("resnet18", [32, 32, 3], None)?, 11_173_962);
        let unknown = by_name("vgg17", &ModelConfig { image: [32, 32, 3], classes: 10, width: None });
        assert!(unknown.err().is_some_and(|e| e.to_string().contains("one of mlp, lenet, vgg16, resnet18")));
        for name in NAMES {
            let nothing = by_name(name, &ModelConfig { image: [32, 32, 3], classes: 0, width: None });
            assert!(nothing.err().is_some_and(|e| e.to_string().contains("outputs must be 1 or more")));
            assert!(by_name(name, &ModelConfig { image: [0, 32, 3], classes: 10, width: None }).is_err());
        }
        assert!(by_name("vgg16", &ModelConfig { image: [28, 28, 1], classes: 10, width: None }).is_err());
        Ok(())
    }
}
