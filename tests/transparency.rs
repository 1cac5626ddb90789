//! A pipelined model trains as the plain one: the same bits under every synchronous schedule, partition and transport.
mod demanding;
mod small;

use demanding::model;
use pipewright::{
    Result,
    models::{self, Input, ModelConfig},
    pipeline::{schedule::Kind, transport::threads::Options},
    tensor::DType,
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

/// Cuts and the workers of each stage.
const REPLICATED: &[(&[&str], &[usize])] = &[
    (&[], &[2]),
    (&[], &[3]),
    (&["conv2d2"], &[2, 1]),
    (&["linear3"], &[1, 2]),
    (&["conv2d2"], &[3, 2]),
    (&["relu1", "linear2"], &[2, 1, 1]),
    (&["batch_norm1", "relu1", "cross_entropy1"], &[1, 2, 1, 3]),
];

#[test]
fn replicated_stages_equal_one_worker() -> Result<()> {
    let g = model()?;
    let sizes = [12, 12, 7, 12, 2, 1 + 12 / 2];
    for m in [4, 3] {
        let mut plain = None;
        for kind in [Kind::Sequential, Kind::GPipe, Kind::OneFOneB] {
            for &(cuts, replicas) in [(&[][..], &[1][..])].iter().chain(REPLICATED) {
                for synchronous in [false, true] {
                    let mut recipe = recipe(g.clone(), sgd(), kind, 12, m);
                    recipe.settings.deterministic = true;
                    let plan = cut_on(&g, cuts, replicas)?;
                    let mut got = train(&recipe, &plan, &sizes, &[], Options { synchronous })?;
                    got.versions.clear();
                    let plain = plain.get_or_insert_with(|| got.clone());
                    let case =
                        format!("{kind} cut before {cuts:?} on {replicas:?}, m = {m}, synchronous: {synchronous}");
                    assert_eq!(got, *plain, "{case}");
                    if synchronous {
                        continue;
                    }
                    // Faster, and equal but for the order of the additions.
                    recipe.settings.deterministic = false;
                    let fast = train(&recipe, &plan, &sizes, &[], Options { synchronous })?;
                    for (a, b) in fast.losses.iter().zip(&plain.losses) {
                        assert!((a.loss - b.loss).abs() <= 1e-9 * b.loss.abs(), "{case}: {a:?} {b:?}");
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn models_of_sequences_on_one_two_and_three_workers() -> Result<()> {
    let cases: [(&str, &[&[&str]]); 2] = [
        ("gpt", &[&[], &["add4"], &["attention1", "linear6"], &["position_embedding1", "add12"]]),
        ("lstm", &[&[], &["lstm3"], &["lstm1", "lstm4"], &["lstm2", "cross_entropy1"]]),
    ];
    for (name, partitions) in cases {
        let config = ModelConfig { input: Input::Tokens(TOKENS), classes: VOCABULARY, width: Some(16) };
        let g = models::by_name(name, &config)?.graph;
        for dtype in [DType::F32, DType::F64] {
            let mut recipe = recipe(g.clone(), sgd(), Kind::OneFOneB, 12, 4);
            recipe.settings.dtype = dtype;
            let mut plain = None;
            for cuts in partitions {
                let got = train(&recipe, &cut(&g, cuts)?, &[12, 7, 12], &[], Options::default())?;
                assert!(got.losses.iter().all(|l| l.loss.is_finite() && l.weight % TOKENS as f64 == 0.0), "{name}");
                let (losses, sha) = plain.get_or_insert_with(|| (got.losses.clone(), got.sha.clone()));
                assert_eq!((&got.losses, &got.sha), (&*losses, &*sha), "{name} {dtype} cut before {cuts:?}");
            }
        }
    }
    Ok(())
}
