//! A pipelined model trains as the plain one: the same bits under every synchronous schedule, partition and transport.
mod small;

use pipewright::{
    Result,
    layers::*,
    pipeline::{schedule::Kind, transport::threads::Options},
};
use small::*;

/// Dropout, batch normalisation, and a skip edge with three consumers.
fn model() -> Result<Graph> {
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

/// Even and uneven partitions into 1 to 4 stages.
const CUTS: &[&[&str]] = &[
    &[],
    &["conv2d2"],
    &["linear3"],
    &["conv2d2", "conv2d3"],
    &["relu1", "linear2"],
    &["relu1", "add1", "linear1"],
    &["batch_norm1", "relu1", "cross_entropy1"],
];

#[test]
fn synchronous_schedules_equal_one_worker() -> Result<()> {
    let g = model()?;
    // Ragged: fewer micro-batches, the last of them smaller; and fewer micro-batches than workers.
    let sizes = [12, 12, 7, 12, 2, 1 + 12 / 2];
    for m in [4, 2] {
        let mut plain = None;
        for kind in [Kind::Sequential, Kind::GPipe, Kind::OneFOneB] {
            for cuts in CUTS {
                for synchronous in [false, true] {
                    let recipe = recipe(g.clone(), sgd(), kind, 12, m);
                    let mut got = train(&recipe, &cut(&g, cuts)?, &sizes, &[], Options { synchronous })?;
                    assert!(
                        got.versions.iter().all(|&v| v <= 1),
                        "{kind}: one version is enough, got {:?}",
                        got.versions
                    );
                    got.versions.clear();
                    let plain = plain.get_or_insert_with(|| got.clone());
                    assert_eq!(got, *plain, "{kind} cut before {cuts:?}, m = {m}, synchronous sends: {synchronous}");
                }
            }
        }
    }
    Ok(())
}
