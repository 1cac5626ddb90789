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
    tensor::Device,
    train::{Engine, Recipe},
};
use sha2::{Digest, Sha256};
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

/// Updates that do not wait depend on the clock, but all ranks end with the same.
#[test]
fn ranks_whose_updates_do_not_wait_agree() {
    for synchronous in ["0", "1"] {
        let env = [("PIPEWRIGHT_MPI_SYNCHRONOUS", synchronous)];
        let Some(job) = mpirun(3, "asp", &env) else { return };
        assert!(job.success, "{:?}: {}", job.took, job.text);
        let mut held: Vec<&str> = job.text.lines().filter_map(|l| l.strip_prefix("held ")).collect();
        assert_eq!(held.len(), 3, "{}", job.text);
        held.dedup();
        assert_eq!(held.len(), 1, "{}", job.text);
    }
}

/// A rank that trains without waiting, and prints a hash of what it holds.
fn asp_rank() -> Result<()> {
    let mut recipe = recipe_of(Kind::PipeDream)?;
    (recipe.settings.deterministic, recipe.settings.asp) = (false, true);
    let plan = cut_on(&recipe.graph, &[], &[3])?;
    launch(1, |t| {
        let device = Device::cpu(1)?;
        let mut engine = Engine::new(recipe.clone(), plan.clone(), device.clone(), t)?;
        for (i, &n) in SIZES.iter().cycle().take(40).enumerate() {
            engine.train(&minibatch(i as u64, n, recipe.settings.dtype, &device)?)?;
        }
        engine.drain()?;
        let mut hash = Sha256::new();
        for stage in engine.worker().stages() {
            let weights = stage.weights().held().iter().flat_map(|w| [&w.tensor].into_iter().chain(&w.state));
            for t in weights.chain(stage.states().map(|(_, t)| t)) {
                t.to_f64()?.iter().for_each(|v| hash.update(v.to_le_bytes()));
            }
        }
        // One write a rank.
        let digest: String = hash.finalize().iter().map(|b| format!("{b:02x}")).collect();
        print!("{}", format_args!("held {digest}\n"));
        engine.finish()
    })
}

#[test]
#[ignore = "a rank of the other test"]
fn rank() -> Result<()> {
    let Some(case) = mpirun::case() else { return Ok(()) };
    if case == "asp" {
        return asp_rank();
    }
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
