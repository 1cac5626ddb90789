//! A brute-force executor of programs: what `verify` must agree with.
//!
//! It shares the words of programs with `verify` and none of its code. All instructions of all workers are executed one by one,
//! repeats written out, over channels that hand over values in order; a value says which pass made it. When no worker can go
//! on, what the run has left is judged: the passes that were done, the gradients that each update folded, and that nothing is
//! left over.
//!
//! One order of execution is enough. Each channel has one sender and one receiver, each worker does what its program says, and an
//! instruction that can be executed stays so until it is: nothing that others do takes a message or a post away. So if two
//! workers can go on, the order in which they do makes no difference to the state behind both, and all runs that go on as long
//! as they can end in the same state (Kahn 1974). `tests/mutations.rs` goes through all orders of small programs.
mod judge;
mod machine;

pub use judge::{Report, report};
pub use machine::Machine;

use pipewright::pipeline::schedule::{
    Inst, Program, Programs, Wiring,
    verify::{Rule, Sends},
};
use std::fmt;

/// Something that a worker does wrong.
#[derive(Clone, Debug, PartialEq)]
pub struct Fault {
    /// The promise of `verify` that it breaks.
    pub rule: Rule,
    pub worker: usize,
    /// Its position in the program, whose length if it shows only in the end.
    pub at: usize,
    pub what: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: worker {}, instruction {}: {}", self.rule, self.worker, self.at, self.what)
    }
}

/// What is true of programs that do everything right; else the first kind of sends with which something goes wrong, and what.
pub fn run(programs: &Programs, wiring: &Wiring) -> Result<Report, (Sends, Vec<Fault>)> {
    let insts: Result<Vec<Vec<Inst>>, Fault> =
        programs.workers.iter().enumerate().map(|(worker, program)| written_out(worker, program)).collect();
    let insts = insts.map_err(|fault| (Sends::Buffered, vec![fault]))?;
    let run = |sends| {
        let mut machine = Machine::new(programs, &insts, wiring, sends);
        while (0..insts.len()).any(|worker| machine.go_on(worker)) {}
        report(&machine, programs).map_err(|faults| (sends, faults))
    };
    let mut reports = Sends::ALL.into_iter().map(run).collect::<Result<Vec<_>, _>>()?;
    let first = reports.swap_remove(0);
    assert!(reports.iter().all(|r| *r == first), "what a worker holds depends on the kind of sends");
    Ok(first)
}

/// The instructions of a program as they run, if their numbers are small enough.
pub fn written_out(worker: usize, program: &Program) -> Result<Vec<Inst>, Fault> {
    let Program { prologue, period, repeats, shift, version_shift, epilogue } = program;
    let mut parts = vec![(prologue, 0)];
    parts.extend((0..*repeats).map(|repeat| (period, repeat)));
    parts.push((epilogue, *repeats));
    let mut insts = Vec::new();
    for (part, repeat) in parts {
        for inst in part {
            let shifted = inst.shifted((repeat * shift) as isize, (repeat * version_shift) as isize);
            let too_large = || Fault { rule: Rule::Length, worker, at: insts.len(), what: "a number too large".into() };
            insts.push(shifted.ok_or_else(too_large)?);
        }
    }
    Ok(insts)
}
