//! Which vector instructions the kernels use.
use super::lanes::{Lanes, Vectors};
use crate::{Error, Result};
use std::fmt;

/// A set of vector instructions, from the least to the most capable. Results are the same bits for any number of threads,
/// but not across these.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// What every machine of this architecture has.
    Portable,
    /// AVX2 with FMA.
    Avx2,
    /// AVX-512 (F, BW, DQ and VL).
    Avx512,
}

impl Isa {
    /// Every set there is.
    pub const ALL: [Isa; 3] = [Isa::Portable, Isa::Avx2, Isa::Avx512];

    /// The sets that this machine has.
    pub fn available() -> Vec<Isa> {
        Isa::ALL.into_iter().filter(|i| i.is_available()).collect()
    }

    /// The most capable set of this machine, or the lower one that the environment variable `PIPEWRIGHT_ISA` names.
    ///
    /// # Errors
    /// If the variable names a set that does not exist or that this machine lacks.
    pub fn chosen() -> Result<Isa> {
        let best = || Isa::ALL.into_iter().rfind(|i| i.is_available()).unwrap_or(Isa::Portable);
        Ok(Isa::demanded()?.unwrap_or_else(best))
    }

    /// The set that the environment variable `PIPEWRIGHT_ISA` names, if it is set.
    ///
    /// # Errors
    /// If it names a set that does not exist or that this machine lacks.
    pub fn demanded() -> Result<Option<Isa>> {
        std::env::var_os("PIPEWRIGHT_ISA").map(|name| Isa::named(&name.to_string_lossy())).transpose()
    }

    fn named(name: &str) -> Result<Isa> {
        let found = Isa::available().into_iter().find(|i| i.name() == name);
        found.ok_or_else(|| Error::config(format!("PIPEWRIGHT_ISA: this machine has {}, got {name:?}", names())))
    }

    /// Its name in `PIPEWRIGHT_ISA`.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn is_available(self) -> bool {
        let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        match self {
            Isa::Portable => true,
            Isa::Avx2 => avx2,
            Isa::Avx512 => {
                avx2 && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn is_available(self) -> bool {
        self == Isa::Portable
    }
}

fn names() -> String {
    Isa::available().iter().map(|i| i.name()).collect::<Vec<_>>().join(", ")
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A set of instructions that this machine was found to have: the proof on which calls into code compiled for it rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Simd(Isa);

impl Simd {
    pub(crate) fn new(isa: Isa) -> Result<Simd> {
        if isa.is_available() {
            Ok(Simd(isa))
        } else {
            Err(Error::device(format!("cpu: this machine has no {isa}, only {}", names())))
        }
    }

    pub(crate) fn isa(self) -> Isa {
        self.0
    }

    /// Runs `job` compiled for these instructions.
    pub(crate) fn run<J: Job>(self, job: J) -> J::Out {
        match self.0 {
            // SAFETY: a `Simd` is only made after `is_available` was true of its set.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { with_avx512(job) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { with_avx2(job) },
            _ => job.run(),
        }
    }
}

/// Plain loops that become vector code. Implementations mark `run` `inline(always)`: only then are its loops compiled anew, for
/// each set of instructions, in the callers below. (A function handed over as `impl FnOnce` is called through a shim that is not
/// inlined for sure.)
pub(crate) trait Job {
    type Out;
    fn run(self) -> Self::Out;
}

/// Loops written with the vectors of whichever instructions there are. Implementations mark `run` `inline(always)`.
pub(crate) trait VectorJob {
    type Out;
    fn run<L: Lanes>(self, v: Vectors<L>) -> Self::Out;
}

impl Simd {
    /// Runs `job` with the widest vectors of these instructions.
    pub(crate) fn vectors<J: VectorJob>(self, job: J) -> J::Out {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => self.run(WithVectors::<_, std::arch::x86_64::__m512>(job, std::marker::PhantomData)),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => self.run(WithVectors::<_, std::arch::x86_64::__m256>(job, std::marker::PhantomData)),
            _ => self.run(WithVectors::<_, [f32; 4]>(job, std::marker::PhantomData)),
        }
    }
}

/// A job with the vectors that belong to the instructions it is run with.
struct WithVectors<J, L>(J, std::marker::PhantomData<L>);

impl<J: VectorJob, L: Lanes> Job for WithVectors<J, L> {
    type Out = J::Out;
    #[inline(always)]
    fn run(self) -> J::Out {
        // SAFETY: made in `Simd::vectors` only, which chooses L by the instructions that `Simd::run` compiles for.
        self.0.run(unsafe { Vectors::<L>::new() })
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn with_avx512<J: Job>(job: J) -> J::Out {
    job.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn with_avx2<J: Job>(job: J) -> J::Out {
    job.run()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_name_says_what_is_possible() {
        let e = Isa::named("sse9").unwrap_err().to_string();
        assert!(e.contains("portable") && e.contains("\"sse9\""), "{e}");
        assert_eq!(Isa::named("portable").unwrap(), Isa::Portable);
    }
}
