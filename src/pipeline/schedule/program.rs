//! Reading programs: what an instruction touches, and the stream of instructions that a program stands for.
use super::{Direction, Inst, Link, Message, Program, Programs, Read, Wiring};
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
            | Inst::Step { stage, .. }
            | Inst::Free { stage, .. } => Some(stage),
            Inst::Post(_) | Inst::Recv(_) | Inst::Send(_) | Inst::Wait(_) => None,
        }
    }

    /// The micro-batch it works on or moves; `None` for `Step` and `Free`.
    pub fn mb(self) -> Option<usize> {
        match self {
            Inst::F { mb, .. } | Inst::B { mb, .. } | Inst::I { mb, .. } | Inst::W { mb, .. } => Some(mb),
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
    /// Programs that were made for stage r on worker r, for the placement of `wiring`.
    ///
    /// # Errors
    /// If it does not put every stage on a worker of its own.
    pub fn placed(mut self, wiring: &Wiring) -> Result<Programs> {
        let mut workers = vec![None; self.workers.len()];
        for (stage, program) in std::mem::take(&mut self.workers).into_iter().enumerate() {
            let slot = wiring.worker(stage).and_then(|w| workers.get_mut(w)).filter(|slot| slot.is_none());
            let slot = slot.ok_or_else(|| {
                let on = wiring.stages.get(stage);
                Error::schedule(format!("stage {stage} is on workers {on:?}; one each, of its own, expected"))
            })?;
            *slot = Some(program);
        }
        self.workers = workers.into_iter().flatten().collect();
        Ok(self)
    }
}

impl Wiring {
    /// The straight placement: stage r on worker r, each stage feeding the next.
    pub fn straight(workers: usize) -> Wiring {
        Wiring {
            stages: (0..workers).map(|w| vec![w]).collect(),
            edges: (1..workers).map(|to| Link { from: to - 1, to, grad: true }).collect(),
        }
    }

    /// The worker of a stage, if it has exactly one.
    pub fn worker(&self, stage: usize) -> Option<usize> {
        match self.stages.get(stage)?.as_slice() {
            [worker] => Some(*worker),
            _ => None,
        }
    }

    /// The workers that send and receive a message; `None` if it does not exist, or if it stays on its worker.
    pub fn route(&self, edge: usize, direction: Direction) -> Option<(usize, usize)> {
        let link = self.edges.get(edge)?;
        let (from, to) = (self.worker(link.from)?, self.worker(link.to)?);
        match direction {
            _ if from == to => None,
            Direction::Forward => Some((from, to)),
            Direction::Backward => link.grad.then_some((to, from)),
        }
    }

    /// Whether schedules can be made over it: one worker a stage, and every edge to a later stage.
    pub fn check(&self, workers: usize) -> Result<()> {
        for (stage, on) in self.stages.iter().enumerate() {
            match on.as_slice() {
                [worker] if *worker < workers => {}
                [worker] => {
                    return Err(Error::schedule(format!(
                        "wiring: stage {stage} is on worker {worker}, but there are {workers}"
                    )));
                }
                _ => {
                    return Err(Error::schedule(format!(
                        "wiring: stage {stage} has {} workers; schedules take exactly one a stage",
                        on.len()
                    )));
                }
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
