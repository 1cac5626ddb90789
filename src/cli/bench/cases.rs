//! Training steps of models and shapes that other frameworks are measured with too: forward, cross-entropy, backward, SGD with
//! momentum; one worker, one micro-batch, always the same samples.
use crate::{
    Error, Result,
    cli::{print_found, train},
    data::{self, Data},
    memory,
    models::{self, Input, ModelConfig},
    optim::Sgd,
    pipeline::{profile::Profile, schedule::Kind},
    tensor::DType,
    train::{Minibatch, Session, Settings, Trainer},
};
use std::time::{Duration, Instant};

/// Flags of `train` that a case leaves nothing to say about.
pub(super) const FIXED: [&str; 14] = [
    "config",
    "model",
    "width",
    "data",
    "schedule",
    "plan",
    "micro_batches",
    "batch",
    "optimizer",
    "lr",
    "momentum",
    "dtype",
    "workers",
    "out",
];

struct Case {
    name: &'static str,
    model: &'static str,
    input: Input,
    classes: usize,
    batch: usize,
}

const CASES: [Case; 7] = [
    Case { name: "mlp_b128", model: "mlp", input: Input::Image([28, 28, 1]), classes: 10, batch: 128 },
    Case { name: "lenet_b64", model: "lenet", input: Input::Image([28, 28, 1]), classes: 10, batch: 64 },
    Case { name: "vgg16_32_b32", model: "vgg16", input: Input::Image([32, 32, 3]), classes: 10, batch: 32 },
    Case { name: "vgg16_224_b4", model: "vgg16", input: Input::Image([224, 224, 3]), classes: 1000, batch: 4 },
    Case { name: "resnet18_32_b32", model: "resnet18", input: Input::Image([32, 32, 3]), classes: 10, batch: 32 },
    Case { name: "gpt_d256_l6_t128_b8", model: "gpt", input: Input::Tokens(128), classes: 256, batch: 8 },
    Case { name: "lstm_d512_l4_t32_b32", model: "lstm", input: Input::Tokens(32), classes: 2000, batch: 32 },
];

/// Steps before the clock starts unless `--warm` says how many.
const WARM: u64 = 2;
/// The fewest steps that are timed, and for how long more are, unless `--steps` says how many.
const STEPS: u64 = 7;
const BUDGET: Duration = Duration::from_secs(4);

#[derive(serde::Serialize)]
struct Answer {
    case: &'static str,
    threads: usize,
    median_ms: f64,
    samples_per_s: f64,
    /// Of the products of forward and backward pass, in billions a second.
    gflops: f64,
    /// The most memory that the process ever held, less that before the model was built.
    rss_bytes: u64,
}

impl Case {
    fn named(name: &str) -> Result<&'static Case> {
        CASES.iter().find(|c| c.name == name).ok_or_else(|| {
            let names: Vec<&str> = CASES.iter().map(|c| c.name).collect();
            Error::config(format!("case {name:?}: one of {} expected", names.join(", ")))
        })
    }

    /// One minibatch of samples.
    fn data(&self) -> Result<Data> {
        match self.input {
            // Ten classes are enough to choose from: each is kept as an image.
            Input::Image(shape) => data::synthetic(shape, self.classes.min(10), self.batch, 1, 0),
            Input::Tokens(length) => data::synthetic_tokens(length, self.classes, self.batch, 1, 0),
        }
    }
}

pub(super) fn run(name: &str, args: &train::Args, warm: Option<u64>) -> Result<()> {
    let (case, threads) = (Case::named(name)?, args.threads.unwrap_or(1));
    let before = most_memory()?;
    let model = models::by_name(case.model, &ModelConfig { input: case.input, classes: case.classes, width: None })?;
    let operations = Profile::products(&model.graph, DType::F32, case.batch)?;
    // Nothing is measured in order to plan: there is one stage.
    let settings = Settings {
        schedule: Kind::Sequential,
        batch: case.batch,
        micro_batches: 1,
        threads,
        deterministic: true,
        winograd: !args.no_winograd,
        ..Settings::default()
    };
    let trainer = Trainer::new(model.graph, model.loss, case.data()?)
        .settings(settings)
        .optimizer(Sgd::new(0.01).momentum(0.9))
        .quiet(true);
    let seconds = trainer.run_with(|session| time(session, warm.unwrap_or(WARM), args.steps))?;
    let answer = Answer {
        case: case.name,
        threads,
        median_ms: 1e3 * seconds,
        samples_per_s: case.batch as f64 / seconds,
        gflops: operations / seconds / 1e9,
        rss_bytes: most_memory()?.saturating_sub(before),
    };
    let words = format!(
        "{}: {:.3} ms a step, {:.1} samples/s, {:.1} GFLOP/s on {threads} threads, {:.1} MiB",
        case.name,
        answer.median_ms,
        answer.samples_per_s,
        answer.gflops,
        answer.rss_bytes as f64 / f64::from(1 << 20)
    );
    print_found(0, args.json, &answer, &words)
}

/// The median seconds of a step, after `warm` steps.
fn time(session: &mut Session, warm: u64, steps: Option<u64>) -> Result<f64> {
    let first = session.next_batch()?.ok_or_else(|| Error::data("there is no minibatch"))?;
    let (mut times, mut start) = (Vec::new(), Instant::now());
    for step in 0.. {
        let begin = Instant::now();
        session.step(&Minibatch { number: session.next_minibatch(), ..first.clone() })?;
        if step < warm {
            start = Instant::now();
            continue;
        }
        times.push(begin.elapsed().as_secs_f64());
        let timed = times.len() as u64;
        if steps.map_or(timed >= STEPS && start.elapsed() >= BUDGET, |steps| timed >= steps) {
            break;
        }
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

/// The most bytes of memory that this process ever held.
fn most_memory() -> Result<u64> {
    memory::peak().ok_or_else(|| Error::data("/proc/self/status: VmHWM expected"))
}
