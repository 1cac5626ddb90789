//! Where tensors live and their arithmetic is done.
use super::{
    Backend, Pool, PoolStats,
    cpu::{Cpu, Isa},
    machine::Machine,
    meta::Meta,
    reference::Reference,
};
use crate::Result;
use std::{
    fmt,
    sync::{Arc, OnceLock},
};

/// A device: a backend and its memory. Cheap to clone; two are equal if they are the same one, and tensors of different
/// devices do not mix.
#[derive(Clone)]
pub struct Device(Arc<dyn Backend>);

/// How the cores of this machine are used. Results are the same bits for any number of threads, but not across the others.
///
/// Numbers that are not finite are products with zeros in places: in causal attention a token that has one spoils up to 55 tokens
/// before it, which do not see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuOptions {
    /// Threads of each kernel, 1 to 4096.
    pub threads: usize,
    /// The vector instructions.
    pub isa: Isa,
    /// Whether 3×3 convolutions of stride 1 take 4 products for 9 where that pays (Winograd's F(2×2, 3×3)). Their rounding error
    /// stays within four times that of plain sums; a pixel that is not finite spoils the outputs of its whole 2×2 tile.
    pub winograd: bool,
}

impl CpuOptions {
    /// One thread, everything on.
    pub fn new(isa: Isa) -> CpuOptions {
        CpuOptions { threads: 1, isa, winograd: true }
    }
}

impl Device {
    /// The executable specification: plain loops that accumulate in `f64`. One for the process.
    pub fn reference() -> Device {
        static ONE: OnceLock<Device> = OnceLock::new();
        ONE.get_or_init(|| Device(Arc::new(Reference::new()))).clone()
    }

    /// A new device whose tensors have shapes but no data; it counts the operations and bytes that work would take.
    pub fn meta() -> Device {
        Device(Arc::new(Meta::new(None)))
    }

    /// The same; it also counts the seconds that each kernel would take on a machine.
    ///
    /// # Errors
    /// If there can be no such machine.
    pub fn meta_of(machine: Machine) -> Result<Device> {
        machine.check()?;
        Ok(Device(Arc::new(Meta::new(Some(machine)))))
    }

    /// The process's meta device for shapes that nothing is counted of.
    pub(crate) fn shapes() -> Device {
        static ONE: OnceLock<Device> = OnceLock::new();
        ONE.get_or_init(Device::meta).clone()
    }

    /// A new device on this machine's cores whose kernels use `threads` threads (1 to 4096): the caller's and others of its
    /// own. The vector instructions are those of [`Isa::chosen`].
    ///
    /// # Errors
    /// If there can be no such number of threads or they cannot be started, or `PIPEWRIGHT_ISA` names instructions that this machine lacks.
    pub fn cpu(threads: usize) -> Result<Device> {
        Device::cpu_with(CpuOptions { threads, ..CpuOptions::new(Isa::chosen()?) })
    }

    /// Like [`cpu`](Device::cpu), as `options` say.
    ///
    /// # Errors
    /// If there can be no such number of threads or they cannot be started, or this machine lacks the instructions.
    pub fn cpu_with(options: CpuOptions) -> Result<Device> {
        Ok(Device(Arc::new(Cpu::new(options)?)))
    }

    /// What it can do.
    pub fn backend(&self) -> &dyn Backend {
        &*self.0
    }

    /// Its memory.
    pub fn pool(&self) -> &Arc<Pool> {
        self.0.pool()
    }

    /// The counters of its memory.
    pub fn memory(&self) -> PoolStats {
        self.0.pool().stats()
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Device) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({})", self.0.name())
    }
}
