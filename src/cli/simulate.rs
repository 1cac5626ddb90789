//! `pipewright simulate`
use super::{print, print_json, profiled::Profiled, replicas};
use crate::{
    Error, Result,
    pipeline::{
        plan::Plan,
        planner::{Link, plan_shape, replicas_of_shape},
        predict,
        profile::NodeCost,
        schedule::{
            Kind, Shape, Wiring, prepare, simulate,
            simulate::{Costs, EdgeCost, StageCost, Timeline},
        },
    },
    tensor::DType,
};

#[derive(clap::Args)]
pub(super) struct Args {
    /// sequential, gpipe, 1f1b, pipedream, pipedream-vertical or pipedream-nostash
    #[arg(long)]
    kind: Kind,
    /// Micro-batches (asynchronous kinds: minibatches)
    #[arg(long, default_value_t = 8)]
    micro_batches: usize,
    /// Workers, a stage each
    #[arg(long, default_value_t = 4)]
    workers: usize,
    /// Workers of each stage, as in 2-1-1, instead of one
    #[arg(long, value_name = "SHAPE", conflicts_with = "workers")]
    replicas: Option<String>,
    /// Seconds of a forward pass: one number, or one for each stage
    #[arg(long, value_delimiter = ',', default_value = "1")]
    forward: Vec<f64>,
    /// Seconds of a backward pass, half of it for the input gradients
    #[arg(long, value_delimiter = ',', default_value = "2")]
    backward: Vec<f64>,
    /// Seconds of an update
    #[arg(long, value_delimiter = ',', default_value = "0")]
    update: Vec<f64>,
    /// Bytes of a value or a gradient that crosses from stage to stage
    #[arg(long, value_delimiter = ',', default_value = "0")]
    bytes: Vec<f64>,
    /// Bytes per second of the links between workers [default: 5e9 with --plan, else no limit]
    #[arg(long)]
    bandwidth: Option<f64>,
    /// Seconds of latency of the links [default: 1e-6 with --plan, else 0]
    #[arg(long)]
    latency: Option<f64>,
    /// Cores that the workers share [default: one for each]
    #[arg(long)]
    cores: Option<f64>,
    /// A plan file, or a shape such as 1-1-1-1: the costs are those of a model's profile then
    #[arg(long, conflicts_with_all = ["workers", "replicas", "forward", "backward", "update", "bytes"])]
    plan: Option<String>,
    #[command(flatten)]
    profiled: Profiled,
    /// Seconds of a character of the timeline [default: the shortest pass]
    #[arg(long)]
    cell: Option<f64>,
    /// The most characters of a row of the timeline
    #[arg(long, default_value_t = 120)]
    columns: usize,
    /// Prints one JSON object
    #[arg(long)]
    json: bool,
}

/// More seconds, and bytes, than anything that is simulated takes.
const LONGEST: f64 = 1e9;
const LARGEST: f64 = 1e18;
/// Fewer seconds than anything worth a character takes.
const SHORTEST: f64 = 1e-9;
/// More workers than any schedule is for.
const MOST_WORKERS: usize = 1 << 20;
/// More characters than anyone reads of a row.
const MOST_COLUMNS: usize = 100_000;

/// What is simulated.
struct Subject {
    shape: Shape,
    wiring: Wiring,
    costs: Costs,
    /// Samples of a micro-batch, where there is a model.
    samples: Option<usize>,
}

#[derive(serde::Serialize)]
struct Answer {
    /// Seconds, as all times.
    makespan: f64,
    bubble_fraction: f64,
    local_bubble: f64,
    /// In the steady state of an asynchronous schedule, else on average.
    seconds_per_micro_batch: f64,
    samples_per_s: Option<f64>,
    workers: Vec<WorkerAnswer>,
    events: Vec<EventAnswer>,
}

#[derive(serde::Serialize)]
struct WorkerAnswer {
    busy: f64,
    communication: f64,
    bubble_fraction: f64,
    peak_activations: usize,
}

#[derive(serde::Serialize)]
struct EventAnswer {
    worker: usize,
    instruction: String,
    start: f64,
    end: f64,
}

impl Answer {
    fn new(timeline: &Timeline, samples: Option<usize>) -> Answer {
        let worker = |w: &simulate::WorkerTime| WorkerAnswer {
            busy: w.busy,
            communication: w.communication,
            bubble_fraction: if timeline.makespan > 0.0 { 1.0 - w.busy / timeline.makespan } else { 0.0 },
            peak_activations: w.peak_activations,
        };
        let event = |e: &simulate::Event| EventAnswer {
            worker: e.worker,
            instruction: e.inst.to_string(),
            start: e.start,
            end: e.end,
        };
        Answer {
            makespan: timeline.makespan,
            bubble_fraction: timeline.bubble_fraction(),
            local_bubble: timeline.local_bubble(),
            seconds_per_micro_batch: timeline.seconds_per_micro_batch,
            samples_per_s: samples.map(|n| n as f64 / timeline.seconds_per_micro_batch),
            workers: timeline.workers.iter().map(worker).collect(),
            events: timeline.events.iter().map(event).collect(),
        }
    }

    /// In words.
    fn describe(&self) -> String {
        let percent = |fraction: f64| format!("{:.1} %", 100.0 * fraction);
        let speed = self.samples_per_s.map_or(String::new(), |s| format!(", {s:.1} samples/s"));
        let (makespan, pace) = (seconds(self.makespan), seconds(self.seconds_per_micro_batch));
        let bubble = percent(self.bubble_fraction);
        let mut text = format!("makespan {makespan}, bubble {bubble}, {pace} a micro-batch{speed}\n");
        for (rank, w) in self.workers.iter().enumerate() {
            text += &format!(
                "worker {rank}: busy {}, bubble {}, communication {}, at most {} micro-batches in flight\n",
                seconds(w.busy),
                percent(w.bubble_fraction),
                seconds(w.communication),
                w.peak_activations
            );
        }
        text
    }
}

/// A time in a unit that suits it.
fn seconds(t: f64) -> String {
    let (factor, unit) = match t {
        t if t >= 1.0 || t == 0.0 => (1.0, "s"),
        t if t >= 1e-3 => (1e3, "ms"),
        _ => (1e6, "µs"),
    };
    let number = format!("{:.3}", t * factor);
    format!("{} {unit}", number.trim_end_matches('0').trim_end_matches('.'))
}

pub(super) fn run(args: &Args) -> Result<()> {
    if !(1..=MOST_COLUMNS).contains(&args.columns) {
        return Err(Error::config(format!("columns: 1 to {MOST_COLUMNS} expected, got {}", args.columns)));
    }
    if let Some(cell) = args.cell.filter(|cell| !(SHORTEST..=LONGEST).contains(cell)) {
        return Err(Error::config(format!("cell: {SHORTEST:e} to {LONGEST:e} s expected, got {cell:e}")));
    }
    let subject = match &args.plan {
        Some(plan) => planned(args, plan)?,
        None => given(args)?,
    };
    let (programs, _) = prepare(args.kind, &subject.shape, &subject.wiring, args.micro_batches)?;
    let costs = Costs { cores: args.cores, ..subject.costs };
    let timeline = simulate(&programs, &subject.wiring, &costs)?;
    let answer = Answer::new(&timeline, subject.samples);
    if args.json {
        return print_json(&answer);
    }
    let mut text = answer.describe();
    let cell = args.cell.unwrap_or_else(|| timeline.shortest_pass());
    // Unless nothing takes any time.
    if cell > 0.0 {
        let (rows, cell) = (timeline.draw(cell, args.columns), seconds(cell));
        let legend = "0-9: forward, a-j: backward of micro-batch 0-9, mod 10; |: update";
        text += &format!("\n{rows}a character is {cell}; {legend}\n");
    }
    print(&text)
}

/// Stages as the command line says.
fn given(args: &Args) -> Result<Subject> {
    if args.workers > MOST_WORKERS {
        return Err(Error::config(format!("workers: at most {MOST_WORKERS} expected, got {}", args.workers)));
    }
    let wiring = match &args.replicas {
        None => Wiring::straight(args.workers),
        Some(text) => Wiring::replicated(&replicas(text)?),
    };
    let (stages, edges) = (wiring.stages.len(), wiring.edges.len());
    let seconds = |name, numbers: &[f64]| each(name, numbers, stages, LONGEST);
    let (forward, backward) = (seconds("forward", &args.forward)?, seconds("backward", &args.backward)?);
    let (update, bytes) = (seconds("update", &args.update)?, each("bytes", &args.bytes, edges, LARGEST)?);
    let link = link(args, Link { latency: 0.0, bandwidth: f64::INFINITY })?;
    let stage = |s: usize| StageCost {
        forward: forward[s],
        input_grad: backward[s] / 2.0,
        weight_grad: backward[s] / 2.0,
        step: update[s],
        ..StageCost::default()
    };
    let edge = |e: usize| {
        let seconds = bytes[e] / link.bandwidth;
        EdgeCost { forward: seconds, backward: seconds, latency: link.latency, ..EdgeCost::default() }
    };
    let costs =
        Costs { stages: (0..stages).map(stage).collect(), edges: (0..edges).map(edge).collect(), ..Costs::default() };
    Ok(Subject { shape: wiring.shape()?, wiring, costs, samples: None })
}

/// The stages of a plan, as a profile says.
fn planned(args: &Args, plan: &str) -> Result<Subject> {
    let (graph, profile) = args.profiled.load()?;
    let samples = args.profiled.micro_batch;
    let of_an_update = if args.kind.is_synchronous() { args.micro_batches } else { 1 };
    let nodes: Vec<NodeCost> = profile.at(samples)?.iter().map(|c| c.per_micro_batch(of_an_update)).collect();
    let link = link(args, Link { latency: 1e-6, bandwidth: 5e9 })?;
    let plan = match replicas_of_shape(plan) {
        Some(replicas) => plan_shape(&graph, &nodes, &|_, _| link, &replicas?, samples, DType::F32)?.plan,
        None => Plan::load(&graph, plan.as_ref())?,
    };
    let costs = predict::costs(&graph, &plan, &nodes, &|_, _| link, samples, of_an_update, [DType::F32; 2], None)?;
    // As each worker is on a core of its own.
    Ok(Subject { shape: plan.shape()?, wiring: plan.wiring(true), costs, samples: Some(samples) })
}

fn link(args: &Args, default: Link) -> Result<Link> {
    let latency = args.latency.unwrap_or(default.latency);
    let bandwidth = args.bandwidth.unwrap_or(default.bandwidth);
    if !((0.0..=LONGEST).contains(&latency) && bandwidth >= 1.0) {
        return Err(Error::config(format!("a link of {bandwidth} bytes/s and a latency of {latency} s cannot be")));
    }
    Ok(Link { latency, bandwidth })
}

/// One number for all, or one for each of `n`, none above `most`.
fn each(name: &str, numbers: &[f64], n: usize, most: f64) -> Result<Vec<f64>> {
    if let Some(wrong) = numbers.iter().find(|x| !(0.0..=most).contains(*x)) {
        return Err(Error::config(format!("{name}: 0 to {most:e} expected, got {wrong:e}")));
    }
    match numbers {
        [all] => Ok(vec![*all; n]),
        _ if numbers.len() == n => Ok(numbers.to_vec()),
        _ => Err(Error::config(format!("{name}: one number or {n} expected, got {}", numbers.len()))),
    }
}
