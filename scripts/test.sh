#!/usr/bin/env bash
# Runs cargo test with the given arguments and ends with one line for all of its test binaries: "N passed, N failed, N skipped".
# Ends with cargo's status. A test that cannot run here says "skipped: …" on a line of its own and counts as skipped.
set -uo pipefail
log=$(mktemp)
trap 'rm -f "$log"' EXIT
cargo test "$@" 2>&1 | tee "$log"
status=$?
awk '
  /^test result:/ { for (i = 2; i <= NF; i++) { if ($i == "passed;") passed += $(i-1); if ($i == "failed;") failed += $(i-1); if ($i == "ignored;") skipped += $(i-1) } }
  /^skipped: / { skipped++ }
  END { printf "%d passed, %d failed, %d skipped\n", passed, failed, skipped }
' "$log"
exit $status
