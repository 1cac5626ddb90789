//! Changes to programs.
use super::{Base, Draw, rewritten};
use pipewright::pipeline::schedule::{
    Direction, Inst, Link, Message, Program, Programs, Read, WeightPolicy, Wiring, lower,
};

/// What was changed, and what came of it; `None` if nothing did, or if the instructions could not be lowered any more.
pub fn mutant(draw: &mut Draw, base: &Base) -> Option<(String, Programs, Wiring)> {
    let mut lowered = lower(&base.programs, &base.wiring).expect("a base can be lowered");
    if draw.once_in(4) {
        gather(&mut lowered);
    }
    let mut wiring = base.wiring.clone();
    let (mut programs, before) = match draw.below(4) {
        0 => (base.programs.clone(), "before lowering"),
        1 => {
            let mut programs = lowered.clone();
            if draw.once_in(2) {
                programs.workers.iter_mut().for_each(|program| *program = rewritten(draw, program));
            }
            (programs, "after lowering")
        }
        _ => {
            let workers = lowered.workers.iter().map(|p| Program::once(p.iter().collect())).collect();
            (Programs { workers, ..lowered.clone() }, "written out")
        }
    };
    let mut edits = vec![edit(draw, &mut programs, &mut wiring)?];
    while draw.once_in(8) {
        edits.push(edit(draw, &mut programs, &mut wiring)?);
    }
    if before == "before lowering" {
        programs = lower(&programs, &wiring).ok()?;
    }
    let stream = |p: &Programs| p.workers.iter().map(|p| p.iter().collect()).collect::<Vec<Vec<Inst>>>();
    let same = stream(&programs) == stream(&lowered) && wiring == base.wiring;
    let terms = |p: &Programs| (p.micro_batches, p.step_every, p.each_replica, p.weights);
    if same && terms(&programs) == terms(&lowered) {
        return None;
    }
    Some((format!("{}, {before}: {}", base.name, edits.join("; ")), programs, wiring))
}

/// One change; mostly of one worker's instructions.
fn edit(draw: &mut Draw, programs: &mut Programs, wiring: &mut Wiring) -> Option<String> {
    let worker = draw.below(programs.workers.len());
    match draw.below(24) {
        0 => edit_terms(draw, programs),
        1 => edit_wiring(draw, wiring),
        2 => edit_numbers(draw, &mut programs.workers[worker]).map(|text| format!("worker {worker}: {text}")),
        3 => Some(hurry(draw, programs)),
        4 => {
            let other = draw.below(programs.workers.len());
            let inst = part(draw, &mut programs.workers[worker])?.pop()?;
            let to = part(draw, &mut programs.workers[other])?;
            let at = draw.below(to.len() + 1);
            to.insert(at, inst);
            Some(format!("move {inst} from worker {worker} to {other}"))
        }
        _ => {
            let insts = part(draw, &mut programs.workers[worker])?;
            edit_insts(draw, insts, wiring).map(|text| format!("worker {worker}: {text}"))
        }
    }
}

/// Prologue, period or epilogue, but one with instructions.
fn part<'a>(draw: &mut Draw, program: &'a mut Program) -> Option<&'a mut Vec<Inst>> {
    let parts = [&mut program.prologue, &mut program.period, &mut program.epilogue];
    let mut parts: Vec<&mut Vec<Inst>> = parts.into_iter().filter(|p| !p.is_empty()).collect();
    if parts.is_empty() { None } else { Some(parts.swap_remove(draw.below(parts.len()))) }
}

/// A number near `n`, or far from it.
fn renumber(draw: &mut Draw, n: usize) -> usize {
    match draw.below(8) {
        0 => draw.below(8),
        1 => draw.of(&[1 << 20, isize::MAX as usize, usize::MAX]),
        2 | 3 => n.saturating_add(2),
        4 | 5 => n.saturating_add(1),
        _ => n.saturating_sub(1),
    }
}

fn edit_terms(draw: &mut Draw, programs: &mut Programs) -> Option<String> {
    match draw.below(4) {
        0 => {
            programs.weights = match programs.weights {
                WeightPolicy::Stashed => WeightPolicy::Current,
                WeightPolicy::Current => WeightPolicy::Stashed,
            };
            Some(format!("{:?} weights", programs.weights))
        }
        1 => {
            // The intended updates of a few more micro-batches than there are can be listed, those of 2⁶³ cannot.
            programs.micro_batches = renumber(draw, programs.micro_batches).min(1000);
            Some(format!("{} micro-batches", programs.micro_batches))
        }
        2 => {
            programs.each_replica ^= true;
            Some(format!("each replica: {}", programs.each_replica))
        }
        _ => {
            programs.step_every = renumber(draw, programs.step_every).min(1000);
            Some(format!("a step every {}", programs.step_every))
        }
    }
}

fn edit_wiring(draw: &mut Draw, wiring: &mut Wiring) -> Option<String> {
    let stages = wiring.stages.len();
    if wiring.edges.is_empty() {
        return None;
    }
    let edge = draw.below(wiring.edges.len());
    match draw.below(5) {
        0 => wiring.edges[edge].grad ^= true,
        1 => _ = wiring.edges.remove(edge),
        2 => wiring.edges.insert(edge, Link { from: 0, to: 1 + draw.below(stages - 1), grad: draw.once_in(2) }),
        3 => wiring.edges.swap(edge, 0),
        _ => wiring.stages.swap(0, stages - 1),
    }
    Some(format!("wiring {wiring:?}"))
}

fn edit_numbers(draw: &mut Draw, program: &mut Program) -> Option<String> {
    if program.period.is_empty() {
        return None;
    }
    let (name, number) = match draw.below(3) {
        0 => ("repeats", &mut program.repeats),
        1 => ("shift", &mut program.shift),
        _ => ("version shift", &mut program.version_shift),
    };
    // Few enough for a brute-force executor.
    *number = renumber(draw, *number).min(200);
    Some(format!("{name} {number}"))
}

/// A change of one instruction, or of where it stands.
fn edit_insts(draw: &mut Draw, insts: &mut Vec<Inst>, wiring: &Wiring) -> Option<String> {
    let at = draw.below(insts.len());
    let near = (at + 1 + draw.below(3)).min(insts.len() - 1);
    let inst = insts[at];
    match draw.below(12) {
        0 | 1 => {
            let next = (at + 1).min(insts.len() - 1);
            insts.swap(at, next);
            Some(format!("swap {} and {inst} at {at}", insts[at]))
        }
        2 => {
            let other = draw.below(insts.len());
            insts.swap(at, other);
            Some(format!("swap {inst} at {at} and {} at {other}", insts[at]))
        }
        3 => {
            insts.remove(at);
            Some(format!("drop {inst} at {at}"))
        }
        4 => {
            let to = draw.below(insts.len() + 1);
            insts.insert(to, inst);
            Some(format!("another {inst} at {to}"))
        }
        5 => {
            insts.remove(at);
            insts.insert(near, inst);
            Some(format!("{inst} from {at} to {near}"))
        }
        6 => {
            insts.remove(near);
            insts.insert(at, inst);
            Some(format!("{inst} at {at} instead of the one at {near}"))
        }
        7 => {
            let stage = draw.below(wiring.stages.len() + 1);
            let new = match draw.below(4) {
                3 => Inst::Reduce { stage, mb: draw.below(6) },
                0 => Inst::Step { stage, keep: draw.once_in(2) },
                1 => Inst::Free { stage, version: draw.below(4) },
                _ => Inst::W { stage, mb: draw.below(4) },
            };
            insts.insert(at, new);
            Some(format!("{new} before {inst} at {at}"))
        }
        8 => split(draw, insts),
        9 => keep(draw, insts),
        _ => {
            insts[at] = alter(draw, inst);
            Some(format!("{} for {inst} at {at}", insts[at]))
        }
    }
}

/// The first backward pass that can be in two parts instead of one, together or apart, or with the second one forgotten; or in
/// one instead of two.
fn split(draw: &mut Draw, insts: &mut Vec<Inst>) -> Option<String> {
    let at = insts.iter().position(|i| matches!(i, Inst::B { .. } | Inst::I { .. }))?;
    let old = insts[at];
    match old {
        Inst::B { stage, mb } => {
            insts[at] = Inst::I { stage, mb };
            if draw.once_in(3) {
                return Some(format!("{} for {old} at {at}, without W", insts[at]));
            }
            let to = at + 1 + draw.below(insts.len() - at);
            insts.insert(to, Inst::W { stage, mb });
            Some(format!("{} at {at} and {} at {to} for {old}", insts[at], insts[to]))
        }
        Inst::I { stage, mb } => {
            let (new, without) = (Inst::B { stage, mb }, draw.once_in(2));
            insts[at] = new;
            if without {
                insts.retain(|&inst| inst != Inst::W { stage, mb });
            }
            Some(format!("{new} for {old} at {at}, without W: {without}"))
        }
        _ => None,
    }
}

/// The first update keeps the old version, which is freed somewhere or never, or it no longer does.
fn keep(draw: &mut Draw, insts: &mut Vec<Inst>) -> Option<String> {
    let at = insts.iter().position(|i| matches!(i, Inst::Step { .. }))?;
    let Inst::Step { stage, keep } = insts[at] else { return None };
    insts[at] = Inst::Step { stage, keep: !keep };
    if keep || draw.once_in(2) {
        return Some(format!("{} at {at}", insts[at]));
    }
    let (to, free) = (at + 1 + draw.below(insts.len() - at), Inst::Free { stage, version: draw.below(2) });
    insts.insert(to, free);
    Some(format!("{} at {at} and {free} at {to}", insts[at]))
}

/// Puts each wait behind the sends that follow it, so that more of them stand together.
pub fn gather(programs: &mut Programs) {
    for program in &mut programs.workers {
        for insts in [&mut program.prologue, &mut program.period, &mut program.epilogue] {
            let sends_or_waits = |a: &Inst, b: &Inst| [a, b].iter().all(|i| matches!(i, Inst::Send(_) | Inst::Wait(_)));
            let runs = insts.chunk_by_mut(sends_or_waits);
            runs.for_each(|run| run.sort_by_key(|inst| matches!(inst, Inst::Wait(_))));
        }
    }
}

/// Waits for each send at once, or posts each receive only when it is waited for, or both, as programs that deadlock do.
fn hurry(draw: &mut Draw, programs: &mut Programs) -> String {
    let (sends, posts) = draw.of(&[(true, false), (false, true), (true, true)]);
    for program in &mut programs.workers {
        for insts in [&mut program.prologue, &mut program.period, &mut program.epilogue] {
            let hurried = std::mem::take(insts).into_iter().flat_map(|inst| match inst {
                Inst::Send(m) if sends => vec![inst, Inst::Wait(m)],
                Inst::Recv(m) if posts => vec![Inst::Post(m), inst],
                Inst::Wait(_) if sends => Vec::new(),
                Inst::Post(_) if posts => Vec::new(),
                _ => vec![inst],
            });
            *insts = hurried.collect();
        }
    }
    format!("each wait behind its send: {sends}, each post before its receive: {posts}")
}

/// Another instruction of the same sort.
fn alter(draw: &mut Draw, inst: Inst) -> Inst {
    let choice = draw.below(3);
    match inst {
        Inst::F { stage, mb, .. } if choice == 0 => {
            let read = if draw.once_in(3) { Read::Current } else { Read::At(renumber(draw, mb)) };
            Inst::F { stage, mb, read }
        }
        Inst::F { stage, mb, read } if choice == 1 => Inst::F { stage: renumber(draw, stage), mb, read },
        Inst::F { stage, mb, read } => Inst::F { stage, mb: renumber(draw, mb), read },
        Inst::B { stage, mb } if choice == 0 => Inst::B { stage: renumber(draw, stage), mb },
        Inst::B { stage, mb } => Inst::B { stage, mb: renumber(draw, mb) },
        Inst::I { stage, mb } => Inst::I { stage, mb: renumber(draw, mb) },
        Inst::W { stage, mb } => Inst::W { stage, mb: renumber(draw, mb) },
        Inst::Reduce { stage, mb } if choice == 0 => Inst::Reduce { stage: renumber(draw, stage), mb },
        Inst::Reduce { stage, mb } => Inst::Reduce { stage, mb: renumber(draw, mb) },
        Inst::Step { stage, keep } if choice == 0 => Inst::Step { stage: renumber(draw, stage), keep },
        Inst::Step { stage, keep } => Inst::Step { stage, keep: !keep },
        Inst::Free { stage, version } => Inst::Free { stage, version: renumber(draw, version) },
        Inst::Post(m) if choice == 0 => draw.of(&[Inst::Recv(m), Inst::Send(m)]),
        Inst::Recv(m) if choice == 0 => draw.of(&[Inst::Post(m), Inst::Wait(m)]),
        Inst::Send(m) if choice == 0 => draw.of(&[Inst::Wait(m), Inst::Post(m)]),
        Inst::Wait(m) if choice == 0 => draw.of(&[Inst::Send(m), Inst::Recv(m)]),
        Inst::Post(m) => Inst::Post(redirect(draw, m)),
        Inst::Recv(m) => Inst::Recv(redirect(draw, m)),
        Inst::Send(m) => Inst::Send(redirect(draw, m)),
        Inst::Wait(m) => Inst::Wait(redirect(draw, m)),
    }
}

/// Another message.
fn redirect(draw: &mut Draw, m: Message) -> Message {
    match draw.below(4) {
        0 => Message { edge: renumber(draw, m.edge), ..m },
        1 => Message {
            direction: match m.direction {
                Direction::Forward => Direction::Backward,
                Direction::Backward => Direction::Forward,
            },
            ..m
        },
        _ => Message { mb: renumber(draw, m.mb), ..m },
    }
}
