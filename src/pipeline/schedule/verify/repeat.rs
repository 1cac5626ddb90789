//! Recognising that a state repeats, relative to the micro-batches and versions that have gone by.

/// How many states are compared with a remembered one before a later one is remembered, and so the longest cycle, in repeats,
/// that is found. Cycles are one repeat long unless a schedule is strange.
pub(super) const WINDOW: usize = 32;

/// Remembers a state at turns 1, 2, 4, 8 …, and compares those that follow.
pub(super) struct Cycles<S> {
    remembered: Option<(usize, S)>,
}

impl<S: PartialEq> Cycles<S> {
    pub(super) fn new() -> Cycles<S> {
        Cycles { remembered: None }
    }

    /// Whether [`see`](Cycles::see) does anything with the state of a turn: those are made only then.
    pub(super) fn wants(&self, turn: usize) -> bool {
        turn.is_power_of_two() || self.remembered.as_ref().is_some_and(|(then, _)| turn - then <= WINDOW)
    }

    /// Shows the state of `turn`; the number of turns since the same state was seen, if it was.
    pub(super) fn see(&mut self, turn: usize, state: S) -> Option<usize> {
        if let Some((then, old)) = &self.remembered
            && *old == state
        {
            return Some(turn - then);
        }
        if turn.is_power_of_two() {
            self.remembered = Some((turn, state));
        }
        None
    }
}
