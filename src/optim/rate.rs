//! Learning rates over time.

/// A learning rate as a function of the number of updates done: linear warm-up, then one of the usual shapes.
#[derive(Clone, Debug, PartialEq)]
pub struct Rate {
    base: f64,
    warmup: u64,
    shape: Shape,
}

#[derive(Clone, Debug, PartialEq)]
enum Shape {
    Constant,
    Step { every: u64, factor: f64 },
    Polynomial { steps: u64, end: f64, power: f64 },
    Cosine { steps: u64, end: f64 },
}

impl Rate {
    /// Always `base`.
    pub fn constant(base: f64) -> Rate {
        Rate { base, warmup: 0, shape: Shape::Constant }
    }

    /// Multiplied by `factor` after every `every` updates.
    pub fn step(base: f64, every: u64, factor: f64) -> Rate {
        Rate { base, warmup: 0, shape: Shape::Step { every: every.max(1), factor } }
    }

    /// From `base` to `end` over `steps` updates as (1 − t/steps)^power, then `end`.
    pub fn polynomial(base: f64, end: f64, steps: u64, power: f64) -> Rate {
        Rate { base, warmup: 0, shape: Shape::Polynomial { steps, end, power } }
    }

    /// From `base` to `end` over `steps` updates along half a cosine (Loshchilov and Hutter 2017), then `end`.
    pub fn cosine(base: f64, end: f64, steps: u64) -> Rate {
        Rate { base, warmup: 0, shape: Shape::Cosine { steps, end } }
    }

    /// Rises from `base`/`updates` to `base` over the first `updates` updates; the shape begins after them.
    pub fn warmup(self, updates: u64) -> Rate {
        Rate { warmup: updates, ..self }
    }

    /// The rate of update `t`, from 0.
    pub fn at(&self, t: u64) -> f64 {
        if t < self.warmup {
            return self.base * (t + 1) as f64 / self.warmup as f64;
        }
        let t = t - self.warmup;
        let part = |steps: u64| if t >= steps { 1.0 } else { t as f64 / steps as f64 };
        match self.shape {
            Shape::Constant => self.base,
            Shape::Step { every, factor } => self.base * factor.powf((t / every) as f64),
            Shape::Polynomial { steps, end, power } => end + (self.base - end) * (1.0 - part(steps)).powf(power),
            Shape::Cosine { steps, end } => {
                end + (self.base - end) * 0.5 * (1.0 + (std::f64::consts::PI * part(steps)).cos())
            }
        }
    }
}

impl From<f64> for Rate {
    fn from(base: f64) -> Rate {
        Rate::constant(base)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes() {
        assert_eq!(Rate::constant(0.1).at(1000), 0.1);
        let warm = Rate::constant(1.0).warmup(4);
        assert_eq!([0, 1, 2, 3, 4].map(|t| warm.at(t)), [0.25, 0.5, 0.75, 1.0, 1.0]);
        let step = Rate::step(1.0, 10, 0.5).warmup(2);
        assert_eq!([2, 11, 12, 22].map(|t| step.at(t)), [1.0, 1.0, 0.5, 0.25]);
        let poly = Rate::polynomial(1.0, 0.2, 4, 2.0);
        assert!([(0, 1.0), (2, 0.4), (4, 0.2), (9, 0.2)].iter().all(|&(t, r)| (poly.at(t) - r).abs() < 1e-15));
        let cosine = Rate::cosine(1.0, 0.0, 10);
        assert!((cosine.at(5) - 0.5).abs() < 1e-15 && cosine.at(10) < 1e-15 && cosine.at(0) == 1.0);
    }
}
