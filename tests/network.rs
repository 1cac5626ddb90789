//! Ranks on hosts of their own, behind links of a limited rate, train as threads do, and neighbouring stages share a host. The lines
//! of docs/launching.md do what they say. Needs root and iproute2 for all with several hosts.
#![cfg(feature = "mpi")]
mod launcher;

use std::{
    fs,
    path::Path,
    process::{Command, Output},
    sync::{Mutex, MutexGuard, PoisonError},
};

const HOSTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/hosts.sh");

fn hosts(args: &[&str]) -> Output {
    hosts_with(args, &[])
}

fn hosts_with(args: &[&str], env: &[(&str, &str)]) -> Output {
    let mut command = Command::new("timeout");
    command.args(["-k", "5", "120", HOSTS]).args(args).envs(env.iter().copied());
    command.output().expect("timeout and bash")
}

/// There are hosts only once.
static ONE: Mutex<()> = Mutex::new(());

/// Hosts, for as long as this lives.
struct Up {
    count: &'static str,
    _only: MutexGuard<'static, ()>,
}

impl Up {
    /// `None`, and why, where there can be none.
    fn new(n: &'static str, rate: &str) -> Option<Up> {
        let is_root = Command::new("id").arg("-u").output().is_ok_and(|o| o.stdout == b"0\n");
        let has = |program: &str| Command::new("sh").args(["-c", &format!("command -v {program}")]).output();
        let has = |program: &str| has(program).is_ok_and(|o| o.status.success());
        if !launcher::is_there() || !is_root || !["ip", "tc", "taskset", "unshare"].iter().all(|p| has(p)) {
            println!("skipped: needs root, iproute2 and mpirun");
            return None;
        }
        let up = Up { count: n, _only: ONE.lock().unwrap_or_else(PoisonError::into_inner) };
        let made = hosts(&["up", n, rate]);
        if !made.status.success() {
            println!("skipped: no network namespaces here: {}", String::from_utf8_lossy(&made.stderr));
            return None;
        }
        Some(up)
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        hosts(&["down", self.count]);
    }
}

fn weights(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stdout);
    let json = &text[text.find('{').unwrap_or(0)..];
    let json: serde_json::Value =
        serde_json::from_str(json).unwrap_or_else(|e| panic!("{e}: {text}{}", String::from_utf8_lossy(&output.stderr)));
    json["weights_sha256"].as_str().expect("a hash").to_string()
}

#[test]
fn hosts_train_as_threads_do() {
    let Some(_up) = Up::new("3", "200mbit") else { return };
    let program = env!("CARGO_BIN_EXE_pipewright");
    let task = ["train", "--model", "mlp", "--data", "synthetic:8x8x1:4:512:64", "--batch", "16", "--deterministic"];
    let task = [&task[..], &["--steps", "20", "--quiet", "--json"]].concat();
    for (schedule, plan) in [("pipedream", "2-1"), ("1f1b", "2-1"), ("pipedream", "1-1-1"), ("pipedream", "3")] {
        let task = [&task[..], &["--schedule", schedule, "--plan", plan]].concat();
        let threads = Command::new(program).args(&task).args(["--workers", "3"]).output().expect("the program");
        let ranks = hosts(&[&["run", "3", program], &task[..]].concat());
        assert_eq!(weights(&ranks), weights(&threads), "{schedule} {plan}");
    }
}

/// The stages' workers in a run's plan.
fn workers(out: &Path) -> Vec<Vec<usize>> {
    let text = fs::read_to_string(out.join("plan.toml")).expect("the plan of the run");
    let plan: toml::Table = text.parse().expect("a plan is TOML");
    let number = |w: &toml::Value| usize::try_from(w.as_integer().expect("a worker")).expect("a worker");
    let of = |stage: &toml::Value| match stage.get("worker") {
        Some(worker) => vec![number(worker)],
        None => stage["workers"].as_array().expect("workers").iter().map(number).collect(),
    };
    plan["stage"].as_array().expect("stages").iter().map(of).collect()
}

/// Two hosts of two ranks, numbered either way: only one cut crosses the slow link, and all computes the same.
#[test]
fn neighbouring_stages_share_a_host() {
    let Some(_up) = Up::new("2", "200mbit") else { return };
    let program = env!("CARGO_BIN_EXE_pipewright");
    let task =
        ["train", "--model", "mlp", "--data", "synthetic:8x8x1:4:512:64", "--batch", "16", "--steps", "8", "--json"];
    let said = |o: &Output| String::from_utf8_lossy(&o.stderr).into_owned();
    let mut shared = 0;
    for (map_by, host) in [("node", (|r| r % 2) as fn(usize) -> usize), ("slot", |r| r / 2)] {
        let env = [("RANKS_PER_HOST", "2"), ("MAP_BY", map_by)];
        for plan in ["1-1-1-1", "2-2", "auto"] {
            let folder = tempfile::tempdir().expect("a folder");
            let out = folder.path().display().to_string();
            let args = [&["run", "2", program], &task[..], &["--plan", plan, "--out", &out]].concat();
            let output = hosts_with(&args, &env);
            assert!(output.status.success(), "{map_by} {plan}: {}", said(&output));
            // The host of each worker in the order of the stages: it changes once.
            let of: Vec<usize> = workers(folder.path()).concat().into_iter().map(host).collect();
            assert_eq!(of.len(), 4, "{map_by} {plan}: {of:?}");
            let changes = of.windows(2).filter(|w| w[0] != w[1]).count();
            assert_eq!(changes, 1, "{map_by} {plan}: stages on hosts {of:?}");
            assert!(said(&output).contains("4 ranks on 2 hosts; within a host"), "{}", said(&output));
            shared += usize::from(said(&output).contains("shared by the ranks of a host"));
            let text = fs::read_to_string(folder.path().join("topology.toml")).expect("the topology of the run");
            let topology = pipewright::pipeline::topology::Topology::from_text(&text).expect("a topology");
            let [inside, across] = topology.levels() else { panic!("two levels expected in {text}") };
            assert_eq!([inside.count, across.count], [2, 2]);
            // 25 MB/s, and what a link lets pass at once; memory is faster.
            assert!(across.link.bandwidth < 50e6 && inside.link.bandwidth > across.link.bandwidth, "{text}");
        }
        let task = [&task[..], &["--deterministic", "--plan", "2-1-1", "--quiet"]].concat();
        let ranks = hosts_with(&[&["run", "2", program], &task[..]].concat(), &env);
        let threads = Command::new(program).args(&task).args(["--workers", "4"]).output().expect("the program");
        assert_eq!(weights(&ranks), weights(&threads), "{map_by}");
    }
    // What else this machine does may disturb a measurement, but not most of them.
    assert!(shared > 0, "the ranks of a host share its link, no run of 6 says so");
}

/// The lines of a block of docs/launching.md that has this text, in its words but for paths, addresses and what is left open.
fn documented(text: &str, open: &str, out: &str) -> String {
    let page = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/launching.md")).expect("the page");
    let mut blocks = page.split("```").skip(1).step_by(2).filter(|b| b.contains(text));
    let block = blocks.next().unwrap_or_else(|| panic!("no block with {text:?}"));
    let is_left = |c: char| "…<>".contains(c);
    let lines = [("target/release/pipewright", env!("CARGO_BIN_EXE_pipewright")), ("…", open), ("/shared/run", out)]
        .iter()
        .fold(block.to_string(), |b, (from, to)| {
            assert!(b.contains(from) || *from == "/shared/run", "{from:?} expected in {b}");
            b.replace(from, to)
        });
    assert!(!lines.contains(is_left), "{lines}");
    lines
}

const OPEN: &str = "--model mlp --data synthetic:8x8x1:4:512:64 --batch 16 --steps 8 --json --quiet --deterministic";

#[test]
fn the_documented_line_for_one_host_runs() {
    if !launcher::is_there() {
        return;
    }
    let lines = documented("mpi-env.sh", OPEN, "");
    let run = |command: &mut Command| {
        weights(&command.current_dir(env!("CARGO_MANIFEST_DIR")).output().expect("timeout and a program"))
    };
    let as_documented = run(Command::new("timeout").args(["-k", "5", "120", "bash", "-euc", &lines]));
    // The settings of scripts/mpi-env.sh are those of all tests.
    let options = OPEN.split(' ').chain(["--plan", "2-1"]);
    let program = ["mpirun", "--bind-to", "none", "-n", "3", env!("CARGO_BIN_EXE_pipewright"), "train"];
    let mut timed = Command::new("timeout");
    let as_tested = launcher::configure(timed.args(["-k", "5", "120"]).args(program).args(options));
    assert_eq!(as_documented, run(as_tested));
}

#[test]
fn the_documented_line_for_several_hosts_runs() {
    let Some(_up) = Up::new("2", "200mbit") else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).display().to_string();
    fs::write(path("hosts"), "10.98.0.1 slots=2\n10.98.0.2 slots=2\n").expect("a folder of our own");
    let lines = documented("--hostfile hosts", OPEN, &path("run"));
    let lines = lines
        .replace("10.0.0.0/24", "10.98.0.0/24")
        .replace("--hostfile hosts", &format!("--hostfile {}", path("hosts")));
    let output = hosts(&["reach", "bash", "-euc", &lines]);
    assert!(!weights(&output).is_empty());
    let of: Vec<usize> = workers(&folder.path().join("run")).concat();
    assert_eq!(of.len(), 4);
    assert!(of[0] % 2 == of[1] % 2 && of[2] % 2 == of[3] % 2, "neighbours on one host expected: {of:?}");
}
