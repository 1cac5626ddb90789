#!/usr/bin/env bash
# Predicted beside measured throughput of VGG-16 at 32×32 on this machine: each run profiles, measures its links, plans and predicts, and
# then trains. Cases: a straight pipeline, one whose stages are unequal (the second has twice the work of the first), three ranks (`2-1`),
# data parallelism, and a straight pipeline of two hosts behind a slow link (network namespaces; needs root and iproute2). Prints for
# each case the medians over all rounds and the ratio predicted / measured, and for each part of a worker's time how far off it was.
# ROUNDS (1), STEPS (48), RATE (300mbit), CASES (all) and PROGRAM may be set; BUSY=1 does not wait for quiet.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/mpi-env.sh

program=$(readlink -f "${PROGRAM:-${CARGO_TARGET_DIR:-target}/release/pipewright}")
rounds=${ROUNDS:-1}
steps=${STEPS:-48}
rate=${RATE:-300mbit}
cases=${CASES:-straight skewed 2-1 data-parallel two-hosts}
results=$(mktemp -d)
. scripts/quiet.sh
trap 'scripts/hosts.sh down 2; rm -rf "$results"' EXIT
echo 'cuts = ["conv2d6"]' > "$results/skewed.toml"

# The report of a run, started by the words before --, of the train options that follow, in the file of case $1.
run() {
  local case=$1 start=()
  shift
  while [ "$1" != -- ]; do
    start+=("$1")
    shift
  done
  shift
  timeout -k 5 600 "${start[@]}" "$program" train --model vgg16 --data synthetic:32x32x3:10:100000 --steps "$steps" --quiet --json "$@" \
    2> /dev/null | sed -n '/^{/,$p' | jq -c . >> "$results/$case"
}

for round in $(seq "$rounds"); do
  for case in $cases; do
    quiet
    case $case in
      straight) run "$case" mpirun --bind-to core -n 2 -- --plan 1-1 --batch 32 ;;
      skewed) run "$case" mpirun --bind-to core -n 2 -- --plan "$results/skewed.toml" --batch 32 ;;
      2-1) run "$case" mpirun --bind-to none -n 3 -- --plan 2-1 --batch 32 ;;
      data-parallel) run "$case" mpirun --bind-to core -n 2 -- --plan 2 --batch 32 ;;
      two-hosts)
        scripts/hosts.sh up 2 "$rate"
        run "$case" scripts/hosts.sh run 2 -- --width 4096 --plan 1-1 --batch 64
        scripts/hosts.sh down 2
        ;;
      *)
        echo "bench: there is no case $case" >&2
        exit 2
        ;;
    esac
  done
done

echo "bench: VGG-16 32×32, $steps minibatches, rounds: $rounds; samples per second, and milliseconds a minibatch on the average worker"
echo '| case | predicted | measured | ratio | of all rounds | compute | communication | waiting |'
echo '|---|---|---|---|---|---|---|---|'
for case in $cases; do
  jq -s -r --arg case "$case" '
    def median: sort | .[(length - 1) / 2 | floor];
    def r(n): . * n | round / n;
    def part(name): map([.comparison.predicted, .comparison.measured] | map(map(.[name]) | add / length * 1000)) |
      "\(map(.[0]) | median | r(10)) → \(map(.[1]) | median | r(10))";
    map(.predicted_samples_per_s / .samples_per_s) as $ratios |
    "| \($case) | \(map(.predicted_samples_per_s) | median | r(10)) | \(map(.samples_per_s) | median | r(10)) | \($ratios | median | r(1000)) | " +
    "\($ratios | sort | map(r(100)) | join(" ")) | \(part("compute")) | \(part("communication")) | \(part("waiting")) |"' "$results/$case"
done
for case in $cases; do jq -s -c '[.[] | .predicted_samples_per_s / .samples_per_s] | sort | .[(length - 1) / 2 | floor]' "$results/$case"; done |
  jq -s -r 'max_by([., 1 / .] | max) | "bench: the worst ratio is \(. * 1000 | round / 1000)"'
