//! What the workers of a stage tell each other beside gradients.
use super::Share;
use crate::{
    Error, Result,
    pipeline::{schedule::MicroBatch, stage::Measured},
};
use std::collections::BTreeMap;

/// What the workers of a stage tell each other beside gradients.
#[derive(Clone, Debug, Default)]
pub struct Notes {
    /// What the loss measured.
    pub measured: Vec<Measured>,
    /// The statistics of each micro-batch, as many numbers for each.
    pub stats: BTreeMap<MicroBatch, Vec<f64>>,
    /// Which slots have a gradient.
    present: Vec<bool>,
}

/// Numbers of a note on each micro-batch, before its statistics.
pub(super) const NUMBERS: usize = 4;

impl Notes {
    /// What there is to tell of a worker's shares.
    pub fn new(
        shares: &[Share],
        measured: Vec<Measured>,
        stats: BTreeMap<MicroBatch, Vec<f64>>,
        slots: usize,
    ) -> Notes {
        let present = (0..slots).map(|slot| shares.iter().any(|s| s.grads.get(slot).is_some())).collect();
        Notes { measured, stats, present }
    }

    /// Which slots have a gradient on any worker.
    pub fn present(&self) -> &[bool] {
        &self.present
    }

    pub(super) fn merge(&mut self, other: Notes) {
        self.measured.extend(other.measured);
        self.stats.extend(other.stats);
        self.present.resize(self.present.len().max(other.present.len()), false);
        self.present.iter_mut().zip(other.present).for_each(|(a, b)| *a |= b);
    }

    pub(super) fn encode(&self, slots: usize, mbs: &[MicroBatch]) -> Vec<f64> {
        let mut out: Vec<f64> =
            (0..slots).map(|s| if self.present.get(s).copied().unwrap_or(false) { 1.0 } else { 0.0 }).collect();
        for mb in mbs {
            let numbers = self.measured.iter().find(|m| m.mb == *mb).map_or([0.0; NUMBERS], |m| {
                // 1: measured; 2: and right answers counted.
                [if m.correct.is_some() { 2.0 } else { 1.0 }, m.loss, m.total, m.correct.unwrap_or(0.0)]
            });
            out.extend(numbers);
            out.extend(self.stats.get(mb).into_iter().flatten());
        }
        out
    }

    pub(super) fn decode(numbers: &[f64], slots: usize, mbs: &[MicroBatch], stats: usize) -> Result<Notes> {
        let want = slots + mbs.len() * (NUMBERS + stats);
        if numbers.len() != want {
            return Err(Error::transport(format!("a note of {want} numbers expected, got {}", numbers.len())));
        }
        let (present, rest) = numbers.split_at(slots);
        let mut notes = Notes { present: present.iter().map(|&p| p > 0.0).collect(), ..Notes::default() };
        for (&mb, of_mb) in mbs.iter().zip(rest.chunks_exact(NUMBERS + stats)) {
            let (measured, stats) = of_mb.split_at(NUMBERS);
            if let [kind, loss, total, correct] = *measured
                && kind > 0.0
            {
                notes.measured.push(Measured { mb, loss, total, correct: (kind > 1.0).then_some(correct) });
            }
            notes.stats.insert(mb, stats.to_vec());
        }
        Ok(notes)
    }
}
