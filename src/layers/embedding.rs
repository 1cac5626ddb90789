//! Look-up of token vectors.
use super::{Example, Init, Layer, ParamSpec, positive, single};
use crate::{
    Result,
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
