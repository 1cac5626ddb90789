//! Whether this process is one of several ranks that a launcher (`mpirun`, `srun`) started: known before MPI is.
use std::env;

/// What a launcher says of itself and of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launched {
    /// The launcher, for messages.
    pub by: &'static str,
    /// The number of ranks, where it says so.
    pub size: Option<usize>,
    /// This process.
    pub rank: usize,
    /// This process among those of its host, where it says so.
    pub local_rank: Option<usize>,
    /// The job: the same for all ranks of a host, and for no other job that runs there at the same time.
    pub job: String,
}

/// The launcher of this process, if there is one.
pub fn detect() -> Option<Launched> {
    detect_in(|name| env::var(name).ok())
}

/// [`detect`] with another environment.
fn detect_in(var: impl Fn(&str) -> Option<String>) -> Option<Launched> {
    let number = |name: &str| var(name)?.trim().parse::<usize>().ok();
    let job = |names: &[&str]| {
        let named: Vec<String> = names.iter().filter_map(|n| var(n)).collect();
        // All ranks of a host have one parent: mpirun, its daemon or its proxy.
        if named.is_empty() { format!("parent-{}", parent()) } else { named.join("-") }
    };
    // The variables of a step, not of an allocation: a shell inside `salloc` has the latter but is no rank.
    let slurm = (number("SLURM_STEP_NUM_TASKS"), number("SLURM_PROCID"));
    let slurm_job = || job(&["SLURM_JOB_ID", "SLURM_STEP_ID"]);
    if let (Some(size), Some(rank)) = (number("OMPI_COMM_WORLD_SIZE"), number("OMPI_COMM_WORLD_RANK")) {
        let local_rank = number("OMPI_COMM_WORLD_LOCAL_RANK");
        let job = job(&["PMIX_NAMESPACE"]);
        return Some(Launched { by: "Open MPI's mpirun", size: Some(size), rank, local_rank, job });
    }
    if let (Some(size), Some(rank)) = (number("PMI_SIZE"), number("PMI_RANK")) {
        let local_rank = number("MPI_LOCALRANKID");
        return Some(Launched { by: "MPICH's mpirun", size: Some(size), rank, local_rank, job: job(&["PMI_JOBID"]) });
    }
    if let (Some(size), Some(rank)) = slurm {
        let local_rank = number("SLURM_LOCALID");
        return Some(Launched { by: "srun", size: Some(size), rank, local_rank, job: slurm_job() });
    }
    let rank = number("PMIX_RANK")?;
    Some(Launched { by: "a PMIx launcher", size: None, rank, local_rank: None, job: job(&["PMIX_NAMESPACE"]) })
}

#[cfg(unix)]
fn parent() -> u32 {
    std::os::unix::process::parent_id()
}

#[cfg(not(unix))]
fn parent() -> u32 {
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(vars: &[(&str, &str)]) -> Option<Launched> {
        detect_in(|name| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string()))
    }

    #[test]
    fn knows_the_launchers() -> Result<(), &'static str> {
        let open = with(&[
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_RANK", "2"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
            ("PMIX_NAMESPACE", "17"),
        ]);
        let open = open.ok_or("Open MPI")?;
        assert_eq!((open.size, open.rank, open.local_rank, &open.job[..]), (Some(4), 2, Some(0), "17"));
        let mpich = with(&[("PMI_SIZE", "3"), ("PMI_RANK", "1")]).ok_or("MPICH")?;
        assert_eq!((mpich.size, mpich.rank, mpich.local_rank), (Some(3), 1, None));
        assert!(mpich.job.starts_with("parent-"));
        let slurm = with(&[("SLURM_STEP_NUM_TASKS", "8"), ("SLURM_PROCID", "7"), ("SLURM_JOB_ID", "5")]);
        let slurm = slurm.ok_or("Slurm")?;
        assert_eq!((slurm.size, slurm.rank, &slurm.job[..]), (Some(8), 7, "5"));
        assert_eq!(with(&[("PMIX_RANK", "3")]).ok_or("PMIx")?.size, None);
        Ok(())
    }

    #[test]
    fn a_shell_is_no_rank() {
        assert_eq!(with(&[]), None);
        assert_eq!(with(&[("SLURM_NTASKS", "4"), ("SLURM_PROCID", "0"), ("SLURM_JOB_ID", "5")]), None);
        assert_eq!(with(&[("OMPI_COMM_WORLD_SIZE", "x"), ("OMPI_COMM_WORLD_RANK", "0")]), None);
    }
}
