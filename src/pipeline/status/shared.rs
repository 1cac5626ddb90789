//! A page that the ranks of a host share: a file that has a name only until all have opened it.
use super::{SLOT, Status, words::Words};
use std::{
    fs::{self, OpenOptions},
    path::{Path, PathBuf},
    sync::Arc,
};

/// What tells the page of a process from those of other hosts.
pub(crate) struct Identity {
    path: Option<PathBuf>,
    /// The same for all who share it.
    pub(crate) text: String,
}

impl Status {
    /// Worker `rank` of the `size` workers of a job, whose processes share a page where they can, and what it must tell all
    /// others: see [`Status::shared_by`].
    pub(crate) fn of_job(job: &str, rank: usize, size: usize) -> (Status, Identity) {
        let name: String = job.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        let folder =
            Some(Path::new("/dev/shm")).filter(|p| p.is_dir()).map_or_else(std::env::temp_dir, Path::to_path_buf);
        let path = folder.join(format!("pipewright-{name}"));
        let n = (size + 1) * SLOT;
        let (words, identity) = match open_shared(&path, n) {
            Some((words, text)) => (words, Identity { path: Some(path), text }),
            None => (Words::local(n), Identity { path: None, text: format!("worker {rank}") }),
        };
        let status = Status { page: Arc::new(words), members: Arc::new([rank]), rank, waited: Arc::default() };
        status.enter();
        (status, identity)
    }

    /// The page with its other workers, once all have told all others their identities: all have opened the file then, and it
    /// loses its name.
    pub(crate) fn shared_by(&self, mine: &Identity, all: &[Vec<u8>]) -> Status {
        let same = |(_, other): &(usize, &Vec<u8>)| other.as_slice() == mine.text.as_bytes();
        let members = all.iter().enumerate().filter(same).map(|(rank, _)| rank).collect();
        if let Some(path) = &mine.path {
            // Whoever comes second finds it gone.
            fs::remove_file(path).unwrap_or_default();
        }
        Status { members, ..self.clone() }
    }
}

/// Maps the file, and tells this one from those of other hosts, containers and jobs.
#[cfg(unix)]
fn open_shared(path: &Path, words: usize) -> Option<(Words, String)> {
    use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
    // Only of this user, and no link that somebody else has put there.
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600).custom_flags(libc::O_NOFOLLOW);
    let file = options.open(path).ok()?;
    let words = Words::shared(&file, words).ok()?;
    let meta = file.metadata().ok()?;
    // Two containers may share the file but not the numbers of processes.
    let processes = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    let host = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    Some((words, format!("{}:{}:{}:{}", meta.dev(), meta.ino(), processes.display(), host.trim())))
}

#[cfg(not(unix))]
fn open_shared(_: &Path, _: usize) -> Option<(Words, String)> {
    None
}

#[cfg(test)]
mod tests {
    use super::{
        super::{Doing, Operation},
        *,
    };
    use std::process;

    #[test]
    fn shared_by_name_until_accepted() {
        let job = format!("test {}", process::id());
        let ((a, first), (b, second)) = (Status::of_job(&job, 0, 2), Status::of_job(&job, 1, 2));
        let identities = [&first, &second].map(|i| i.text.clone().into_bytes());
        let (a, b) = (a.shared_by(&first, &identities), b.shared_by(&second, &identities));
        b.begin(Doing::only(Operation::Gather));
        assert_eq!(a.members().last().map(|s| s.doing()), Some(Doing::only(Operation::Gather)));
        assert!(first.path.is_none_or(|p| !p.exists()));
    }
}
