//! The program as a process of its own.
use serde_json::Value;
use std::process::{Command, Output, Stdio};

pub const PROGRAM: &str = env!("CARGO_BIN_EXE_pipewright");
/// Small images of few classes: quick.
pub const DATA: &str = "synthetic:8x8x1:4:96";

pub fn command(args: &[&str]) -> Command {
    let mut c = Command::new(PROGRAM);
    c.args(args).stdin(Stdio::null());
    // An inherited launcher would make a rank of it.
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("OMPI_") || name.starts_with("PMI")) {
        c.env_remove(name);
    }
    c
}

pub fn text(out: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr))
}

/// The JSON object that a command prints last.
pub fn json(args: &[&str]) -> Value {
    let out = command(args).output().expect("the program runs");
    assert!(out.status.success(), "{args:?}: {}", text(&out));
    let stdout = String::from_utf8_lossy(&out.stdout);
    let last = stdout.lines().last().unwrap_or_default();
    serde_json::from_str(last).unwrap_or_else(|e| panic!("{args:?}: {e}: {last}"))
}

/// A command that must fail, with an error on standard error that holds `words`, and without a panic.
pub fn fails(args: &[&str], words: &[&str]) {
    let out = command(args).output().expect("the program runs");
    let said = String::from_utf8_lossy(&out.stderr).to_string();
    assert!(!out.status.success(), "{args:?} succeeded: {}", text(&out));
    assert!(!said.contains("panicked"), "{args:?}: {said}");
    for word in words {
        assert!(said.contains(word), "{args:?}: {word:?} expected in {said:?}");
    }
}

pub fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

pub fn path(folder: &tempfile::TempDir, name: &str) -> String {
    folder.path().join(name).to_str().expect("a readable name").to_string()
}
