//! Judging what a run has left.
use super::{Fault, Machine, machine::Stage};
use pipewright::pipeline::schedule::{
    MicroBatch, Programs,
    verify::{Reading, Rule, WorkerFacts},
};

/// What is true of programs that do everything right.
#[derive(Debug, PartialEq)]
pub struct Report {
    pub workers: Vec<WorkerFacts>,
    pub stages: Vec<StageReport>,
}

/// The weights of a stage.
#[derive(Debug, PartialEq)]
pub struct StageReport {
    pub stage: usize,
    pub worker: usize,
    pub weight_versions: usize,
    pub staleness: usize,
    /// By micro-batch.
    pub reads: Vec<Reading>,
}

/// Judges a run that cannot go on.
pub fn report(machine: &Machine, programs: &Programs) -> Result<Report, Vec<Fault>> {
    let mut faults = Vec::new();
    for (worker, w) in machine.workers.iter().enumerate() {
        let at = w.at;
        let end = machine.insts[worker].len();
        match &w.fault {
            Some(fault) => faults.push(fault.clone()),
            None if at < end => {
                faults.push(Fault {
                    rule: Rule::Deadlock,
                    worker,
                    at,
                    what: format!("{} waits", machine.insts[worker][at]),
                });
            }
            None => {
                let left = [w.inbox.len(), w.outbox.len(), w.posted.len(), w.sending.len()];
                if left != [0; 4] {
                    let what = format!("received, to be sent, posts and sends are left: {left:?}");
                    faults.push(Fault { rule: Rule::Message, worker, at, what });
                }
                for (stage, s) in &w.stages {
                    let of = &machine.wiring.stages[*stage];
                    let me = of.iter().position(|w| *w == worker).expect("a worker of the stage");
                    let broken = broken(s, programs, me, of.len()).into_iter();
                    faults.extend(broken.map(|(rule, what)| Fault {
                        rule,
                        worker,
                        at,
                        what: format!("stage {stage}: {what}"),
                    }));
                }
            }
        }
    }
    if faults.is_empty() && !machine.channels.values().all(|c| c.is_even()) {
        faults.push(Fault { rule: Rule::Message, worker: 0, at: 0, what: "a send or a post is left alone".into() });
    }
    if !faults.is_empty() {
        return Err(faults);
    }
    let mut stages: Vec<(usize, StageReport)> = Vec::new();
    for (worker, w) in machine.workers.iter().enumerate() {
        stages.extend(w.stages.iter().map(|(&stage, s)| (stage, stage_report(stage, worker, s))));
    }
    stages.sort_by_key(|(stage, report)| (*stage, report.worker));
    Ok(Report {
        workers: machine.workers.iter().map(|w| w.peaks).collect(),
        stages: stages.into_iter().map(|(_, report)| report).collect(),
    })
}

/// The rules that a stage breaks over the whole run.
fn broken(s: &Stage, programs: &Programs, me: usize, of: usize) -> Vec<(Rule, String)> {
    let m = programs.micro_batches;
    let e = programs.step_every * if programs.each_replica { of } else { 1 };
    let mine = |mb: &MicroBatch| mb % of == me;
    let mut broken = Vec::new();
    let mut forwards: Vec<MicroBatch> = s.forwards.iter().map(|(mb, _)| *mb).collect();
    forwards.sort_unstable();
    if !forwards.iter().copied().eq((0..m).filter(mine)) {
        broken.push((Rule::Once, format!("F of {forwards:?}")));
    }
    let in_flight: Vec<MicroBatch> = s.tapes.iter().chain(&s.pending).map(|t| t.mb).collect();
    if !in_flight.is_empty() {
        broken.push((Rule::Once, format!("{in_flight:?} are still in flight")));
    }
    // Update k is that of micro-batches k·e … k·e+e−1; there are no others.
    let intended: Vec<Vec<MicroBatch>> = match e {
        0 => Vec::new(),
        _ => (0..m.div_ceil(e)).map(|k| (k * e..m.min(k * e + e)).filter(mine).collect()).collect(),
    };
    let mut updates: Vec<Vec<MicroBatch>> = s.updates.iter().map(|u| u.iter().map(|t| t.mb).collect()).collect();
    updates.iter_mut().for_each(|u| u.sort_unstable());
    if updates != intended || !s.gradients.is_empty() {
        broken.push((Rule::Step, format!("updates of {updates:?}, and {} gradients are left", s.gradients.len())));
    }
    let sums = (0..s.updates.len()).map(|k| (of > 1).then(|| k * e + e - 1));
    if !s.sums.iter().copied().eq(sums) || s.summed.is_some() {
        broken.push((Rule::Reduce, format!("sums up to {:?}, then {:?}", s.sums, s.summed)));
    }
    if !s.kept.is_empty() {
        broken.push((Rule::Version, format!("versions {:?} are still kept", s.kept)));
    }
    broken
}

fn stage_report(stage: usize, worker: usize, s: &Stage) -> StageReport {
    // A gradient is as old as the weights that its forward pass read.
    let ages = s.updates.iter().enumerate().flat_map(|(k, update)| update.iter().map(move |t| k - t.forward));
    let backward = |mb| s.updates.iter().flatten().find(|t| t.mb == mb).and_then(|t| t.backward);
    let mut reads: Vec<Reading> =
        s.forwards.iter().map(|&(mb, forward)| Reading { mb, forward, backward: backward(mb) }).collect();
    reads.sort_by_key(|r| r.mb);
    StageReport { stage, worker, weight_versions: s.versions, staleness: ages.max().unwrap_or(0), reads }
}
