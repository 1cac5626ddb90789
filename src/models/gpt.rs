//! A transformer that foretells the next token, in the manner of GPT-2 (Radford et al. 2019): six blocks of eight heads.
use super::{Model, ModelConfig, foretell};
use crate::{Error, Result, layers::*};

const BLOCKS: usize = 6;
const HEADS: usize = 8;

pub(super) fn build(c: &ModelConfig) -> Result<Model> {
    let (length, width) = (c.tokens("gpt")?, c.width.unwrap_or(256));
    let mut g = Graph::new();
    let tokens = g.ids("tokens", [length]);
    let start = Sequential::new().then(Embedding::new(c.classes, width)).then(PositionEmbedding::new(length, width));
    let mut x = g.chain(start, tokens)?;
    let hidden = width.checked_mul(4).ok_or_else(|| Error::config(format!("gpt: width {width} is too large")))?;
    for _ in 0..BLOCKS {
        let attention = MultiHeadAttention::new(width, HEADS).causal(true);
        x = beside(&mut g, x, Sequential::new().then(LayerNorm::new(width)).then(attention))?;
        let layers = Sequential::new().then(LayerNorm::new(width)).then(Linear::new(width, hidden)).then(Gelu);
        x = beside(&mut g, x, layers.then(Linear::new(hidden, width)))?;
    }
    let end = Sequential::new().then(LayerNorm::new(width)).then(Linear::new(width, c.classes));
    let logits = g.chain(end, x)?;
    foretell(g, logits, length)
}

/// x plus what the layers make of it.
fn beside(g: &mut Graph, x: Value, layers: Sequential) -> Result<Value> {
    let y = g.chain(layers, x)?;
    g.add(Add, [x, y])
}
