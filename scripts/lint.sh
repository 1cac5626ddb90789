#!/usr/bin/env bash
# Format, clippy with and without MPI, and the documentation, all without a warning.
set -euo pipefail
cargo fmt --check
cargo clippy --all-targets --features mpi -- -D warnings
cargo clippy --all-targets -- -D warnings
RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --features mpi
