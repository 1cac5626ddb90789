//! `pipewright plan --workers`: plans with replicated stages.
use super::jointly;
use crate::{
    Context, Error, Result,
    cli::{print, print_json},
    layers::Graph,
    pipeline::{
        planner::{Judged, Limits, Part, Proposal, judge, plan_compat, plan_replicated, shape_of},
        profile::{CostGraph, NodeCost, Profile, Trimmed},
        topology::{Level, Link, Topology},
    },
};
use std::time::Instant;

#[derive(clap::Args)]
pub(super) struct Options {
    /// Plans as PipeDream's released partitioner does, faults and all
    #[arg(long)]
    compat: bool,
    /// Plans one worker a stage
    #[arg(long)]
    straight: bool,
    /// With --compat: activations move in no time
    #[arg(long, requires = "compat")]
    no_transfers: bool,
    /// Bytes that a worker may hold [default: no limit]
    #[arg(long, conflicts_with = "compat")]
    memory: Option<f64>,
    #[command(flatten)]
    pub(super) jointly: jointly::SpaceOptions,
}

impl Options {
    pub(super) fn refuse_without_workers(&self, args: &super::Args) -> Result<()> {
        if self.compat || self.straight || self.memory.is_some() {
            return Err(Error::config("--compat, --straight and --memory need --workers, such as --workers 4,4"));
        }
        self.jointly.refuse("--workers, such as --workers 4,4")?;
        if let Some(path) = &args.profiled.profile
            && is_published(&Error::read_text(path)?)
        {
            return Err(Error::config("a profile in the published text format needs --workers, such as --workers 4,4")
                .context(path.display().to_string()));
        }
        Ok(())
    }
}

#[derive(serde::Serialize)]
struct Answer {
    time_per_minibatch_s: f64,
    speedup_vs_single: f64,
    speedup_vs_data_parallel: f64,
    config: String,
    stages: Vec<StageAnswer>,
    warmup: Vec<usize>,
    memory_bytes: Vec<u64>,
    planning_s: f64,
    /// What was chosen beyond the stages, where it was.
    #[serde(flatten)]
    chosen: Option<jointly::Answer>,
}

#[derive(serde::Serialize)]
struct StageAnswer {
    nodes: Vec<String>,
    workers: Vec<usize>,
}

/// A plan as it is told.
pub(super) struct Found {
    pub(super) seconds: f64,
    pub(super) data_parallel_seconds: f64,
    pub(super) stages: Vec<Part>,
    pub(super) judged: Judged,
    /// The other plans, in words.
    pub(super) others: String,
    pub(super) chosen: Option<jointly::Answer>,
}

pub(super) fn run(args: &super::Args) -> Result<()> {
    let topology = topology(args)?;
    let source = Source::load(args)?;
    let whole = source.at(1)?;
    if whole.seconds() == 0.0 {
        return Err(Error::plan("every node takes 0 s; there is nothing to plan by"));
    }
    let start = Instant::now();
    let trimmed = whole.without_ends()?;
    let found = match args.replicated.jointly.is_asked_for() {
        true => jointly::plan(args, &source, &trimmed.graph, &topology)?,
        false => plan(args, &trimmed.graph, &topology)?,
    };
    let planning_s = start.elapsed().as_secs_f64();
    let single = trimmed.graph.seconds();
    let answer = Answer {
        time_per_minibatch_s: found.seconds,
        speedup_vs_single: ratio(single, found.seconds),
        speedup_vs_data_parallel: ratio(found.data_parallel_seconds, found.seconds),
        config: shape_of(&found.stages),
        stages: named(&whole, &trimmed, &found.stages),
        warmup: found.judged.warm_up.clone(),
        memory_bytes: memory(&topology, &found),
        planning_s,
        chosen: found.chosen.clone(),
    };
    if args.json {
        return print_json(&answer);
    }
    print(&describe(&answer, &found))
}

fn plan(args: &super::Args, graph: &CostGraph, topology: &Topology) -> Result<Found> {
    let options = &args.replicated;
    options.jointly.refuse("--schedule, such as --schedule auto")?;
    if !args.micro_batches.is_empty() {
        return Err(Error::config("--micro-batches with --workers needs --schedule, such as --schedule auto"));
    }
    if options.compat {
        if args.stages.is_some() {
            return Err(Error::config("--stages cannot be used with --compat"));
        }
        if !topology.is_even() {
            return Err(Error::config("--compat is for workers that are all alike"));
        }
        let found = plan_compat(graph, topology, options.straight, !options.no_transfers)?;
        return Ok(Found {
            seconds: found.seconds,
            data_parallel_seconds: found.data_parallel_seconds,
            judged: judge(graph, topology, &found.stages)?,
            stages: found.stages,
            others: String::new(),
            chosen: None,
        });
    }
    let limits = limits(args);
    let (best, others) = plan_replicated(graph, topology, &limits)?;
    Ok(Found {
        seconds: best.judged.seconds(),
        data_parallel_seconds: data_parallel_seconds(graph, topology)?,
        others: runners_up(&best, &others, topology, &limits),
        judged: best.judged,
        stages: best.stages,
        chosen: None,
    })
}

pub(super) fn limits(args: &super::Args) -> Limits {
    let options = &args.replicated;
    Limits { stages: args.stages, memory: options.memory, straight: options.straight }
}

/// Seconds a minibatch where each worker holds the whole model.
pub(super) fn data_parallel_seconds(graph: &CostGraph, topology: &Topology) -> Result<f64> {
    let all = Part { nodes: (0..graph.nodes().len()).collect(), workers: (0..topology.workers()).collect() };
    Ok(judge(graph, topology, &[all])?.seconds())
}

/// The other plans, and why they lost.
fn runners_up(best: &Proposal, others: &[Proposal], topology: &Topology, limits: &Limits) -> String {
    let mut text = format!("{}\n", best.judged.bottleneck());
    for other in others {
        let (shape, ms, why) = (other.shape(), 1e3 * other.judged.seconds(), other.lost_to(best, topology, limits));
        text += &format!("not {shape} ({}), {ms:.3} ms: {why}\n", other.name);
    }
    text
}

/// The workers and links that the arguments tell.
fn topology(args: &super::Args) -> Result<Topology> {
    if let Some(path) = &args.topology {
        return Topology::load(path);
    }
    let counts = &args.workers;
    let per_level = |name: &str, given: &[f64]| {
        if given.len() == counts.len() {
            return Ok(given.to_vec());
        }
        let (levels, got) = (counts.len(), given.len());
        Err(Error::config(format!("{name}: a number for each of the {levels} levels of --workers expected, got {got}")))
    };
    let bandwidth = per_level("bandwidth", &args.bandwidth)?;
    let none = vec![0.0; counts.len()];
    let latency = per_level("latency", if args.latency.is_empty() { &none } else { &args.latency })?;
    let level = |((&count, bandwidth), latency)| Level { count, link: Link { latency, bandwidth } };
    Topology::new(counts.iter().zip(bandwidth).zip(latency).map(level).collect())
}

/// What is planned: a model, with its profile measured here or saved, or the published text format.
pub(super) enum Source {
    Published(CostGraph),
    /// With the samples of a minibatch.
    Model(Graph, Profile, usize),
}

impl Source {
    /// What a micro-batch costs where a minibatch is cut into so many.
    pub(super) fn at(&self, micro_batches: usize) -> Result<CostGraph> {
        match self {
            Source::Published(graph) => Ok(graph.in_micro_batches(micro_batches)),
            Source::Model(graph, profile, size) => {
                let costs = profile.at(size.div_ceil(micro_batches))?;
                let costs: Vec<NodeCost> = costs.iter().map(|c| c.per_micro_batch(micro_batches)).collect();
                CostGraph::of_model(graph, &costs)
            }
        }
    }

    /// The most micro-batches that a minibatch can be cut into.
    pub(super) fn most_micro_batches(&self) -> usize {
        match self {
            Source::Published(_) => usize::MAX,
            Source::Model(_, _, size) => *size,
        }
    }

    fn load(args: &super::Args) -> Result<Source> {
        if let Some(path) = &args.profiled.profile {
            let text = Error::read_text(path)?;
            if !text.trim_start().starts_with('{') {
                return CostGraph::from_published(&text).map(Source::Published).context(|| path.display().to_string());
            }
        }
        let (graph, profile) = args.profiled.load()?;
        if let Some(path) = &args.save_profile {
            profile.save(path)?;
        }
        Ok(Source::Model(graph, profile, args.profiled.micro_batch))
    }
}

/// Whether a file is a published profile: our own are JSON.
fn is_published(text: &str) -> bool {
    !text.trim_start().starts_with('{') && text.contains(" -- ")
}

/// How many times longer a takes than b.
fn ratio(a: f64, b: f64) -> f64 {
    if a == b { 1.0 } else { a / b }
}

/// The stages by name, what was left out of planning with them.
fn named(whole: &CostGraph, trimmed: &Trimmed, stages: &[Part]) -> Vec<StageAnswer> {
    let mut nodes: Vec<Vec<usize>> = stages.iter().map(|s| s.nodes.iter().map(|&n| trimmed.was[n]).collect()).collect();
    for &(n, maker) in &trimmed.left_out {
        let stage = maker.and_then(|m| stages.iter().position(|s| s.nodes.contains(&m))).unwrap_or(0);
        nodes[stage].push(n);
    }
    let rank = |n: &usize| whole.order().iter().position(|o| o == n);
    nodes.iter_mut().for_each(|nodes| nodes.sort_by_cached_key(rank));
    let name = |n: &usize| whole.nodes()[*n].name.clone();
    let stage = |(nodes, part): (&Vec<usize>, &Part)| StageAnswer {
        nodes: nodes.iter().map(name).collect(),
        workers: part.workers.clone(),
    };
    nodes.iter().zip(stages).map(stage).collect()
}

/// Bytes that each worker holds: none one that has no stage.
fn memory(topology: &Topology, found: &Found) -> Vec<u64> {
    let mut bytes = vec![0; topology.workers()];
    for (stage, &held) in found.stages.iter().zip(&found.judged.memory) {
        stage.workers.iter().for_each(|&w| bytes[w] = held.ceil() as u64);
    }
    bytes
}

/// In words: a table of the stages.
fn describe(answer: &Answer, found: &Found) -> String {
    let ms = |seconds: f64| format!("{:.3}", 1e3 * seconds);
    let schedule = answer.chosen.as_ref().map_or(String::new(), |c| format!(" under {}", c.mode()));
    let mut text = format!(
        "{}{schedule}: {} ms a minibatch, {:.2} times one worker, {:.2} times data parallelism; planned in {} ms\n\n\
         {:>5} {:>8} {:>7} {:>12} {:>12} {:>12} {:>10}  nodes, workers\n",
        answer.config,
        ms(answer.time_per_minibatch_s),
        answer.speedup_vs_single,
        answer.speedup_vs_data_parallel,
        ms(answer.planning_s),
        "stage",
        "replicas",
        "warm-up",
        "ms",
        "all-reduce",
        "edge ms",
        "MB/worker"
    );
    let judged = &found.judged;
    for (s, stage) in answer.stages.iter().enumerate() {
        let (first, last) = (stage.nodes.first(), stage.nodes.last());
        let edge = judged.edge_seconds.get(s).map_or("-".to_string(), |&t| ms(t));
        text += &format!(
            "{s:>5} {:>8} {:>7} {:>12} {:>12} {edge:>12} {:>10.1}  {} to {} ({}), {}\n",
            stage.workers.len(),
            answer.warmup[s],
            ms(judged.stage_seconds[s]),
            ms(judged.sync_seconds[s]),
            judged.memory[s] / 1e6,
            first.map_or("", |n| n),
            last.map_or("", |n| n),
            stage.nodes.len(),
            ranges(&stage.workers)
        );
    }
    text + "\n" + &found.others
}

/// Numbers in ascending order, neighbours as ranges.
fn ranges(numbers: &[usize]) -> String {
    let mut runs: Vec<[usize; 2]> = Vec::new();
    for &n in numbers {
        match runs.last_mut() {
            Some(run) if run[1] + 1 == n => run[1] = n,
            _ => runs.push([n, n]),
        }
    }
    let run = |[a, b]: &[usize; 2]| if a == b { a.to_string() } else { format!("{a}-{b}") };
    runs.iter().map(run).collect::<Vec<_>>().join(",")
}
