//! Look-up of token vectors.
use super::{Example, Init, Layer, ParamSpec, single};
use crate::{
    Result,
    autograd::{Cx, Outputs, Var},
};

/// `y[…,d] = weight[ids[…],d]`.
#[derive(Clone, Copy, Debug)]
pub struct Embedding {
    vocabulary: usize,
    features: usize,
}

impl Embedding {
    /// For ids below `vocabulary`, vectors of `features` numbers; they start as standard normal.
    pub fn new(vocabulary: usize, features: usize) -> Embedding {
        Embedding { vocabulary, features }
    }
}

impl Layer for Embedding {
    fn kind(&self) -> &'static str {
        "embedding"
    }

    fn params(&self) -> Vec<ParamSpec> {
        vec![ParamSpec::new("weight", &[self.vocabulary, self.features], Init::Normal { std: 1.0 })]
    }

    fn forward(&self, cx: &mut Cx, x: &[Var]) -> Result<Outputs> {
        let table = cx.param(0)?;
        Ok(cx.embedding(&table, single(x)?)?.into())
    }

    fn examples() -> Vec<Example> {
        vec![Example::new("sequence", Embedding::new(5, 3), &[]).ids(&[2, 4], 5)]
    }
}
