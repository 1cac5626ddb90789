//! Communication, added to programs of compute instructions.
//!
//! - `Recv` stands just before the instruction that needs the message, `Send` right after the one that makes it.
//! - `Post` stands early, so that the transfer overlaps compute: that of a value before the compute instruction which precedes
//!   its use; that of a gradient before the backward pass which precedes its use, and the first one after its own forward pass.
//!   Neither place depends on how many micro-batches are still to come (see [`Programs::stream`]).
//! - `Wait` stands late: between two workers an edge over d stages has at most d messages of a direction under way, as many as
//!   the stages between it can work on, or as many as the one stage is ahead of the other by its longer warm-up; then the oldest is
//!   waited for before the next is sent. All are waited for at the end.
//! - Edges between stages of one worker need no messages.
//!
//! Periods stay periods; where the first or last repeats differ from the others they move to the prologue and the epilogue.
use super::{Direction, Inst, LONGEST, Link, MicroBatch, Program, Programs, Wiring};
use crate::{Context, Error, Result, pipeline::schedule::Message};
use std::collections::{HashMap, VecDeque};

/// Repeats that are enough to see what a period looks like in the middle of many: its beginning and its end differ for as many
/// repeats as there are stages between the ends of an edge, times the workers that its messages go to in turn, or micro-batches in
/// flight.
fn sample_size(wiring: &Wiring, under_way: &[usize]) -> usize {
    let workers = wiring.stages.iter().map(Vec::len).sum::<usize>();
    let turns = (0..wiring.edges.len()).map(|edge| wiring.pairs(edge)).max().unwrap_or(1);
    4 * (workers + under_way.iter().max().unwrap_or(&1)) * turns
}

/// Adds communication to programs of compute instructions. Periods stay periods.
pub fn lower(programs: &Programs, wiring: &Wiring) -> Result<Programs> {
    wiring.check(programs.workers.len())?;
    let under_way = under_way(programs, wiring);
    let lower = |(worker, program): (usize, &Program)| {
        lower_worker(program, &Place { worker, wiring, under_way: &under_way }).context(|| format!("worker {worker}"))
    };
    Ok(Programs { workers: programs.workers.iter().enumerate().map(lower).collect::<Result<_>>()?, ..programs.clone() })
}

/// The most messages of a direction that each edge has under way between two workers.
fn under_way(programs: &Programs, wiring: &Wiring) -> Vec<usize> {
    // Micro-batches that a stage begins before it ends the first one.
    let ahead = |stage: usize| {
        let workers = &wiring.stages[stage];
        let warm_up = workers.iter().filter_map(|&w| warm_up(programs.workers.get(w)?, stage)).max();
        workers.len() * warm_up.unwrap_or(0)
    };
    let ahead: Vec<usize> = (0..wiring.stages.len()).map(ahead).collect();
    let edge = |(edge, link): (usize, &Link)| {
        let behind = ahead[link.from].saturating_sub(ahead[link.to]);
        behind.div_ceil(wiring.pairs(edge).max(1)).max(link.to - link.from)
    };
    wiring.edges.iter().enumerate().map(edge).collect()
}

/// Forward passes of a stage that a program has before its first backward pass, if there is one.
fn warm_up(program: &Program, stage: usize) -> Option<usize> {
    let is_backward = |i: &Inst| matches!(i, Inst::B { stage: s, .. } | Inst::I { stage: s, .. } if *s == stage);
    let insts = || program.prologue.iter().chain(&program.period).chain(&program.epilogue);
    let until = insts().position(is_backward)?;
    Some(insts().take(until).filter(|i| matches!(i, Inst::F { stage: s, .. } if *s == stage)).count())
}

fn lower_worker(program: &Program, place: &Place) -> Result<Program> {
    let sampled = program.repeats.min(sample_size(place.wiring, place.under_way));
    let sample = Program { repeats: sampled, ..program.clone() };
    if let Some(lowered) = fold(program, &place.segments(&sample)?) {
        return Ok(Program { repeats: lowered.repeats + (program.repeats - sampled), ..lowered });
    }
    if program.len() > LONGEST {
        return Err(Error::schedule(format!("a program of {} instructions has no period", program.len())));
    }
    Ok(Program::once(place.segments(program)?.concat()))
}

/// Puts prologue, repeats and epilogue, written out, together again, with the longest run of equal repeats as the period.
/// `None` if the repeats in the middle of the sample differ, so that nothing is known of those that were left out.
fn fold(program: &Program, segments: &[Vec<Inst>]) -> Option<Program> {
    let [prologue, repeats @ .., epilogue] = segments else { return None };
    let by = |n: isize, shift: usize| isize::try_from(shift).ok()?.checked_mul(n);
    let moved = |insts: &[Inst], n: isize| -> Option<Vec<Inst>> {
        let (mbs, versions) = (by(n, program.shift)?, by(n, program.version_shift)?);
        insts.iter().map(|i| i.shifted(mbs, versions)).collect()
    };
    let mut best = 0..0;
    let mut start = 0;
    for end in 1..=repeats.len() {
        if end - start > best.len() {
            best = start..end;
        }
        if end < repeats.len() && moved(&repeats[end - 1], 1).as_ref() != Some(&repeats[end]) {
            start = end;
        }
    }
    let middle = repeats.len() / 2;
    if program.repeats > repeats.len() && !(best.contains(&(middle - 1)) && best.contains(&middle)) {
        return None;
    }
    // What follows the period is written as if it were not repeated, which must not take its numbers below 0.
    loop {
        let rest: Vec<Inst> = repeats[best.end..].iter().chain([epilogue]).flatten().copied().collect();
        if let Some(epilogue) = moved(&rest, -(best.len() as isize)) {
            let mut prologue = prologue.clone();
            prologue.extend(repeats[..best.start].iter().flatten());
            let period = repeats.get(best.start).cloned().unwrap_or_default();
            return Some(Program { prologue, period, repeats: best.len(), epilogue, ..program.clone() });
        }
        if best.is_empty() {
            return None;
        }
        best.end -= 1;
    }
}

/// The communication around one instruction of a program.
#[derive(Clone, Default)]
struct Around {
    /// Receives of later instructions, posted before this one.
    posts: Vec<Inst>,
    /// What this instruction needs.
    recvs: Vec<Inst>,
    /// What it made, and the waits for earlier messages of the same channels.
    sends: Vec<Inst>,
    /// Posts after it, and the last waits of the program.
    then: Vec<Inst>,
}

/// A worker of a wiring.
struct Place<'a> {
    worker: usize,
    wiring: &'a Wiring,
    /// By edge, the most messages of a direction under way to or from one worker.
    under_way: &'a [usize],
}

impl Place<'_> {
    /// The messages of a micro-batch that a pass of `stage` needs from other workers (or makes for them).
    fn messages(&self, stage: usize, mb: MicroBatch, direction: Direction, receive: bool) -> Vec<Message> {
        let is_head = (direction == Direction::Forward) == receive;
        let edges = self.wiring.edges.iter().enumerate();
        edges
            .filter(|(_, link)| if is_head { link.to == stage } else { link.from == stage })
            .map(|(edge, _)| Message { edge, mb, direction })
            .filter(|&m| self.wiring.route(m).is_some())
            .collect()
    }

    /// The prologue, each repeat and the epilogue of a program, with communication and with the numbers that they run with.
    fn segments(&self, program: &Program) -> Result<Vec<Vec<Inst>>> {
        let insts: Vec<Inst> = program.iter().collect();
        let around = self.around(&insts)?;
        let mut each = insts.into_iter().zip(around).map(|(inst, a)| {
            a.posts.into_iter().chain(a.recvs).chain([inst]).chain(a.sends).chain(a.then).collect::<Vec<_>>()
        });
        let mut lengths = vec![program.prologue.len()];
        lengths.extend(std::iter::repeat_n(program.period.len(), program.repeats));
        lengths.push(program.epilogue.len());
        Ok(lengths.into_iter().map(|n| each.by_ref().take(n).flatten().collect()).collect())
    }

    /// The communication around each instruction.
    fn around(&self, insts: &[Inst]) -> Result<Vec<Around>> {
        let mut around = vec![Around::default(); insts.len()];
        let mut forward_at: HashMap<(usize, MicroBatch), usize> = HashMap::new();
        let mut under_way: HashMap<(usize, Direction, Option<usize>), VecDeque<Message>> = HashMap::new();
        let (mut last_compute, mut last_backward): (Option<usize>, Option<usize>) = (None, None);
        for (at, &inst) in insts.iter().enumerate() {
            let (stage, mb, direction) = match inst {
                Inst::F { stage, mb, .. } => (stage, mb, Direction::Forward),
                Inst::B { stage, mb } | Inst::I { stage, mb } => (stage, mb, Direction::Backward),
                Inst::W { .. } => {
                    last_compute = Some(at);
                    continue;
                }
                Inst::Reduce { .. } | Inst::Step { .. } | Inst::Free { .. } => continue,
                Inst::Post(_) | Inst::Recv(_) | Inst::Send(_) | Inst::Wait(_) => {
                    return Err(Error::schedule(format!(
                        "instruction {at}: {inst:?}: the program has messages already"
                    )));
                }
            };
            if self.wiring.worker(stage, mb) != Some(self.worker) {
                return Err(Error::schedule(format!(
                    "instruction {at}: {inst:?}: micro-batch {mb} of stage {stage} is not on this worker"
                )));
            }
            for message in self.messages(stage, mb, direction, true) {
                let post = Inst::Post(message);
                match (direction, last_compute, last_backward, forward_at.get(&(stage, mb))) {
                    (Direction::Forward, Some(before), ..) => around[before].posts.push(post),
                    (Direction::Backward, _, Some(before), _) => around[before].posts.push(post),
                    (Direction::Backward, _, None, Some(&after)) => around[after].then.push(post),
                    _ => around[at].posts.push(post),
                }
                around[at].recvs.push(Inst::Recv(message));
            }
            for message in self.messages(stage, mb, direction, false) {
                let to = self.wiring.route(message).map(|(_, to)| to);
                let queue = under_way.entry((message.edge, direction, to)).or_default();
                if queue.len() == self.under_way[message.edge] {
                    around[at].sends.extend(queue.pop_front().map(Inst::Wait));
                }
                around[at].sends.push(Inst::Send(message));
                queue.push_back(message);
            }
            last_compute = Some(at);
            match direction {
                Direction::Forward => _ = forward_at.insert((stage, mb), at),
                Direction::Backward => last_backward = Some(at),
            }
        }
        let mut rest: Vec<Message> = under_way.into_values().flatten().collect();
        rest.sort_unstable();
        if let Some(last) = around.last_mut() {
            last.then.extend(rest.into_iter().map(Inst::Wait));
        }
        Ok(around)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pipeline::schedule::{Kind, make};

    /// What an asynchronous run starts with: its end is not known, so it must not be written out.
    #[test]
    fn endless_programs_stay_short() -> Result<()> {
        for kind in [Kind::PipeDream, Kind::PipeDreamVertical, Kind::PipeDreamNoStash] {
            for workers in 2..=16 {
                let mut wiring = Wiring::straight(workers);
                wiring.edges.push(super::super::Link { from: 0, to: workers - 1, grad: true });
                let lowered = lower(&make(kind, workers, 1 << 40)?, &wiring)?;
                let longest =
                    lowered.workers.iter().map(|p| p.prologue.len() + p.period.len() + p.epilogue.len()).max();
                assert!(longest < Some(5000), "{kind} on {workers}: {longest:?} instructions");
            }
        }
        Ok(())
    }
}
