//! A rank that dies, panics, fails or stops: the job ends within seconds, and says where. Every case is a job of `mpirun`.
#![cfg(feature = "mpi")]
mod launcher;
mod mpirun;
mod signal;

use mpirun::{Job, mpirun};
use pipewright::{
    Error, Result,
    autograd::{Cx, Mode, Outputs, Var},
    data::Batch,
    layers::*,
    optim::Sgd,
    pipeline::{
        faults,
        plan::Plan,
        schedule::Kind,
        transport::{Transport, launch},
    },
    tensor::{DType, Device, Tensor},
    train::{Engine, Minibatch, Recipe, Settings},
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// What the last stage meets.
#[derive(Clone, Copy)]
enum Fault {
    Killed,
    Stopped,
    Panic,
    Io,
    Exit,
    None,
}

/// Micro-batches of a minibatch.
const MICRO_BATCHES: usize = 4;
/// Which forward pass meets the fault: micro-batch 1 of minibatch 2.
const AT: usize = 2 * MICRO_BATCHES + 1;

/// Passes its input on, but once.
struct Faulty {
    fault: Fault,
    passes: AtomicUsize,
}

impl Layer for Faulty {
    fn kind(&self) -> &'static str {
        "faulty"
    }

    fn forward(&self, cx: &mut Cx, x: &[Var]) -> Result<Outputs> {
        let [x] = x else { return Err(Error::graph("faulty: one input expected")) };
        let real = cx.mode() == Mode::Train && x.value().device().backend().has_data();
        if real && self.passes.fetch_add(1, Relaxed) == AT {
            eprintln!("fault at {}s", now().as_secs_f64());
            match self.fault {
                Fault::Killed => signal::send(std::process::id(), "-KILL"),
                Fault::Stopped => {
                    signal::send(std::process::id(), "-STOP");
                    // It takes effect when the system next looks at this process.
                    std::thread::sleep(Duration::from_secs(1));
                }
                Fault::Panic => panic!("a bug in a layer"),
                Fault::Io => return Err(Error::io("/data/7", std::io::Error::other("the disk is full"))),
                Fault::Exit => std::process::exit(3),
                Fault::None => {}
            }
        }
        Ok(x.clone().into())
    }

    fn examples() -> Vec<Example> {
        Vec::new()
    }
}

fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Runs a case on three ranks and checks that the job failed, soon after the fault, with these words.
fn fails(case: &str, env: &[(&str, &str)], within: f64, words: &[&str]) -> Option<Job> {
    let job = mpirun(3, case, env)?;
    let end = now().as_secs_f64();
    assert!(!job.success, "{case}: {}", job.text);
    let fault = job.text.split_once("fault at ").and_then(|(_, rest)| rest.split_once('s')?.0.parse::<f64>().ok());
    let took = fault.map_or(job.took.as_secs_f64(), |fault| end - fault);
    assert!(took < within, "{case}: {took} s: {}", job.text);
    for word in words {
        assert!(job.text.contains(word), "{case}: {word:?} expected in {}", job.text);
    }
    Some(job)
}

const PLACE: &str = "stage 2, micro-batch 1, forward";

#[test]
fn without_a_fault_it_ends_well() {
    let Some(job) = mpirun(3, "none", &[]) else { return };
    assert!(job.success, "{}", job.text);
}

#[test]
fn a_killed_rank_is_told_of_by_another() {
    fails("killed", &[], 5.0, &["rank 0 ends the job", "a rank died: rank 2 (pid ", PLACE, "minibatch 2"]);
}

#[test]
fn a_rank_that_leaves_without_a_word_is_told_of() {
    fails("exit", &[], 5.0, &["a rank died: rank 2 (pid ", PLACE]);
}

#[test]
fn a_panic_ends_the_job() {
    let words = ["rank 2 ends the job", "a bug in a layer at ", "mpi_faults.rs", PLACE, "minibatch 2"];
    fails("panic", &[], 5.0, &words);
}

#[test]
fn a_panic_in_the_communication_thread_ends_the_job() {
    let words = ["rank 1 ends the job", "\"communication\"", "stage 1, micro-batch ", "edge", "minibatch "];
    fails("none", &[("PIPEWRIGHT_MPI_PANIC", "1:60")], 5.0, &words);
}

#[test]
fn an_error_ends_the_job() {
    let words = ["rank 2 ends the job", "io: /data/7: the disk is full", "rank 2, stage 2, micro-batch 1, forward"];
    fails("io", &[], 5.0, &words);
}

#[test]
fn the_watchdog_tells_of_a_stopped_rank() {
    let words =
        ["the watchdog allows 2.0 s", "is stopped (process state T)", PLACE, "has waited for 2", "receive the "];
    fails("stopped", &[], 7.0, &words);
}

#[test]
fn ranks_do_not_wait_for_ever_for_one_that_does_not_come_to_mpi_init() {
    for case in ["stopped before", "gone before"] {
        fails(case, &[], 10.0, &["rank 0 has waited for 2.0 s in MPI_Init", "waits for other ranks"]);
    }
}

#[test]
#[ignore = "a rank of the other tests"]
fn rank() -> Result<()> {
    let is_last = std::env::var("OMPI_COMM_WORLD_RANK").is_ok_and(|rank| rank == "2");
    match mpirun::case().as_deref() {
        Some(case) if case.ends_with("before") => {
            faults::set_watchdog(Duration::from_secs(2));
            if is_last && case == "gone before" {
                return Ok(());
            }
            if is_last {
                signal::send(std::process::id(), "-STOP");
            }
            // A rank that is gone when the others come is one that no launcher counts on.
            std::thread::sleep(Duration::from_secs(1));
            return launch(1, |transport| train(Fault::None, transport));
        }
        _ => {}
    }
    let fault = match mpirun::case().as_deref() {
        Some("killed") => Fault::Killed,
        Some("stopped") => Fault::Stopped,
        Some("panic") => Fault::Panic,
        Some("io") => Fault::Io,
        Some("exit") => Fault::Exit,
        Some("none") => Fault::None,
        _ => return Ok(()),
    };
    // Elsewhere a slow machine is no fault.
    faults::set_watchdog(Duration::from_secs(if matches!(fault, Fault::Stopped) { 2 } else { 30 }));
    launch(1, |transport| train(fault, transport))
}

/// Trains for some minibatches on three stages, the last of which is faulty.
fn train(fault: Fault, transport: &mut dyn Transport) -> Result<()> {
    let mut g = Graph::new();
    let (x, label) = (g.input("x", [6]), g.label("label"));
    let a = g.add(Linear::new(6, 5), [x])?;
    let a = g.add(Tanh, [a])?;
    let a = g.add(Linear::new(5, 7), [a])?;
    let a = g.add(Tanh, [a])?;
    let a = g.add(Faulty { fault, passes: AtomicUsize::new(0) }, [a])?;
    let y = g.add(Linear::new(7, 3), [a])?;
    let loss = g.add(CrossEntropy::new(), [y, label])?;
    let g = g.with_loss(loss)?;
    let cuts = ["linear2", "faulty1"].map(|name| g.find(name)).into_iter().flatten().collect::<Vec<_>>();
    let plan = Plan::straight(&g, &cuts)?;
    let batch = 3 * MICRO_BATCHES;
    let schedule = Kind::OneFOneB;
    let settings = Settings { schedule, batch, micro_batches: MICRO_BATCHES, dtype: DType::F32, ..Settings::default() };
    let recipe = Recipe { graph: Arc::new(g), optimizer: Arc::new(Sgd::new(0.1)), settings };
    let device = Device::cpu(1)?;
    let mut engine = Engine::new(recipe, plan, device.clone(), transport)?;
    for number in 0..5 {
        let ids: Vec<u64> = (0..batch as u64).collect();
        let x = Tensor::full(0.5, &[batch, 6], DType::F32, &device)?;
        let label = Tensor::zeros(&[batch], DType::I64, &device)?;
        let fields = vec![("x".into(), x), ("label".into(), label)];
        let batch = engine.reads_data().then(|| Batch { ids: ids.clone(), fields });
        engine.train(&Minibatch { number, ids, batch })?;
    }
    engine.drain()
}
