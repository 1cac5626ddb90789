//! A pipelined model trains as the plain one: the same bits under every synchronous schedule, partition and transport.
mod demanding;
mod small;

use demanding::model;
use pipewright::{
    Result,
    pipeline::{schedule::Kind, transport::threads::Options},
};
use small::*;

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
