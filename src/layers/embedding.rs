//! Look-up of token vectors, and of vectors for their places.
use super::{Example, Init, Layer, ParamSpec, positive, single};
use crate::{
    Error, Result,
    autograd::{Cx, Outputs, Var},
};

/// `y[…,d] = weight[ids[…],d]`.
#[derive(Clone, Copy, Debug)]
pub struct Embedding {
    vocabulary: usize,
    features: usize,
    frozen: bool,
}

impl Embedding {
    /// For ids below `vocabulary`, vectors of `features` numbers; they start as standard normal.
    pub fn new(vocabulary: usize, features: usize) -> Embedding {
        Embedding { vocabulary, features, frozen: false }
    }

    /// Its vectors are not learned.
    pub fn frozen(self) -> Embedding {
        Embedding { frozen: true, ..self }
    }
}

impl Layer for Embedding {
    fn kind(&self) -> &'static str {
        "embedding"
    }

    fn params(&self) -> Vec<ParamSpec> {
        let shape = [self.vocabulary, self.features];
        vec![ParamSpec::new("weight", &shape, Init::Normal { std: 1.0 }).frozen(self.frozen)]
    }

    fn forward(&self, cx: &mut Cx, x: &[Var]) -> Result<Outputs> {
        positive("embedding", &[("vocabulary", self.vocabulary), ("features", self.features)])?;
        let table = cx.param(0)?;
        Ok(cx.embedding(&table, single(x)?)?.into())
    }

    fn examples() -> Vec<Example> {
        vec![
            Example::new("sequence", Embedding::new(5, 3), &[]).ids(&[2, 4], 5),
            Example::new("one id a sample", Embedding::new(1, 2), &[]).ids(&[3], 1),
        ]
    }
}

/// `y[n,t,d] = x[n,t,d] + weight[t,d]`: a learned vector for each place of a sequence.
#[derive(Clone, Copy, Debug)]
pub struct PositionEmbedding {
    places: usize,
    features: usize,
    frozen: bool,
}

impl PositionEmbedding {
    /// For sequences of `places` vectors of `features` numbers; what is added starts as standard normal.
    pub fn new(places: usize, features: usize) -> PositionEmbedding {
        PositionEmbedding { places, features, frozen: false }
    }

    /// Its vectors are not learned.
    pub fn frozen(self) -> PositionEmbedding {
        PositionEmbedding { frozen: true, ..self }
    }
}

impl Layer for PositionEmbedding {
    fn kind(&self) -> &'static str {
        "position_embedding"
    }

    fn params(&self) -> Vec<ParamSpec> {
        let shape = [self.places, self.features];
        vec![ParamSpec::new("weight", &shape, Init::Normal { std: 1.0 }).frozen(self.frozen)]
    }

    fn forward(&self, cx: &mut Cx, x: &[Var]) -> Result<Outputs> {
        let (x, PositionEmbedding { places, features, .. }) = (single(x)?, *self);
        positive("position_embedding", &[("places", places), ("features", features)])?;
        if !matches!(x.shape(), &[_, t, d] if t == places && d == features) {
            return Err(Error::shape(format!(
                "position_embedding: x[n,{places},{features}] expected, got {:?}",
                x.shape()
            )));
        }
        let weight = cx.param(0)?;
        Ok(cx.add(x, &weight)?.into())
    }

    fn examples() -> Vec<Example> {
        vec![
            Example::new("sequence", PositionEmbedding::new(4, 3), &[&[2, 4, 3]]),
            Example::new("one place, frozen", PositionEmbedding::new(1, 2).frozen(), &[&[3, 1, 2]]),
        ]
    }
}
