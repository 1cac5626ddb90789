//! Ranks over MPI train as threads do, which train as one worker does: the same losses and weights, bit for bit.
#![cfg(feature = "mpi")]
mod demanding;
mod launcher;
mod mpirun;
mod small;

use demanding::model;
use mpirun::mpirun;
use pipewright::{
    Result,
    pipeline::{
        plan::Plan,
        schedule::Kind,
        transport::{launch, threads::Options},
    },
    train::Recipe,
};
use small::*;

/// Ragged, and fewer micro-batches than workers.
const SIZES: &[usize] = &[12, 12, 7, 12, 2, 7, 12, 12];
/// A drain in the middle, which is where asynchronous schedules differ.
const DRAINS: &[usize] = &[2];
const CUTS: &[&[&str]] = &[&[], &["conv2d2"], &["relu1", "linear2"], &["relu1", "add1", "linear1"]];

/// Cuts and the workers of each stage.
const REPLICATED: &[(&[&str], &[usize])] =
    &[(&[], &[2]), (&["conv2d2"], &[2, 1]), (&["linear3"], &[1, 2]), (&["relu1", "linear2"], &[2, 1, 1])];

fn recipe_of(kind: Kind) -> Result<Recipe> {
    let mut recipe = recipe(model()?, sgd(), kind, 12, 4);
    recipe.settings.deterministic = true;
    Ok(recipe)
}

/// Partition `at` of both lists.
fn partition(at: usize) -> Result<Plan> {
    let g = model()?;
    match at.checked_sub(CUTS.len()) {
        None => cut(&g, CUTS[at]),
        Some(at) => {
            let (cuts, replicas) = REPLICATED[at];
            cut_on(&g, cuts, replicas)
        }
    }
}

/// What a rank prints of its outcome, exact to the bit.
fn in_words(o: &Outcome) -> String {
    let losses: Vec<String> = o.losses.iter().map(|l| format!("{}:{:016x}", l.minibatch, l.loss.to_bits())).collect();
    format!("outcome {} {} {:?}", losses.join(" "), o.sha, o.versions)
}

#[test]
fn ranks_train_as_threads_do() -> Result<()> {
    for kind in [Kind::GPipe, Kind::OneFOneB, Kind::PipeDream, Kind::PipeDreamVertical] {
        for at in 0..CUTS.len() + REPLICATED.len() {
            if kind == Kind::PipeDreamVertical && at >= CUTS.len() {
                continue;
            }
            let (plan, shape) = (partition(at)?, partition(at)?.shape()?);
            let expected = in_words(&train(&recipe_of(kind)?, &plan, SIZES, DRAINS, Options::default())?);
            for synchronous in ["0", "1"] {
                let env = [("PIPEWRIGHT_MPI_SYNCHRONOUS", synchronous)];
                let Some(job) = mpirun(plan.workers(), &format!("{kind} {at}"), &env) else { return Ok(()) };
                assert!(job.success, "{kind} on {shape:?}, {:?}: {}", job.took, job.text);
                assert!(job.text.contains(&expected), "{kind} on {shape:?}: {expected} expected in {}", job.text);
            }
        }
    }
    Ok(())
}

#[test]
#[ignore = "a rank of the other test"]
fn rank() -> Result<()> {
    let Some(case) = mpirun::case() else { return Ok(()) };
    let (kind, at) = case.split_once(' ').expect("a schedule and the number of a partition");
    let (recipe, at): (Recipe, usize) = (recipe_of(kind.parse()?)?, at.parse().expect("a number"));
    let plan = partition(at)?;
    launch(1, |t| {
        let outcome = train_on(t, &recipe, &plan, SIZES, DRAINS)?;
        if t.rank() == 0 {
            println!("{}", in_words(&outcome));
        }
        Ok(())
    })
}
