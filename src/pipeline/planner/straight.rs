//! The best straight partition: stages of neighbouring layers, one worker each.
use crate::{
    Error, Result,
    layers::{Graph, NodeId, Value},
    pipeline::{
        plan::{Edge, Plan},
        profile::NodeCost,
        schedule::Wiring,
        topology::Link,
    },
    tensor::DType,
};

/// A plan and what it was chosen for.
#[derive(Clone, Debug)]
pub struct Planned {
    /// The plan.
    pub plan: Plan,
    /// Seconds of each stage for a micro-batch: F, B and its part of the update, over its workers, and its part of the sum of their
    /// gradients.
    pub stage_seconds: Vec<f64>,
    /// Seconds that crossing each cut takes for a micro-batch, there and back.
    pub cut_seconds: Vec<f64>,
    /// Seconds that the messages of each edge of the plan take for a micro-batch: forward, backward.
    pub edge_seconds: Vec<[f64; 2]>,
}

impl Planned {
    /// Seconds per micro-batch in steady state: the slowest stage or cut.
    pub fn bottleneck(&self) -> f64 {
        self.stage_seconds.iter().chain(&self.cut_seconds).copied().fold(0.0, f64::max)
    }
}

/// A place between two neighbouring layers.
#[derive(Clone, Copy)]
struct Cut {
    /// Bytes that cross it: there, back.
    bytes: [usize; 2],
    /// Whether nodes with shared parameters stay together.
    allowed: bool,
}

/// Cuts the graph into `stages` stages so that the slowest stage or cut is as fast as can be. Of equal plans it takes the one that
/// moves fewer bytes, then the more even one (by the sum of the squares of the stages' times), then later cuts.
///
/// A value that is read some stages later counts at every cut that it passes. `costs` are those of the micro-batch of `samples`
/// samples that will run, with its part of an update ([`NodeCost::per_micro_batch`]).
///
/// # Errors
/// If there are more stages than layers, only cuts that would separate nodes with shared parameters, or a cost or the link is not
/// a time that can be.
pub fn plan_straight(
    graph: &Graph,
    costs: &[NodeCost],
    link: Link,
    stages: usize,
    samples: usize,
    dtype: DType,
) -> Result<Planned> {
    plan_shape(graph, costs, &|_, _| link, &one_each(graph, stages)?, samples, dtype)
}

/// The same with so many workers for each stage, which share its micro-batches and sum their gradients once for as many of them as
/// they are. Workers are numbered in the order of the stages, and `link` gives the link between two of them: a cut is crossed over the
/// slowest link between workers of its two stages.
///
/// # Errors
/// As [`plan_straight`] says, or if a stage has no worker.
pub fn plan_shape(
    graph: &Graph,
    costs: &[NodeCost],
    link: &dyn Fn(usize, usize) -> Link,
    replicas: &[usize],
    samples: usize,
    dtype: DType,
) -> Result<Planned> {
    if let Some(stage) = replicas.iter().position(|&n| n == 0) {
        return Err(Error::plan(format!("stage {stage} has no worker")));
    }
    if costs.len() != graph.nodes().len() {
        return Err(Error::plan(format!("costs of {} nodes for a model of {}", costs.len(), graph.nodes().len())));
    }
    if let Some(c) = costs.iter().find(|c| !(c.seconds().is_finite() && c.seconds() >= 0.0)) {
        return Err(Error::plan(format!("node {:?} takes {} s; 0 or more expected", c.node, c.seconds())));
    }
    let stages = Wiring::replicated(replicas).stages;
    let between = |from: usize, to: usize| {
        let pairs = stages[from].iter().flat_map(|&a| stages[to].iter().map(move |&b| (a, b))).filter(|(a, b)| a != b);
        pairs.map(|(a, b)| link(a, b)).try_fold(Link::FREE, |slowest, link| link.check().map(|()| slowest.and(link)))
    };
    let within = (0..stages.len()).map(|s| between(s, s)).collect::<Result<Vec<Link>>>()?;
    let before = (0..stages.len()).map(|s| between(s.saturating_sub(1), s)).collect::<Result<Vec<Link>>>()?;
    let layers = graph.layers().collect::<Vec<_>>();
    let crossing = crossing_bytes(graph, &layers, samples, dtype);
    let cut = |(&bytes, allowed): (&[usize; 2], bool)| Cut { bytes, allowed };
    let cuts: Vec<Cut> = crossing.iter().zip(allowed_cuts(graph, &layers)).map(cut).collect();
    let seconds = sums(layers.iter().map(|&l| costs[l].seconds()));
    let bytes = sums(layers.iter().map(|&l| costs[l].param_bytes as f64));
    let times = Times { seconds: &seconds, bytes: &bytes, within: &within, before: &before, replicas };
    let chosen = best_cuts(&times, &cuts)?;
    let plan = Plan::replicated(graph, &chosen.iter().map(|&c| layers[c]).collect::<Vec<_>>(), replicas)?;
    let bounds: Vec<usize> = [0].into_iter().chain(chosen.iter().copied()).chain([layers.len()]).collect();
    let edge = |e: &Edge| {
        let link = between(e.from, e.to)?;
        let [forward, backward] = plan.message_bytes(graph, e, samples, [dtype; 2]);
        Ok([link.seconds(forward), if backward > 0 { link.seconds(backward) } else { 0.0 }])
    };
    Ok(Planned {
        stage_seconds: bounds.windows(2).enumerate().map(|(s, b)| times.of(s, b[0], b[1])).collect(),
        cut_seconds: chosen.iter().enumerate().map(|(s, &c)| times.crossing(s + 1, cuts[c])).collect(),
        edge_seconds: plan.edges().iter().map(edge).collect::<Result<_>>()?,
        plan,
    })
}

impl Plan {
    /// A straight plan whose stages have as equal numbers of layers as shared parameters allow.
    ///
    /// # Errors
    /// As [`plan_straight`] says.
    pub fn even(graph: &Graph, stages: usize) -> Result<Plan> {
        let layers = graph.layers().collect::<Vec<_>>();
        let cut = |allowed| Cut { bytes: [0, 0], allowed };
        let cuts: Vec<Cut> = allowed_cuts(graph, &layers).into_iter().map(cut).collect();
        let (seconds, bytes) = (sums(layers.iter().map(|_| 1.0)), vec![0.0; layers.len() + 1]);
        let replicas = one_each(graph, stages)?;
        let links = vec![Link::FREE; stages];
        let times = Times { seconds: &seconds, bytes: &bytes, within: &links, before: &links, replicas: &replicas };
        let chosen = best_cuts(&times, &cuts)?;
        Plan::straight(graph, &chosen.iter().map(|&c| layers[c]).collect::<Vec<_>>())
    }
}

/// The workers of each stage that a shape such as `2-1-1` asks for, joined by dashes. Nothing if `text` is no shape but, say, the
/// name of a file.
///
/// # Errors
/// If a stage has no worker, or more than can be counted.
pub fn replicas_of_shape(text: &str) -> Option<Result<Vec<usize>>> {
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    if !text.split('-').all(is_number) {
        return None;
    }
    let workers = |(s, part): (usize, &str)| match part.parse::<usize>() {
        Ok(0) => Err(Error::plan(format!("plan {text:?}: stage {s} has no worker"))),
        Ok(n) if n <= MOST_WORKERS => Ok(n),
        _ => Err(Error::plan(format!("plan {text:?}: stage {s} has {part} workers, at most {MOST_WORKERS} expected"))),
    };
    Some(text.split('-').enumerate().map(workers).collect())
}

/// More workers than any stage has.
const MOST_WORKERS: usize = 1 << 16;

/// Whether so many layers make up so many stages.
fn check_stages(layers: usize, stages: usize) -> Result<()> {
    if (1..=layers).contains(&stages) {
        return Ok(());
    }
    let n = layers;
    Err(Error::plan(format!("{stages} stages asked for, the model has {n} layers; 1 to {n} are possible")))
}

/// One worker for each of so many stages.
fn one_each(graph: &Graph, stages: usize) -> Result<Vec<usize>> {
    check_stages(graph.layers().count(), stages)?;
    Ok(vec![1; stages])
}

/// What stages take.
struct Times<'a> {
    /// Seconds of the first j layers on one worker.
    seconds: &'a [f64],
    /// Bytes of their parameters.
    bytes: &'a [f64],
    /// The slowest link among the workers of each stage,
    within: &'a [Link],
    /// and between them and those of the stage before.
    before: &'a [Link],
    /// The workers of each stage.
    replicas: &'a [usize],
}

impl Times<'_> {
    /// Seconds for a micro-batch of stage `s` that consists of layers i to j − 1: the workers share the compute, and once for as
    /// many micro-batches as they are they move 2(R−1)/R of the gradients.
    fn of(&self, s: usize, i: usize, j: usize) -> f64 {
        let compute = self.seconds[j] - self.seconds[i];
        match self.replicas[s] {
            1 => compute,
            r => {
                let (r, bytes) = (r as f64, self.bytes[j] - self.bytes[i]);
                (compute + 2.0 * (r - 1.0) / r * bytes / self.within[s].bandwidth) / r
            }
        }
    }

    /// Seconds that it takes to cross a cut to stage `s`, there and back.
    fn crossing(&self, s: usize, cut: Cut) -> f64 {
        let ([forward, backward], link) = (cut.bytes, self.before[s]);
        link.seconds(forward) + if backward > 0 { link.seconds(backward) } else { 0.0 }
    }
}

/// The sums of the first 0, 1, … numbers.
fn sums(numbers: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut until = vec![0.0];
    let mut sum = 0.0;
    until.extend(numbers.map(|x| {
        sum += x;
        sum
    }));
    until
}

/// The cuts of the best plan: `cuts[j]` lies before layer j.
///
/// The smallest limit that some plan keeps is found by bisection over the numbers there are (non-negative floating-point
/// numbers are ordered as their bits), each step O(stages · layers); then the best plan within it by dynamic programming.
fn best_cuts(times: &Times, cuts: &[Cut]) -> Result<Vec<usize>> {
    let (n, stages) = (times.seconds.len() - 1, times.replicas.len());
    check_stages(n, stages)?;
    let longest = (0..stages).map(|s| times.of(s, 0, n)).fold(0.0, f64::max);
    let crossings = (1..stages).flat_map(|s| cuts.iter().map(move |&c| times.crossing(s, c)));
    let loosest = crossings.fold(longest, f64::max);
    let (mut low, mut high) = (0, loosest.to_bits());
    while low < high {
        let middle = low + (high - low) / 2;
        if is_feasible(times, cuts, f64::from_bits(middle)) { high = middle } else { low = middle + 1 }
    }
    cheapest_within(times, cuts, f64::from_bits(high))
        .ok_or_else(|| Error::plan(format!("no {stages} stages: layers that share parameters must stay together")))
}

/// Whether there is a plan whose stages and cuts all take at most `limit`.
fn is_feasible(times: &Times, cuts: &[Cut], limit: f64) -> bool {
    let n = times.seconds.len() - 1;
    // Whether the first j layers make up the stages so far.
    let mut reached: Vec<bool> = (0..=n).map(|j| j > 0 && times.of(0, 0, j) <= limit).collect();
    for s in 1..times.replicas.len() {
        // How many of the first i places a stage can begin at.
        let mut starts = vec![0; n + 2];
        for i in 0..=n {
            let start = reached[i] && cuts[i].allowed && times.crossing(s, cuts[i]) <= limit;
            starts[i + 1] = starts[i] + usize::from(start);
        }
        let mut first = 0;
        for j in 0..=n {
            while times.of(s, first, j) > limit {
                first += 1;
            }
            reached[j] = starts[j] > starts[first];
        }
    }
    reached[n]
}

/// Of the plans whose stages and cuts all take at most `limit` the one that moves the fewest bytes, then the most even one.
fn cheapest_within(times: &Times, cuts: &[Cut], limit: f64) -> Option<Vec<usize>> {
    let n = times.seconds.len() - 1;
    /// The first j layers in some number of stages: bytes moved, squares of the stages' times, where the last stage begins.
    type Best = Option<(usize, f64, usize)>;
    let first = |j: usize| {
        let time = times.of(0, 0, j);
        (j > 0 && time <= limit).then_some((0, time * time, 0))
    };
    let mut rows: Vec<Vec<Best>> = vec![(0..=n).map(first).collect()];
    for s in 1..times.replicas.len() {
        let row = |j: usize| {
            let mut found: Best = None;
            for i in (s..j).rev() {
                let time = times.of(s, i, j);
                if time > limit {
                    break;
                }
                let (Some((bytes, squares, _)), cut) = (rows[s - 1][i], cuts[i]) else { continue };
                if !cut.allowed || times.crossing(s, cut) > limit {
                    continue;
                }
                let (bytes, squares) = (bytes + cut.bytes[0] + cut.bytes[1], squares + time * time);
                if found.is_none_or(|(b, q, _)| bytes < b || bytes == b && squares < q) {
                    found = Some((bytes, squares, i));
                }
            }
            found
        };
        let row = (0..=n).map(row).collect();
        rows.push(row);
    }
    let (mut chosen, mut j) = (Vec::new(), n);
    for row in rows.iter().rev() {
        j = row[j]?.2;
        chosen.push(j);
    }
    // The first stage begins at 0, which is no cut.
    chosen.pop();
    chosen.reverse();
    Some(chosen)
}

/// For a cut before each layer: bytes of the values made before it that are read after it, and of their gradients.
fn crossing_bytes(graph: &Graph, layers: &[NodeId], samples: usize, dtype: DType) -> Vec<[usize; 2]> {
    let place = |node: NodeId| layers.partition_point(|&l| l < node);
    // Differences along the cuts, summed up at the end.
    let mut change = vec![[0isize; 2]; layers.len() + 2];
    for node in 0..graph.nodes().len() {
        for output in 0..graph.output_count(node) {
            let v = Value { node, output };
            let Some(&last) = graph.consumers(v).last() else { continue };
            // An input is there from the first cut on.
            let from = if graph.is_layer(node) { place(node) + 1 } else { 1 };
            let to = place(last) + 1;
            let (d, shape) = graph.shape(v, samples, dtype);
            let bytes = (shape.iter().product::<usize>() * d.size()) as isize;
            if from < to {
                let both = [bytes, if graph.needs_grad(v) { bytes } else { 0 }];
                for i in 0..2 {
                    change[from][i] += both[i];
                    change[to][i] -= both[i];
                }
            }
        }
    }
    let mut sum = [0isize; 2];
    let mut crossing = Vec::new();
    for c in change.iter().take(layers.len() + 1) {
        sum = [sum[0] + c[0], sum[1] + c[1]];
        crossing.push(sum.map(|b| b as usize));
    }
    crossing
}

/// Which cuts leave nodes with shared parameters together.
pub(in crate::pipeline) fn allowed_cuts(graph: &Graph, layers: &[NodeId]) -> Vec<bool> {
    // For each parameter the first and the last layer that uses it.
    let mut users: Vec<Option<[usize; 2]>> = vec![None; graph.params().len()];
    for (at, &l) in layers.iter().enumerate() {
        for &p in &graph.nodes()[l].params {
            users[p].get_or_insert([at, at])[1] = at;
        }
    }
    // How many parameters each cut would tear apart, as differences along the cuts.
    let mut change = vec![0isize; layers.len() + 1];
    for [first, last] in users.into_iter().flatten().filter(|[a, b]| a < b) {
        change[first + 1] += 1;
        change[last + 1] -= 1;
    }
    let mut torn = 0;
    let allowed = |c: &isize| {
        torn += c;
        torn == 0
    };
    change.iter().map(allowed).collect()
}
