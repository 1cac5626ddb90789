//! PipeDream's weight stashing means what its closed form says, bit for bit.
//!
//! Minibatch t reads, on stage r of p, version max(t_d, t − (p−1−r)) of that stage's weights, t_d the last drain; with vertical
//! sync version max(t_d, t − (p−1)) on every stage. Its gradient makes version t + 1.
mod closed;
mod plainly;
mod small;

use closed::*;
use pipewright::{
    Result,
    optim::{Optimizer, Sgd},
    pipeline::{schedule::Kind, transport::threads::Options},
    train::StepLoss,
};
use small::*;

const CUTS: &[&[&str]] = &[&[], &["linear2"], &["linear2", "linear3"], &["relu1", "tanh1", "add1"]];

type Made = (Vec<f64>, String);

/// The closed form and the pipeline's result for one case.
fn both(kind: Kind, cuts: &[&str], opt: Sgd, n: usize, drains: &[usize]) -> Result<(Made, Made, Vec<usize>)> {
    let g = small()?;
    let plan = cut(&g, cuts)?;
    let p = plan.workers();
    let vertical = kind == Kind::PipeDreamVertical;
    let reads = |r: usize, j: usize| j.saturating_sub(if vertical { p - 1 } else { p - 1 - r });
    let sizes = vec![SIZE; n];
    let case = Case { plan: &plan, opt: &opt, sizes: &sizes, drains, reads: &reads, combine: &mean };
    let (losses, weights) = closed_form(&g, &case)?;
    let expected = (losses, sha(&g, &weights)?);
    let recipe = recipe(g, opt, kind, SIZE, 8);
    let got = train(&recipe, &plan, &sizes, drains, Options::default())?;
    let numbers = |l: &StepLoss| l.loss;
    assert!(got.losses.iter().enumerate().all(|(i, l)| l.minibatch == i as u64));
    Ok((expected, (got.losses.iter().map(numbers).collect(), got.sha), got.versions))
}

#[test]
fn stashing_and_vertical_sync_equal_their_closed_forms() -> Result<()> {
    for kind in [Kind::PipeDream, Kind::PipeDreamVertical] {
        for cuts in CUTS {
            for opt in [Sgd::new(0.3), sgd()] {
                // Fewer minibatches than stages, too; and drains in the middle.
                for (n, drains) in [(1, &[][..]), (2, &[]), (13, &[]), (13, &[4, 5, 8])] {
                    let (expected, got, _) = both(kind, cuts, opt.clone(), n, drains)?;
                    assert_eq!(expected, got, "{kind} cut before {cuts:?}, {n} minibatches, drains after {drains:?}");
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
    (&["linear2"], &[2, 1]),
    (&["linear2"], &[1, 2]),
    (&["relu1"], &[3, 1]),
    (&["linear2"], &[2, 3]),
    (&["linear2", "linear3"], &[2, 1, 1]),
    (&["relu1", "linear3"], &[1, 3, 2]),
];

/// Forward j of a stage on R workers reads version max(0, ⌊j/R⌋ − w), and R minibatches make one update.
#[test]
fn replicated_stages_equal_their_closed_form() -> Result<()> {
    for &(cuts, replicas) in REPLICATED {
        let g = small()?;
        let plan = cut_on(&g, cuts, replicas)?;
        let longer: Vec<usize> = plan.shape()?.warm_up().iter().map(|w| w + 1).collect();
        for plan in [plan.clone(), plan.warmed_up(&longer)] {
            let shape = plan.shape()?;
            let reads = |r: usize, j: usize| (j / replicas[r]).saturating_sub(shape.warm_up()[r]);
            // Also numbers of minibatches that no number of workers divides, fewer than workers, drains within rounds, and
            // minibatches of several sizes.
            for (n, drains) in [(1, &[][..]), (2, &[]), (13, &[]), (13, &[4, 5, 8])] {
                let sizes: Vec<usize> = (0..n).map(|j| SIZE - j % 3).collect();
                for opt in [Box::new(sgd()) as Box<dyn Optimizer>, Box::new(pipewright::optim::Adam::new(0.01))] {
                    let case = Case { plan: &plan, opt: &*opt, sizes: &sizes, drains, reads: &reads, combine: &mean };
                    let (losses, weights) = closed_form(&g, &case)?;
                    let name = opt.describe();
                    let mut recipe = recipe(g.clone(), sgd(), Kind::PipeDream, SIZE, 8);
                    recipe.optimizer = opt.into();
                    for synchronous in [false, true] {
                        let got = train(&recipe, &plan, &sizes, drains, Options { synchronous })?;
                        let case =
                            format!("{replicas:?} warm-up {:?}, {n} minibatches, {drains:?}, {name}", shape.warm_up());
                        assert_eq!(losses, got.losses.iter().map(|l| l.loss).collect::<Vec<_>>(), "{case}");
                        assert_eq!(sha(&g, &weights)?, got.sha, "{case}");
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn without_stashing_the_closed_form_fails() -> Result<()> {
    let (expected, got, _) = both(Kind::PipeDreamNoStash, &["linear2", "linear3"], sgd(), 13, &[])?;
    assert_ne!(expected.1, got.1);
    let (expected, got, _) = both(Kind::PipeDreamNoStash, &[], sgd(), 13, &[])?;
    assert_eq!(expected, got, "with one stage there is nothing to stash");
    Ok(())
}

#[test]
fn stage_r_of_p_holds_at_most_p_minus_r_versions() -> Result<()> {
    for cuts in CUTS {
        let p = cuts.len() + 1;
        let (.., versions) = both(Kind::PipeDream, cuts, sgd(), 13, &[])?;
        for (r, &held) in versions.iter().enumerate() {
            assert!(held <= p - r, "stage {r} of {p} held {held} versions");
        }
        let (.., versions) = both(Kind::PipeDreamVertical, cuts, sgd(), 13, &[])?;
        assert!(versions.iter().all(|&held| held <= p), "{versions:?} of {p}");
    }
    Ok(())
}
