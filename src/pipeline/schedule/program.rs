//! Reading programs: what an instruction touches, and the stream of instructions that a program stands for.
use super::{Direction, Inst, Link, Message, MicroBatch, Program, Programs, Read, Shape, Wiring, place_in, whose_turn};
use crate::{Error, Result};

impl Inst {
    /// The same instruction for micro-batches and versions that many higher; `None` below 0 or beyond what can be counted.
    pub fn shifted(self, mbs: isize, versions: isize) -> Option<Inst> {
        let at = |n: usize, by: isize| n.checked_add_signed(by).filter(|&n| n <= isize::MAX as usize);
        let message = |m: Message| Some(Message { mb: at(m.mb, mbs)?, ..m });
        Some(match self {
            Inst::F { stage, mb, read } => {
                let read = match read {
                    Read::Current => Read::Current,
                    Read::At(v) => Read::At(at(v, versions)?),
                };
                Inst::F { stage, mb: at(mb, mbs)?, read }
            }
            Inst::B { stage, mb } => Inst::B { stage, mb: at(mb, mbs)? },
            Inst::I { stage, mb } => Inst::I { stage, mb: at(mb, mbs)? },
            Inst::W { stage, mb } => Inst::W { stage, mb: at(mb, mbs)? },
            Inst::Reduce { stage, mb } => Inst::Reduce { stage, mb: at(mb, mbs)? },
            Inst::Step { stage, keep } => Inst::Step { stage, keep },
            Inst::Free { stage, version } => Inst::Free { stage, version: at(version, versions)? },
            Inst::Post(m) => Inst::Post(message(m)?),
            Inst::Recv(m) => Inst::Recv(message(m)?),
            Inst::Send(m) => Inst::Send(message(m)?),
            Inst::Wait(m) => Inst::Wait(message(m)?),
        })
    }

    /// The message, of a communication instruction.
    pub fn message(self) -> Option<Message> {
        match self {
            Inst::Post(m) | Inst::Recv(m) | Inst::Send(m) | Inst::Wait(m) => Some(m),
            _ => None,
        }
    }

    /// The stage, of all but communication instructions.
    pub fn stage(self) -> Option<usize> {
        match self {
            Inst::F { stage, .. }
            | Inst::B { stage, .. }
            | Inst::I { stage, .. }
            | Inst::W { stage, .. }
            | Inst::Reduce { stage, .. }
            | Inst::Step { stage, .. }
            | Inst::Free { stage, .. } => Some(stage),
            Inst::Post(_) | Inst::Recv(_) | Inst::Send(_) | Inst::Wait(_) => None,
        }
    }

    /// The micro-batch it works on or moves, or up to which it sums; `None` for `Step` and `Free`.
    pub fn mb(self) -> Option<usize> {
        match self {
            Inst::F { mb, .. }
            | Inst::B { mb, .. }
            | Inst::I { mb, .. }
            | Inst::W { mb, .. }
            | Inst::Reduce { mb, .. } => Some(mb),
            Inst::Step { .. } | Inst::Free { .. } => None,
            Inst::Post(m) | Inst::Recv(m) | Inst::Send(m) | Inst::Wait(m) => Some(m.mb),
        }
    }
}

impl Program {
    /// A program without repetition.
    pub fn once(insts: Vec<Inst>) -> Program {
        Program { prologue: insts, ..Program::default() }
    }

    /// The number of instructions that it stands for (`usize::MAX` if they cannot be counted).
    pub fn len(&self) -> usize {
        let ends = self.prologue.len() + self.epilogue.len();
        self.period.len().saturating_mul(self.repeats).saturating_add(ends)
    }

    /// Whether it does nothing.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The instruction at a position of the stream, its numbers as they run; `None` past the end, or if they cannot be counted.
    pub fn get(&self, position: usize) -> Option<Inst> {
        let Some(past) = position.checked_sub(self.prologue.len()) else {
            return self.prologue.get(position).copied();
        };
        let (repeat, inst) = match past.checked_sub(self.period.len().saturating_mul(self.repeats)) {
            Some(past) => (self.repeats, self.epilogue.get(past)?),
            None => (past / self.period.len(), self.period.get(past % self.period.len())?),
        };
        let by = |shift: usize| isize::try_from(repeat.checked_mul(shift)?).ok();
        inst.shifted(by(self.shift)?, by(self.version_shift)?)
    }

    /// The instructions in the order in which they run.
    pub fn iter(&self) -> Stream<'_> {
        Stream { program: self, position: 0 }
    }
}

/// The instructions of a program in the order in which they run, their numbers resolved.
#[derive(Clone, Debug)]
pub struct Stream<'a> {
    program: &'a Program,
    position: usize,
}

impl Iterator for Stream<'_> {
    type Item = Inst;

    fn next(&mut self) -> Option<Inst> {
        let inst = self.program.get(self.position)?;
        self.position += 1;
        Some(inst)
    }
}

impl<'a> IntoIterator for &'a Program {
    type Item = Inst;
    type IntoIter = Stream<'a>;

    fn into_iter(self) -> Stream<'a> {
        self.iter()
    }
}

impl Programs {
    /// What a worker does, in order; nothing for a worker that does not exist.
    ///
    /// For an asynchronous kind the streams of n and of more micro-batches are the same up to the first instruction that
    /// mentions micro-batch n, so that a runtime can start before it knows where the run ends, and drain when it does.
    pub fn stream(&self, worker: usize) -> impl Iterator<Item = Inst> + '_ {
        self.workers.get(worker).into_iter().flatten()
    }

    /// Whether they have messages, which [`lower`](fn@super::lower) adds.
    pub fn is_lowered(&self) -> bool {
        let parts = self.workers.iter().flat_map(|p| [&p.prologue, &p.period, &p.epilogue]);
        parts.flatten().any(|inst| inst.message().is_some())
    }
}

impl Programs {
    /// Programs that were made for the workers of stage 0, then those of stage 1 …, for the placement of `wiring`.
    ///
    /// # Errors
    /// If it does not give every one of them a worker of its own.
    pub fn placed(mut self, wiring: &Wiring) -> Result<Programs> {
        let places: Vec<usize> = wiring.stages.iter().flatten().copied().collect();
        let mut workers = vec![None; self.workers.len()];
        if places.len() != workers.len() {
            let (a, b) = (workers.len(), &wiring.stages);
            return Err(Error::schedule(format!("programs of {a} workers; the stages are on workers {b:?}")));
        }
        for (program, place) in std::mem::take(&mut self.workers).into_iter().zip(places) {
            let slot = workers.get_mut(place).filter(|slot| slot.is_none());
            let slot = slot.ok_or_else(|| {
                let on = &wiring.stages;
                Error::schedule(format!("the stages are on workers {on:?}; each on workers of its own expected"))
            })?;
            *slot = Some(program);
        }
        self.workers = workers.into_iter().flatten().collect();
        Ok(self)
    }

    /// Micro-batches whose gradients one update of a stage on `replicas` workers folds.
    pub fn folded_by(&self, replicas: usize) -> usize {
        if self.each_replica { self.step_every.saturating_mul(replicas) } else { self.step_every }
    }
}

impl Wiring {
    /// The straight placement: stage r on worker r, each stage feeding the next.
    pub fn straight(workers: usize) -> Wiring {
        Wiring::replicated(&vec![1; workers])
    }

    /// Stages on so many workers each, numbered in the order of the stages, each stage feeding the next.
    pub fn replicated(replicas: &[usize]) -> Wiring {
        let mut first = 0;
        let stages = replicas.iter().map(|&n| {
            first += n;
            (first - n..first).collect()
        });
        Wiring {
            stages: stages.collect(),
            edges: (1..replicas.len()).map(|to| Link { from: to - 1, to, grad: true }).collect(),
        }
    }

    /// The workers of each stage, with the published warm-up.
    ///
    /// # Errors
    /// As for [`Shape::new`].
    pub fn shape(&self) -> Result<Shape> {
        Shape::new(&self.stages.iter().map(Vec::len).collect::<Vec<_>>())
    }

    /// The worker that works on micro-batch `mb` of a stage.
    pub fn worker(&self, stage: usize, mb: MicroBatch) -> Option<usize> {
        whose_turn(self.stages.get(stage)?, mb)
    }

    /// Which of the workers of `stage` a worker is: replica k of R, as (k, R).
    pub fn replica(&self, stage: usize, worker: usize) -> Option<(usize, usize)> {
        place_in(self.stages.get(stage)?, worker)
    }

    /// The workers that send and receive a message; `None` if it does not exist, or if it stays on its worker.
    pub fn route(&self, m: Message) -> Option<(usize, usize)> {
        let link = self.edges.get(m.edge)?;
        let (from, to) = (self.worker(link.from, m.mb)?, self.worker(link.to, m.mb)?);
        match m.direction {
            _ if from == to => None,
            Direction::Forward => Some((from, to)),
            Direction::Backward => link.grad.then_some((to, from)),
        }
    }

    /// After how many micro-batches the messages of an edge flow between the same two workers again: as many as there are pairs.
    pub fn pairs(&self, edge: usize) -> usize {
        let replicas = |stage: usize| self.stages.get(stage).map_or(1, |on| on.len().max(1));
        self.edges.get(edge).map_or(1, |link| lcm(replicas(link.from), replicas(link.to)))
    }

    /// Whether schedules can be made over it: at least one worker a stage, none twice, and every edge to a later stage.
    pub fn check(&self, workers: usize) -> Result<()> {
        for (stage, on) in self.stages.iter().enumerate() {
            let wrong = |what: String| Err(Error::schedule(format!("wiring: stage {stage} {what}")));
            if on.is_empty() {
                return wrong("is on no worker".into());
            }
            if let Some(worker) = on.iter().find(|&&w| w >= workers) {
                return wrong(format!("is on worker {worker}, but there are {workers}"));
            }
            if let Some(worker) = on.iter().enumerate().find_map(|(i, w)| on[..i].contains(w).then_some(w)) {
                return wrong(format!("is on worker {worker} twice"));
            }
        }
        for (edge, link) in self.edges.iter().enumerate() {
            if link.from >= link.to || link.to >= self.stages.len() {
                return Err(Error::schedule(format!(
                    "wiring: edge {edge} from stage {} to stage {} must lead to a later one of {} stages",
                    link.from,
                    link.to,
                    self.stages.len()
                )));
            }
        }
        Ok(())
    }
}

/// The least common multiple of two positive numbers.
pub(super) fn lcm(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    (a / x.max(1)).saturating_mul(b)
}
