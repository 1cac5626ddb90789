//! How parameters start: Philox at (seed, name), so that it does not depend on the partition.
use crate::{
    Result,
    tensor::{DType, Device, Philox, Tensor},
};

/// A distribution to start from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// All equal.
    Constant(f64),
    /// Uniform in [−bound, bound).
    Uniform {
        /// The bound.
        bound: f64,
    },
    /// Normal with mean 0.
    Normal {
        /// The standard deviation.
        std: f64,
    },
}

impl Init {
    /// Uniform with bound √(1/fan_in): the usual start of linear and convolution layers (He et al. 2015 with a = √5), also of
    /// their biases.
    pub fn fan_in(fan_in: usize) -> Init {
        Init::Uniform { bound: (1.0 / fan_in.max(1) as f64).sqrt() }
    }

    /// Normal with standard deviation √(2/fan_in): He et al. 2015, for layers followed by a ReLU.
    pub fn kaiming(fan_in: usize) -> Init {
        Init::Normal { std: (2.0 / fan_in.max(1) as f64).sqrt() }
    }

    /// Uniform with bound √(6/(fan_in + fan_out)): Glorot and Bengio 2010.
    pub fn xavier(fan_in: usize, fan_out: usize) -> Init {
        Init::Uniform { bound: (6.0 / (fan_in + fan_out).max(1) as f64).sqrt() }
    }

    /// The first version of the parameter `name`.
    pub fn make(self, seed: u64, name: &str, shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
        let rng = Philox::new(seed, 0, name);
        match self {
            Init::Constant(value) => Tensor::full(value, shape, dtype, device),
            Init::Uniform { bound } => device.uniform(rng, -bound, bound, shape, dtype),
            Init::Normal { std } => device.normal(rng, std, shape, dtype),
        }
    }
}
