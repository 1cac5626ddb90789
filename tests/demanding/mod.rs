//! A model with everything that a partition could disturb.
use pipewright::{Result, layers::*};

/// Dropout, batch normalisation, and a skip edge with three consumers.
pub fn model() -> Result<Graph> {
    let mut g = Graph::new();
    let (x, label) = (g.input("x", [6, 6, 2]), g.label("label"));
    let a = g.add(Conv2d::new(2, 4, 3).padding(1), [x])?;
    let a = g.add(BatchNorm::new(4), [a])?;
    let skip = g.add(Relu, [a])?;
    let b = g.add(Conv2d::new(4, 4, 3).padding(1), [skip])?;
    let b = g.add(Tanh, [b])?;
    let c = g.add(Add, [b, skip])?;
    let c = g.add(Dropout::new(0.3), [c])?;
    let d = g.add(Conv2d::new(4, 4, 1), [c])?;
    let d = g.add(Concat::new(3), [d, skip])?;
    let e = g.add(GlobalAvgPool, [d])?;
    let f = g.add(Flatten, [skip])?;
    let f = g.add(Linear::new(144, 8), [f])?;
    let e = g.add(Linear::new(8, 8), [e])?;
    let e = g.add(Add, [e, f])?;
    let e = g.add(Gelu, [e])?;
    let y = g.add(Linear::new(8, 3), [e])?;
    let loss = g.add(CrossEntropy::new().smoothing(0.1), [y, label])?;
    g.with_loss(loss)
}
