#!/usr/bin/env bash
# Runs all of cargo's tests with the given arguments and ends with one line for all test binaries: "N passed, N failed,
# N skipped". Ends with cargo's status; a failure that no test reported (a build, a crash) counts as one. A test that cannot
# run here says "skipped: …" on a line of its own: it counts as skipped, not as passed.
set -uo pipefail
log=$(mktemp)
trap 'rm -f "$log"' EXIT
cargo test --no-fail-fast "$@" 2>&1 | tee "$log"
status=${PIPESTATUS[0]}
awk -v status="$status" '
  /^test result:/ {
    for (i = 2; i <= NF; i++) {
      if ($i == "passed;") passed += $(i-1)
      if ($i == "failed;") failed += $(i-1)
      if ($i == "ignored;") skipped += $(i-1)
    }
  }
  /skipped: / { unable++ }
  END {
    if (status && !failed) failed = 1
    printf "%d passed, %d failed, %d skipped\n", passed - unable, failed, skipped + unable
  }
' "$log"
exit "$status"
