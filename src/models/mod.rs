//! Published models, one file each.
mod gpt;
mod lenet;
mod lstm;
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
    /// What it reads.
    pub input: Input,
    /// Classes: of an image, or of the token that follows (the vocabulary).
    pub classes: usize,
    /// Width of the hidden fully connected layers, channels of the first block of a network without any, or features of a token;
    /// each model has its own default.
    pub width: Option<usize>,
}

/// What a sample is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// An image of this height, width and number of channels.
    Image([usize; 3]),
    /// So many tokens.
    Tokens(usize),
}

impl ModelConfig {
    /// The size of the images that `model` is for.
    fn image(&self, model: &str) -> Result<[usize; 3]> {
        match self.input {
            Input::Image(size) => Ok(size),
            Input::Tokens(_) => {
                Err(Error::config(format!("model {model:?} needs images [h,w,c], the data has tokens")))
            }
        }
    }

    /// The number of tokens that `model` is for.
    fn tokens(&self, model: &str) -> Result<usize> {
        match self.input {
            Input::Tokens(length) => Ok(length),
            Input::Image(_) => Err(Error::config(format!("model {model:?} needs tokens, the data has images"))),
        }
    }
}

/// A classifier of images, with the fields `image` and `label`, or of the token after each token, with `tokens` and `target`.
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
pub const NAMES: &[&str] = &["mlp", "lenet", "vgg16", "resnet18", "gpt", "lstm"];

/// The model called `name`.
///
/// # Errors
/// If there is none, or it does not fit such samples.
pub fn by_name(name: &str, config: &ModelConfig) -> Result<Model> {
    match name {
        "mlp" => mlp::build(config),
        "lenet" => lenet::build(config),
        "vgg16" => vgg16::build(config),
        "resnet18" => resnet18::build(config),
        "gpt" => gpt::build(config),
        "lstm" => lstm::build(config),
        _ => Err(Error::config(format!("model {name:?}: one of {} expected", NAMES.join(", ")))),
    }
}

/// Ends a classifier of images with its loss.
fn classify(mut graph: Graph, logits: Value) -> Result<Model> {
    let label = graph.label("label");
    against(graph, logits, label)
}

/// Ends a model of sequences of `length` tokens, which foretells the token after each, with its loss.
fn foretell(mut graph: Graph, logits: Value, length: usize) -> Result<Model> {
    let target = graph.ids("target", [length]);
    against(graph, logits, target)
}

fn against(mut graph: Graph, logits: Value, target: Value) -> Result<Model> {
    let loss = graph.add(crate::layers::CrossEntropy::new(), [logits, target])?;
    Ok(Model { graph: graph.with_loss(loss)?, loss, logits })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_the_published_ones() -> Result<()> {
        let count = |name: &str, input, classes| -> Result<usize> {
            let m = by_name(name, &ModelConfig { input, classes, width: None })?;
            Ok(m.graph.params().iter().map(|p| p.spec.shape.iter().product::<usize>()).sum())
        };
        let parameters = |name, image| count(name, Input::Image(image), 10);
        assert_eq!(parameters("mlp", [28, 28, 1])?, 784 * 1024 + 1024 + 1024 * 1024 + 1024 + 10240 + 10);
        assert_eq!(parameters("lenet", [28, 28, 1])?, 320 + 18_496 + 3136 * 128 + 128 + 1290);
        // The convolutions of VGG-16 hold 14,714,688 numbers.
        assert_eq!(parameters("vgg16", [32, 32, 3])?, 14_714_688 + 2 * (512 * 512 + 512) + 5130);
        // The CIFAR variant of ResNet-18 holds 11,173,962.
        assert_eq!(parameters("resnet18", [32, 32, 3])?, 11_173_962);
        // Twelve matrices d×d a block, biases and two normalisations.
        let gpt = 6 * (12 * 256 * 256 + 13 * 256) + 2 * 256 + (2 * 256 + 128) * 256 + 256;
        assert_eq!(count("gpt", Input::Tokens(128), 256)?, gpt);
        let lstm = 4 * (8 * 512 * 512 + 8 * 512) + 2 * 2000 * 512 + 2000;
        assert_eq!(count("lstm", Input::Tokens(32), 2000)?, lstm);
        Ok(())
    }

    #[test]
    fn what_does_not_fit_is_told() {
        let error = |name, input, classes| {
            let built = by_name(name, &ModelConfig { input, classes, width: None });
            built.err().map(|e| e.to_string()).unwrap_or_default()
        };
        let image = |h| Input::Image([h, 32, 3]);
        assert!(error("vgg17", image(32), 10).contains("one of mlp, lenet, vgg16, resnet18, gpt, lstm"));
        for name in ["mlp", "lenet", "vgg16", "resnet18"] {
            assert!(error(name, image(32), 0).contains("outputs must be 1 or more"));
            assert!(!error(name, image(0), 10).is_empty());
            assert!(error(name, Input::Tokens(9), 10).contains("needs images [h,w,c], the data has tokens"));
        }
        for name in ["gpt", "lstm"] {
            assert!(error(name, Input::Tokens(9), 0).contains("vocabulary must be 1 or more"));
            assert!(!error(name, Input::Tokens(0), 10).is_empty());
            assert!(error(name, image(32), 10).contains("needs tokens, the data has images"));
        }
        assert!(!error("vgg16", image(28), 10).is_empty());
        let odd = ModelConfig { input: Input::Tokens(4), classes: 5, width: Some(12) };
        assert!(by_name("gpt", &odd).err().is_some_and(|e| e.to_string().contains("heads must divide features")));
    }
}
