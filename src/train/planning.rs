//! From a model and the ranks at hand to a plan and a prediction.
use super::{
    crowding::crowding,
    gather::gather,
    settings::{PlanChoice, Recipe, Settings},
    split::Split,
};
use crate::{
    Error, Result,
    hex::hex,
    layers::{Graph, NodeId, NodeKind},
    pipeline::{
        handling,
        plan::{Edge, Plan},
        planner::{self, Link, Mode, Space},
        predict,
        profile::{CostGraph, NodeCost, Profile},
        ranks::Ranks,
        schedule::{Kind, simulate::Costs},
        transport::{Transport, launcher, measure_links},
    },
    tensor::{DType, Device, Isa},
};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;

/// What was planned, and from what.
#[derive(Clone, Debug)]
pub struct Planning {
    /// The plan.
    pub plan: Plan,
    /// Seconds of F, B and a part of the update of each stage for a micro-batch, by the profile.
    pub stage_seconds: Vec<f64>,
    /// Samples per second that they promise.
    pub samples_per_s: f64,
    /// The profile.
    pub profile: Profile,
    /// Whether it and the links were measured; if not, only ratios of times tell something.
    pub is_measured: bool,
    /// The ranks that it is for.
    pub ranks: Ranks,
    costs: Costs,
    micro_batches: usize,
}

impl Planning {
    /// Seconds of a run that trains on so many minibatches at a stretch, from an empty pipeline to an empty one each, and where the
    /// time of each worker goes.
    ///
    /// # Errors
    /// If the schedule cannot be made for the plan.
    pub fn predict(&self, kind: Kind, stretches: &[u64]) -> Result<(f64, Vec<Split>)> {
        let (mut seconds, mut splits) = (0.0, vec![Split::default(); self.plan.workers()]);
        let mut by_length = BTreeMap::<u64, f64>::new();
        stretches.iter().filter(|n| **n > 0).for_each(|&n| *by_length.entry(n).or_default() += 1.0);
        for (n, times) in by_length {
            let (takes, workers) =
                predict::run_of(kind, &self.plan, &self.costs, self.micro_batches, self.profile.crowding, n)?;
            seconds += times * takes;
            for (split, worker) in splits.iter_mut().zip(&workers) {
                *split = split.plus(times, Split::predicted(worker));
            }
        }
        Ok((seconds, splits))
    }
}

/// The link assumed where nothing may be measured: shared memory.
const ASSUMED: Link = Link { latency: 1e-6, bandwidth: 5e9 };

/// Makes the plan that the settings ask for; the same on every rank.
pub fn make(recipe: &Recipe, device: &Device, transport: &mut dyn Transport) -> Result<Planning> {
    let (graph, s) = (&*recipe.graph, &recipe.settings);
    let size = s.micro_batch();
    let sizes = Profile::sizes(graph, s.dtype, size);
    let workers = transport.size();
    let mut shares = false;
    let (profile, links) = if s.deterministic {
        (Profile::estimate(graph, &*recipe.optimizer, s.dtype, &sizes)?, None)
    } else {
        let crowding = crowding(transport, s.threads)?;
        // Where each worker has a core to spare its messages are handled there.
        shares = crowding > 0.5;
        let crowding = crowding.max(1.0);
        let mut together = || transport.all_gather(&[]).map(|_| ());
        let mine = Profile::measure(graph, &*recipe.optimizer, device, s.dtype, &sizes, crowding, &mut together)?;
        (Profile::merge(&gather(transport, &mine)?)?, Some(measure_links(transport)?))
    };
    device.pool().trim();
    let micro_batches = s.batch.div_ceil(size);
    let costs = sent(graph, profile.at(size)?, s).into_iter().map(|c| c.per_micro_batch(micro_batches));
    let costs: Vec<NodeCost> = costs.collect();
    let ranks = match &links {
        Some(links) => Ranks::measured(transport.hosts(), &|a, b| links.between(a, b), links.together()),
        None => Ranks::alike(transport.hosts(), ASSUMED),
    };
    let cut = |replicas: &[usize]| shaped(graph, &costs, &ranks, replicas, size, s.wire());
    let plan = match &s.plan {
        PlanChoice::Auto | PlanChoice::Best if s.asp => cut(&[workers])?,
        PlanChoice::Auto => cut(&vec![1; workers])?,
        PlanChoice::Cuts(names) => {
            let find = |name: &String| {
                graph.find(name).ok_or_else(|| Error::plan(format!("there is no node {name:?} to cut before")))
            };
            ranks.place(Plan::straight(graph, &names.iter().map(find).collect::<Result<Vec<NodeId>>>()?)?)?
        }
        PlanChoice::File(path) => Plan::load(graph, path)?,
        PlanChoice::Given(plan) => ranks.place(plan.clone().renumbered()?)?,
        PlanChoice::Best => {
            let mode = Mode { schedule: s.schedule, micro_batches };
            best(graph, &costs, &ranks, mode, profile.crowding)?
        }
        PlanChoice::Replicas(replicas) => cut(replicas)?,
    };
    let stage = |nodes: &[NodeId]| nodes.iter().map(|&n| costs[n].seconds()).sum::<f64>();
    let stage_seconds: Vec<f64> = plan.stages().iter().map(|s| stage(&s.nodes)).collect();
    let link = |a, b| links.as_ref().and_then(|l| l.between(a, b)).unwrap_or(ASSUMED);
    let types = [s.dtype, s.wire()];
    let [sums, handling] = handled(recipe, &plan, &link, shares, device, transport)?;
    let mut costs = predict::costs(graph, &plan, &costs, &link, size, micro_batches, types, sums.as_deref())?;
    for (cost, handling) in costs.edges.iter_mut().zip(handling.into_iter().flatten()) {
        cost.handling = handling;
    }
    if s.asp {
        // Gradients and answers travel beside the next forward pass too.
        costs.stages.iter_mut().for_each(|stage| stage.reduce = (stage.reduce - stage.forward).max(0.0));
    }
    let plan = match s.plan {
        PlanChoice::Auto | PlanChoice::Best | PlanChoice::Replicas(_) => {
            predict::warmed_up(s.schedule, plan, &costs, micro_batches, profile.crowding)?
        }
        _ => plan,
    };
    let seconds = predict::seconds_per_minibatch(s.schedule, &plan, &costs, micro_batches, profile.crowding)?;
    let samples_per_s = s.batch as f64 / seconds;
    let is_measured = !s.deterministic;
    Ok(Planning { plan, stage_seconds, samples_per_s, profile, is_measured, ranks, costs, micro_batches })
}

/// Seconds of a core for a sum of the gradients of each stage, and, if communication threads `share` cores with workers, for a message of
/// each edge: what of them is measured.
fn handled(
    recipe: &Recipe,
    plan: &Plan,
    link: &dyn Fn(usize, usize) -> Link,
    share: bool,
    device: &Device,
    transport: &mut dyn Transport,
) -> Result<[Option<Vec<f64>>; 2]> {
    let (graph, s) = (&*recipe.graph, &recipe.settings);
    // One for other workers is refused later, when it is to be run.
    if plan.workers() != transport.size() {
        return Ok([None, None]);
    }
    let mut sums = None;
    if !s.deterministic && !s.asp {
        let setup = recipe.setup(transport.hosts().to_vec());
        sums = Some(handling::of_sums(&setup, plan, link, share, transport, device)?);
    }
    let message = |edge: &Edge| {
        let ends = [edge.from, edge.to].map(|stage| plan.stages()[stage].workers[0]);
        let bytes = plan.message_bytes(graph, edge, s.micro_batch(), [s.dtype, s.wire()]);
        if ends[0] == ends[1] { Ok(0.0) } else { handling::of_messages(transport, ends, bytes) }
    };
    let handling = share.then(|| plan.edges().iter().map(message).collect::<Result<Vec<f64>>>()).transpose()?;
    device.pool().trim();
    tracing::info!(
        ?sums,
        ?handling,
        "seconds of a core for a sum of each stage's gradients, and for a message of each edge"
    );
    Ok([sums, handling])
}

/// The costs with the bytes of gradients that workers of a stage really send each other.
fn sent(graph: &Graph, mut costs: Vec<NodeCost>, s: &Settings) -> Vec<NodeCost> {
    let size = s.compress_gradients.wire(s.dtype).size();
    for (cost, node) in costs.iter_mut().zip(graph.nodes()).filter(|(cost, _)| cost.param_bytes > 0) {
        let shapes = node.params.iter().map(|&p| &graph.params()[p].spec).filter(|spec| spec.trainable);
        cost.param_bytes = shapes.map(|spec| s.compress_gradients.elements(&spec.shape) * size).sum();
    }
    costs
}

/// The best plan of stages of so many workers each, in ranks: over the order of hosts that promises most, where it matters, and of
/// equal ones that which keeps most neighbours together.
fn shaped(
    graph: &Graph,
    costs: &[NodeCost],
    ranks: &Ranks,
    replicas: &[usize],
    samples: usize,
    wire: DType,
) -> Result<Plan> {
    let mut best: Option<((f64, usize), Plan)> = None;
    for order in ranks.orders() {
        let planned = planner::plan_shape(graph, costs, &|a, b| order.link(a, b), replicas, samples, wire)?;
        if planned.plan.workers() != ranks.count() {
            // What that is told.
            return Ok(planned.plan);
        }
        let worth = (planned.bottleneck(), order.torn(&planned.plan));
        if best.as_ref().is_none_or(|(b, _)| worth < *b) {
            best = Some((worth, order.place(planned.plan)?));
        }
    }
    best.map(|(_, plan)| plan).ok_or_else(|| Error::plan("a plan for no workers"))
}

/// The best plan on all ranks under a schedule, by the simulator.
fn best(graph: &Graph, costs: &[NodeCost], ranks: &Ranks, mode: Mode, crowding: f64) -> Result<Plan> {
    let workers = ranks.count();
    if workers == 1 {
        return Plan::straight(graph, &[]);
    }
    let costs = CostGraph::of_model(graph, costs)?;
    // A plan that leaves workers without work may be as fast, but they are there.
    let space = Space { workers: Some(workers), crowding, ..Space::of(vec![mode]) };
    let (best, _) = planner::plan_jointly(&|_| Ok(costs.clone()), &ranks.topology()?, &space)?;
    ranks.place(best.plan(graph)?)
}

/// A hash of what a model consists of: its nodes, their settings as far as shapes show them, and its parameters.
pub(super) fn fingerprint(graph: &Graph) -> String {
    let mut hash = Sha256::new();
    for n in graph.nodes() {
        let kind = match &n.kind {
            NodeKind::Layer(layer) => layer.kind(),
            _ => "",
        };
        hash.update(format!("{} {kind} {:?} {:?}\n", n.name, n.inputs, n.params));
    }
    for p in graph.params() {
        hash.update(format!("{} {:?}\n", p.name, p.spec));
    }
    hex(&hash.finalize())
}

/// Makes sure that all ranks run the same program on the same task.
///
/// # Errors
/// On every rank, naming one that differs from rank 0 and in what.
pub fn agree(recipe: &Recipe, task: &str, transport: &mut dyn Transport) -> Result<()> {
    // Threads of one process cannot differ in it; it is read only where ranks could.
    let exe = launcher::detect().and_then(|_| std::env::current_exe().and_then(std::fs::read).ok());
    let exe = exe.map(|bytes| hex(&Sha256::digest(bytes)));
    let mine = [
        ("the program", exe.unwrap_or_default()),
        ("the model", fingerprint(&recipe.graph)),
        ("the optimizer", recipe.optimizer.describe()),
        ("the settings", format!("{:?} {task}", recipe.settings)),
    ];
    let all = gather(transport, &mine.iter().map(|(_, v)| v.clone()).collect::<Vec<_>>())?;
    for (rank, theirs) in all.iter().enumerate() {
        for (i, (what, _)) in mine.iter().enumerate() {
            if theirs.get(i) != all[0].get(i) {
                return Err(Error::config(format!(
                    "rank {rank} and rank 0 do not agree on {what}; all ranks must be started alike"
                )));
            }
        }
    }
    Ok(())
}

/// What a worker says of its instruction set: the one it chose, and whether it was told to.
type Choice = (Isa, bool);

/// The instruction set that all workers compute with, so that their numbers are those of any other number of workers: the lowest
/// of what they chose, or, to go on from a run, the one `recorded` of it; if it may be `any`, a lower one where one was chosen.
///
/// # Errors
/// On every worker alike, if one of them lacks the recorded set or was told to use another.
pub fn instructions(recorded: Option<&str>, any: bool, transport: &mut dyn Transport) -> Result<Isa> {
    let all: Vec<(String, bool)> = gather(transport, &(Isa::chosen()?.name().to_string(), Isa::demanded()?.is_some()))?;
    let all = all.iter().map(|(name, told)| Ok((isa_called(name)?, *told))).collect::<Result<Vec<_>>>()?;
    settle(&all, recorded.map(isa_called).transpose()?, any)
}

fn isa_called(name: &str) -> Result<Isa> {
    let found = Isa::ALL.into_iter().find(|i| i.name() == name);
    found.ok_or_else(|| {
        Error::config(format!("instructions {name:?}: one of {} expected", Isa::ALL.map(Isa::name).join(", ")))
    })
}

fn settle(all: &[Choice], recorded: Option<Isa>, any: bool) -> Result<Isa> {
    let lowest = all.iter().map(|(isa, _)| *isa).min().unwrap_or(Isa::Portable);
    let Some(recorded) = recorded else { return Ok(lowest) };
    if any {
        return Ok(lowest.min(recorded));
    }
    for (rank, &(isa, told)) in all.iter().enumerate() {
        let why = match told {
            true if isa != recorded => format!("rank {rank} was told to use {isa} by PIPEWRIGHT_ISA"),
            false if isa < recorded => format!("the machine of rank {rank} has no more than {isa}"),
            _ => continue,
        };
        return Err(Error::config(format!(
            "the run to go on from computed with {recorded} instructions, but {why}, which gives other bits"
        )));
    }
    Ok(recorded)
}

/// The stages and their times in words.
pub fn describe(recipe: &Recipe, planned: &Planning) -> String {
    let name = |n: &NodeId| recipe.graph.nodes()[*n].name.as_str();
    let mut text = String::new();
    for (s, stage) in planned.plan.stages().iter().enumerate() {
        let layers: Vec<&str> =
            stage.nodes.iter().filter(|n| !recipe.graph.nodes()[**n].params.is_empty()).map(name).collect();
        let ms = planned.stage_seconds[s] * 1e3;
        text += &format!(
            "  stage {s} on worker {:?}: {:2} nodes, {ms:8.3} ms a micro-batch: {}\n",
            stage.workers,
            stage.nodes.len(),
            layers.join(" ")
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_settle_on_one_instruction_set() {
        use Isa::{Avx2, Avx512, Portable};
        let say = |all: &[Choice], recorded| settle(all, Some(recorded), false).unwrap_err().to_string();
        assert_eq!(settle(&[(Avx512, false), (Avx2, false)], None, false).unwrap(), Avx2);
        assert_eq!(settle(&[(Avx512, false), (Portable, true)], None, false).unwrap(), Portable);
        assert_eq!(settle(&[(Avx512, false), (Avx512, false)], Some(Avx2), false).unwrap(), Avx2);
        assert_eq!(settle(&[(Avx512, false), (Avx2, true)], Some(Avx2), false).unwrap(), Avx2);
        assert_eq!(settle(&[(Avx2, true)], Some(Avx512), true).unwrap(), Avx2);
        assert_eq!(settle(&[(Avx512, true)], Some(Avx2), true).unwrap(), Avx2);
        assert!(say(&[(Avx512, false), (Avx2, false)], Avx512).contains("rank 1 has no more than avx2"));
        assert!(say(&[(Avx512, true)], Avx2).contains("rank 0 was told to use avx512 by PIPEWRIGHT_ISA"));
        assert!(isa_called("neon").unwrap_err().to_string().contains("\"neon\": one of portable, avx2, avx512"));
    }
}
