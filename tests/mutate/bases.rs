//! Programs that are right.
use super::Draw;
use pipewright::pipeline::schedule::{
    Inst, Kind, Link, Program, Programs, Read, Shape, WeightPolicy, Wiring, evaluate, evaluate_for, make, make_for,
};

/// Compute instructions, and what they are to be lowered over.
pub struct Base {
    pub name: String,
    pub programs: Programs,
    pub wiring: Wiring,
}

/// Small programs of any kind.
pub fn base(draw: &mut Draw) -> Base {
    let (p, m) = (1 + draw.below(4), 1 + draw.below(5));
    if draw.once_in(3) {
        let m = 1 + draw.below(7);
        return replicated(draw, m);
    }
    let (name, mut programs) = match draw.below(3 + Kind::ALL.len()) {
        0 => (format!("evaluation p={p} m={m}"), evaluate(p, m).unwrap()),
        1 => {
            let (chunks, zigzag) = (2 + draw.below(2), draw.once_in(2));
            let (programs, stages) = chunked(p, chunks, m, zigzag);
            return finish(draw, format!("{chunks} chunks p={p} m={m} zigzag={zigzag}"), programs, stages);
        }
        2 => {
            let (every, lag) = (1 + draw.below(m), draw.below(3));
            let programs = accumulating(p, m, every, lag);
            (format!("1f1b p={p} m={m}, a step every {every}, kept for {lag}"), programs)
        }
        n => {
            let kind = Kind::ALL[n - 3];
            let rounds = if kind.is_synchronous() { 1 + draw.below(3) } else { 1 };
            (format!("{kind} p={p} m={m} rounds={rounds}"), repeated(kind, p, m, rounds))
        }
    };
    if programs.step_every > 0 && draw.once_in(4) {
        programs.weights = Kind::PipeDreamNoStash.weights();
    }
    finish(draw, name, programs, (0..p).map(|w| vec![w]).collect())
}

/// Programs of which `verify` does not go through all repeats.
pub fn long(draw: &mut Draw) -> Base {
    let (p, many) = (1 + draw.below(3), 30 + draw.below(50));
    if draw.once_in(3) {
        return replicated(draw, many);
    }
    let kind = draw.of(&Kind::ALL);
    let (name, mut programs) = match draw.below(8) {
        0 => {
            let mut programs = evaluate(p, many).unwrap();
            // Means nothing where no version is named.
            programs.workers.iter_mut().for_each(|program| program.version_shift = draw.below(2));
            (format!("evaluation p={p} m={many}"), programs)
        }
        1 | 2 => {
            let (every, lag) = (1 + draw.below(3), draw.below(3));
            let programs = accumulating(p, many, every, lag);
            (format!("1f1b p={p} m={many}, a step every {every}, kept for {lag}"), programs)
        }
        _ if kind.is_synchronous() => {
            let m = 1 + draw.below(3);
            (format!("{kind} p={p} m={m} rounds={many}"), repeated(kind, p, m, many))
        }
        _ => (format!("{kind} p={p} m={many}"), repeated(kind, p, many, 1)),
    };
    if draw.once_in(2) {
        programs.workers.iter_mut().for_each(|program| *program = rewritten(draw, program));
    }
    finish(draw, name, programs, (0..p).map(|w| vec![w]).collect())
}

/// Stages on several workers each, whose numbers are in any order.
fn replicated(draw: &mut Draw, m: usize) -> Base {
    let replicas: Vec<usize> = (0..1 + draw.below(3)).map(|_| 1 + draw.below(3)).collect();
    let mut stages = Wiring::replicated(&replicas).stages;
    if draw.once_in(3) {
        let last = replicas.iter().sum::<usize>() - 1;
        stages.iter_mut().flatten().for_each(|worker| *worker = last - *worker);
    }
    let wiring = Wiring { stages: stages.clone(), ..Wiring::replicated(&replicas) };
    // Longer ones are as good.
    let extra = draw.below(4) / 3;
    let warm_up = pipewright::pipeline::schedule::warm_up(&replicas).iter().map(|w| w + extra).collect();
    let kinds: Vec<Kind> = Kind::ALL.into_iter().filter(|&kind| kind != Kind::PipeDreamVertical).collect();
    let (name, programs) = match draw.below(1 + kinds.len()) {
        0 => ("evaluation".to_string(), evaluate_for(&Shape::new(&replicas).unwrap(), m).unwrap()),
        n => (
            kinds[n - 1].to_string(),
            make_for(kinds[n - 1], &Shape::warmed_up(&replicas, warm_up).unwrap(), m).unwrap(),
        ),
    };
    finish(draw, format!("{name} {replicas:?} m={m}"), programs.placed(&wiring).unwrap(), stages)
}

/// Wires the stages up, and sometimes splits the backward passes.
fn finish(draw: &mut Draw, mut name: String, mut programs: Programs, stages: Vec<Vec<usize>>) -> Base {
    let count = stages.len();
    let mut edges: Vec<Link> = (1..count).map(|to| Link { from: to - 1, to, grad: true }).collect();
    // Where a worker has several stages, programs with other edges may deadlock if their sends are batched.
    let workers: std::collections::BTreeSet<usize> = stages.iter().flatten().copied().collect();
    let one_each = workers.len() == stages.iter().map(Vec::len).sum::<usize>();
    for _ in 0..if one_each && count > 1 { draw.below(4) } else { 0 } {
        let from = draw.below(count - 1);
        let link = Link { from, to: from + 1 + draw.below(count - 1 - from), grad: !draw.once_in(3) };
        edges.insert(draw.below(edges.len() + 1), link);
    }
    if draw.once_in(3) {
        let lag = draw.below(3);
        name += &format!(", I and W with a lag of {lag}");
        for program in &mut programs.workers {
            for insts in [&mut program.prologue, &mut program.period, &mut program.epilogue] {
                *insts = split(insts, lag);
            }
        }
    }
    Base { name, programs, wiring: Wiring { stages, edges } }
}

/// A schedule of so many minibatches, with a flush after each, if it is synchronous.
fn repeated(kind: Kind, workers: usize, micro_batches: usize, rounds: usize) -> Programs {
    let mut programs = make(kind, workers, micro_batches).unwrap();
    if kind.is_synchronous() {
        programs.workers.iter_mut().for_each(|p| p.repeats = rounds);
        programs.micro_batches *= rounds;
    }
    programs
}

/// GPipe with several stages a worker: stage s on worker s mod p, or down the workers and up again.
fn chunked(workers: usize, chunks: usize, micro_batches: usize, zigzag: bool) -> (Programs, Vec<Vec<usize>>) {
    let stages: Vec<Vec<usize>> = (0..workers * chunks)
        .map(|s| if zigzag && (s / workers) % 2 == 1 { workers - 1 - s % workers } else { s % workers })
        .map(|worker| vec![worker])
        .collect();
    let program = |worker: usize| {
        let mine: Vec<usize> = (0..stages.len()).filter(|&s| stages[s] == [worker]).collect();
        let each = |stage| (0..micro_batches).map(move |mb| (stage, mb));
        let forward = mine.iter().flat_map(|&s| each(s)).map(|(stage, mb)| Inst::F { stage, mb, read: Read::Current });
        let backward = mine.iter().rev().flat_map(|&s| each(s)).map(|(stage, mb)| Inst::B { stage, mb });
        let steps = mine.iter().map(|&stage| Inst::Step { stage, keep: false });
        Program::once(forward.chain(backward).chain(steps).collect())
    };
    let workers = (0..workers).map(program).collect();
    let (step_every, weights) = (micro_batches, WeightPolicy::Stashed);
    (Programs { workers, micro_batches, step_every, each_replica: false, weights }, stages)
}

/// 1F1B without flush and with an update after every so many backward passes, which keeps the old version for `lag` updates
/// more; nothing reads it.
fn accumulating(workers: usize, micro_batches: usize, every: usize, lag: usize) -> Programs {
    let mut programs = make(Kind::OneFOneB, workers, micro_batches).unwrap();
    for (stage, program) in programs.workers.iter_mut().enumerate() {
        let mut insts = Vec::new();
        for inst in program.iter().filter(|inst| !matches!(inst, Inst::Step { .. })) {
            insts.push(inst);
            let Inst::B { mb, .. } = inst else { continue };
            if (mb + 1).is_multiple_of(every) || mb + 1 == micro_batches {
                insts.push(Inst::Step { stage, keep: true });
                insts.extend((mb / every).checked_sub(lag).map(|version| Inst::Free { stage, version }));
            }
        }
        let updates = micro_batches.div_ceil(every);
        insts.extend((updates.saturating_sub(lag)..updates).map(|version| Inst::Free { stage, version }));
        let warm_up = micro_batches.min(workers - 1 - stage);
        // The first updates free nothing.
        let start = warm_up + lag * (2 * every + 1);
        *program = folded(insts, start, 2 * every + 2, every, 1);
    }
    Programs { step_every: every, ..programs }
}

/// Instructions with those from `start` on as a period of `len`, for as long as they repeat.
fn folded(insts: Vec<Inst>, start: usize, len: usize, shift: usize, version_shift: usize) -> Program {
    let Some(period) = insts.get(start..start + len) else { return Program::once(insts) };
    let moved = |insts: &[Inst], repeats: isize| {
        let moved = insts.iter().map(|inst| inst.shifted(repeats * shift as isize, repeats * version_shift as isize));
        moved.collect::<Option<Vec<Inst>>>()
    };
    let repeat = |n: usize| insts.get(start + n * len..start + (n + 1) * len);
    let most =
        (0..).take_while(|&n| repeat(n).is_some_and(|r| moved(period, n as isize).as_deref() == Some(r))).count();
    let fold = |repeats: usize| {
        let epilogue = moved(&insts[start + repeats * len..], -(repeats as isize))?;
        let (prologue, period) = (insts[..start].to_vec(), period.to_vec());
        Some(Program { prologue, period, repeats, shift, version_shift, epilogue })
    };
    // The numbers of the epilogue, written as if there were no repeats, must not fall below 0.
    (1..=most).rev().find_map(fold).unwrap_or_else(|| Program::once(insts.clone()))
}

/// The same instructions, with a period that begins elsewhere and is several of the old ones long.
pub fn rewritten(draw: &mut Draw, program: &Program) -> Program {
    let len = program.period.len();
    if len == 0 {
        return program.clone();
    }
    let (start, times) = (program.prologue.len() + draw.below(2 * len), 1 + draw.below(3));
    folded(program.iter().collect(), start, times * len, times * program.shift, times * program.version_shift)
}

/// I for B, and W after the I of up to `lag` other micro-batches, but before the update.
fn split(insts: &[Inst], lag: usize) -> Vec<Inst> {
    let (mut out, mut pending) = (Vec::new(), Vec::new());
    for &inst in insts {
        match inst {
            Inst::B { stage, mb } => {
                out.push(Inst::I { stage, mb });
                pending.push(Inst::W { stage, mb });
                if pending.len() > lag {
                    out.push(pending.remove(0));
                }
                continue;
            }
            Inst::Reduce { .. } | Inst::Step { .. } => out.append(&mut pending),
            _ => {}
        }
        out.push(inst);
    }
    out.append(&mut pending);
    out
}
