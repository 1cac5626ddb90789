//! Moves and joins.
use super::{Example, Layer, single};
use crate::{
    Error, Result,
    autograd::{Cx, Outputs, Var},
};

/// x[n,…] becomes y[n, all the rest].
#[derive(Clone, Copy, Debug, Default)]
pub struct Flatten;

impl Layer for Flatten {
    fn kind(&self) -> &'static str {
        "flatten"
    }
    fn forward(&self, cx: &mut Cx, x: &[Var]) -> Result<Outputs> {
        let x = single(x)?;
        let (&n, rest) = x.shape().split_first().ok_or_else(|| Error::shape("flatten: one axis or more expected"))?;
        Ok(cx.reshape(x, &[n, rest.iter().product()])?.into())
    }
    fn examples() -> Vec<Example> {
        vec![Example::new("images", Flatten, &[&[2, 3, 2, 2]])]
    }
}

/// The same elements in another shape per sample: x[n,…] becomes y[n·k, …].
#[derive(Clone, Debug)]
pub struct Reshape {
    shape: Vec<usize>,
}

impl Reshape {
    /// `shape` is that of one sample; its product must be the sample's number of elements, or a divisor of it: then axis 0
    /// becomes samples × k.
    pub fn new(shape: impl Into<Vec<usize>>) -> Reshape {
        Reshape { shape: shape.into() }
    }
}

impl Layer for Reshape {
    fn kind(&self) -> &'static str {
        "reshape"
    }
    fn forward(&self, cx: &mut Cx, x: &[Var]) -> Result<Outputs> {
        let x = single(x)?;
        let (&n, rest) = x.shape().split_first().ok_or_else(|| Error::shape("reshape: one axis or more expected"))?;
        let have = rest.iter().product::<usize>();
        let want = self.shape.iter().try_fold(1usize, |want, &n| want.checked_mul(n));
        let Some(parts) = want.filter(|&want| want > 0 && have.is_multiple_of(want)).map(|want| have / want) else {
            return Err(Error::shape(format!(
                "reshape: x{:?} cannot be cut into parts of {:?}",
                x.shape(),
                self.shape
            )));
        };
        Ok(cx.reshape(x, &[&[n * parts], &self.shape[..]].concat())?.into())
    }
    fn examples() -> Vec<Example> {
        vec![
            Example::new("same size", Reshape::new([4, 3]), &[&[2, 3, 4]]),
            Example::new("rows of a sequence", Reshape::new([4]), &[&[2, 3, 4]]),
        ]
    }
}

/// The sum of two or more values of one shape.
#[derive(Clone, Copy, Debug, Default)]
pub struct Add;

impl Layer for Add {
    fn kind(&self) -> &'static str {
        "add"
    }
    fn forward(&self, cx: &mut Cx, x: &[Var]) -> Result<Outputs> {
        let (first, rest) =
            x.split_first().ok_or_else(|| Error::graph("add: two inputs or more expected, got none"))?;
        if rest.is_empty() || rest.iter().any(|v| v.shape() != first.shape()) {
            let shapes: Vec<_> = x.iter().map(Var::shape).collect();
            return Err(Error::shape(format!("add: two inputs or more of one shape expected, got {shapes:?}")));
        }
        let mut sum = first.clone();
        for v in rest {
            sum = cx.add(&sum, v)?;
        }
        Ok(sum.into())
    }
    fn examples() -> Vec<Example> {
        vec![Example::new("two", Add, &[&[2, 3], &[2, 3]]), Example::new("three", Add, &[&[2, 3], &[2, 3], &[2, 3]])]
    }
}

/// Joins any number of values along an axis.
#[derive(Clone, Copy, Debug)]
pub struct Concat {
    axis: usize,
}

impl Concat {
    /// Along `axis` (0 is the samples' and cannot be joined).
    pub fn new(axis: usize) -> Concat {
        Concat { axis }
    }
}

impl Layer for Concat {
    fn kind(&self) -> &'static str {
        "concat"
    }
    fn forward(&self, cx: &mut Cx, x: &[Var]) -> Result<Outputs> {
        if self.axis == 0 {
            return Err(Error::shape("concat: axis 0 is the samples'; 1 or more expected"));
        }
        Ok(cx.concat(x, self.axis)?.into())
    }
    fn examples() -> Vec<Example> {
        let many: Vec<&[usize]> = vec![&[2, 1]; 70];
        vec![
            Example::new("last axis", Concat::new(2), &[&[2, 3, 1], &[2, 3, 4]]),
            Example::new("one", Concat::new(1), &[&[2, 3]]),
            Example::new("seventy", Concat::new(1), &many),
        ]
    }
}
