#!/usr/bin/env bash
# Trains a CNN on Fashion-MNIST as a pipeline of four ranks and checks what came of it. Further arguments go to the program.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/mpi-env.sh

program=${CARGO_TARGET_DIR:-target}/release/pipewright
# A run does not mix with an earlier one in the same folder.
rm -rf runs/demo
result=$(mktemp)
trap 'rm -f "$result"' EXIT

# The last line is the result, for the checks below; the others are for whoever watches.
timeout -k 5 480 mpirun --bind-to none -n 4 "$program" train --model lenet --data fashion-mnist --schedule pipedream \
  --epochs 10 --until 0.905 --out runs/demo --json "$@" | tee "$result" | sed -u '/^{/d' \
  || { echo "demo: training failed" >&2; exit 1; }

# Prints what is expected, and whether the jq expression says so.
expect() {
  if tail -n 1 "$result" | jq -e "$2" > /dev/null; then echo "demo: ok: $1"
  else echo "demo: FAILED: $1" >&2; tail -n 1 "$result" >&2; exit 1
  fi
}
expect 'the result is one JSON object' 'type == "object"'
expect 'four stages on four ranks' '(.stages | length == 4) and ([.stages[].worker] | unique | length == 4)'
expect 'no node in two stages, none without nodes' \
  '([.stages[].nodes[]] | length == (unique | length)) and all(.stages[]; .nodes | length > 0)'
expect 'staleness 3, 2, 1, 0' '[.stages[].staleness] == [3, 2, 1, 0]'
expect 'test accuracy of 0.900 or more' '.test_accuracy >= 0.9'
tail -n 1 "$result" | jq -r '"demo: test accuracy \(.test_accuracy), \(.samples_per_s | floor) samples/s"'
