//! The launcher of ranks, where there is one.
use std::process::{Command, Stdio};

/// Whether ranks can be started here; says so if not.
pub fn is_there() -> bool {
    let there = Command::new("mpirun").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
    if !there {
        eprintln!("skipped: there is no mpirun here");
    }
    there
}

/// Several ranks on the cores of one machine: what scripts/mpi-env.sh sets, for Open MPI.
pub fn configure(command: &mut Command) -> &mut Command {
    command
        .envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")])
        .envs([("OMPI_MCA_rmaps_base_oversubscribe", "1"), ("OMPI_MCA_mpi_yield_when_idle", "1")])
        .envs([("OMPI_MCA_pml", "ob1"), ("OMPI_MCA_btl", "self,vader"), ("OMPI_MCA_plm", "isolated")])
}
