//! Ranks on hosts of their own, behind links of a limited rate, train as threads do. Needs root and iproute2.
#![cfg(feature = "mpi")]
use std::process::{Command, Output};

const HOSTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/hosts.sh");

fn hosts(args: &[&str]) -> Output {
    Command::new("timeout").args(["-k", "5", "120", HOSTS]).args(args).output().expect("timeout and bash")
}

/// Hosts, for as long as this lives.
struct Up(&'static str);

impl Up {
    /// `None`, and why, where there can be none.
    fn new(n: &'static str, rate: &str) -> Option<Up> {
        let is_root = Command::new("id").arg("-u").output().is_ok_and(|o| o.stdout == b"0\n");
        let has = |program: &str| Command::new("sh").args(["-c", &format!("command -v {program}")]).output();
        let has = |program: &str| has(program).is_ok_and(|o| o.status.success());
        if !is_root || !["ip", "tc", "mpirun", "taskset", "unshare"].iter().all(|p| has(p)) {
            println!("skipped: needs root, iproute2 and mpirun");
            return None;
        }
        let up = Up(n);
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
        hosts(&["down", self.0]);
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
