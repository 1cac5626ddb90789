//! Programs that are right, and changes after which they may not be.
mod bases;
mod edits;

pub use bases::{Base, base, long, rewritten};
pub use edits::{gather, mutant};

use pipewright::tensor::Philox;

/// Numbers drawn one after the other, the same in every run.
pub struct Draw {
    rng: Philox,
    drawn: u64,
}

impl Draw {
    pub fn new(seed: u64) -> Draw {
        Draw { rng: Philox::new(seed, 0, "mutations"), drawn: 0 }
    }

    /// A number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        self.drawn += 1;
        self.rng.below(0, self.drawn, n as u64) as usize
    }

    /// True once in `n` times.
    pub fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// One of them.
    pub fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }
}
