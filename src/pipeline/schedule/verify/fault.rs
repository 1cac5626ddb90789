//! What a program does wrong, and where.
use crate::{Error, pipeline::schedule::Program};
use std::fmt;

/// The rules that [`verify`](fn@super::verify) proves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rule {
    /// Every instruction stands on the worker of its stage, or at its end of the edge.
    Place,
    /// One F, and one B or one I and one W, for each micro-batch of each stage.
    Once,
    /// Every instruction stands after what it needs.
    Order,
    /// Every message is posted, received, sent and waited for once, in this order.
    Message,
    /// The sends of a channel are in the order of its posts.
    Channel,
    /// All workers come to their ends.
    Deadlock,
    /// Every update folds the gradients of its own micro-batches, and all of them.
    Step,
    /// The workers of a stage sum their gradients before every update.
    Reduce,
    /// Only versions that are held are read and freed, and none is held in the end.
    Version,
    /// A program is short, or its state repeats.
    Length,
}

impl Rule {
    /// Every rule.
    pub const ALL: [Rule; 10] = [
        Rule::Place,
        Rule::Once,
        Rule::Order,
        Rule::Message,
        Rule::Channel,
        Rule::Deadlock,
        Rule::Step,
        Rule::Reduce,
        Rule::Version,
        Rule::Length,
    ];

    /// Its name in errors.
    pub fn name(self) -> &'static str {
        match self {
            Rule::Place => "place",
            Rule::Once => "once",
            Rule::Order => "order",
            Rule::Message => "message",
            Rule::Channel => "channel",
            Rule::Deadlock => "deadlock",
            Rule::Step => "step",
            Rule::Reduce => "reduce",
            Rule::Version => "version",
            Rule::Length => "length",
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A broken rule, before it is known where.
#[derive(Debug)]
pub(super) struct Broken {
    pub(super) rule: Rule,
    pub(super) what: String,
}

impl Broken {
    pub(super) fn new(rule: Rule, what: impl Into<String>) -> Broken {
        Broken { rule, what: what.into() }
    }

    /// The error, with the instructions around `position` of a worker's program.
    #[track_caller]
    pub(super) fn at(self, worker: usize, program: &Program, position: usize) -> Error {
        let place = match program.get(position) {
            Some(inst) => format!("instruction {position}, {inst}"),
            None => "end of the program".into(),
        };
        let around = excerpt(program, position);
        Error::schedule(format!("rule {} broken: worker {worker}, {place}: {}\n{around}", self.rule, self.what))
    }
}

/// A few instructions around `position`, which is marked.
pub(super) fn excerpt(program: &Program, position: usize) -> String {
    const AROUND: usize = 3;
    let mut text = String::new();
    let first = position.saturating_sub(AROUND);
    for at in first..=position.saturating_add(AROUND) {
        let Some(inst) = program.get(at) else { break };
        let mark = if at == position { '>' } else { ' ' };
        text += &format!("  {mark} {at:>6}  {inst}\n");
    }
    text
}
