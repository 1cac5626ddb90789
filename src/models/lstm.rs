//! Four layers of long short-term memory that foretell the next token, in the manner of Zaremba et al. 2014.
use super::{Model, ModelConfig, foretell};
use crate::{Result, layers::*};

const LAYERS: usize = 4;

pub(super) fn build(c: &ModelConfig) -> Result<Model> {
    let (length, width) = (c.tokens("lstm")?, c.width.unwrap_or(512));
    let mut g = Graph::new();
    let tokens = g.ids("tokens", [length]);
    let mut layers = Sequential::new().then(Embedding::new(c.classes, width));
    for _ in 0..LAYERS {
        layers = layers.then(Lstm::new(width, width));
    }
    let logits = g.chain(layers.then(Linear::new(width, c.classes)), tokens)?;
    foretell(g, logits, length)
}
