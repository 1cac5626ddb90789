#!/usr/bin/env bash
# Times the kernels, then VGG-16 at 32×32, batch 32: PipeDream on two ranks of one core each against one rank on one core, in
# turn, and compares the medians.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/mpi-env.sh

program=${CARGO_TARGET_DIR:-target}/release/pipewright
rounds=${ROUNDS:-5}
steps=${STEPS:-24}
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT

cargo bench --features mpi

# Trains on $1 ranks, each bound to a core of its own, and keeps the result in the file $2.
train() {
  timeout -k 5 600 mpirun --bind-to core -n "$1" "$program" train --model vgg16 --data synthetic:32x32x3:10 --schedule pipedream \
    --batch 32 --steps "$steps" --json | tail -n 1 >> "$2"
}

for round in $(seq "$rounds"); do
  echo "bench: round $round of $rounds"
  train 1 "$results/one"
  train 2 "$results/two"
done

# The median of the jq expression $1 over the results in file $2.
median() { jq -s "map($1) | sort | .[(length - 1) / 2 | floor]" "$2"; }
one=$(median .samples_per_s "$results/one")
two=$(median .samples_per_s "$results/two")
jq -n -r --argjson one "$one" --argjson two "$two" --argjson efficiency "$(median .efficiency "$results/two")" '
  def round2: . * 100 | round / 100;
  "bench: one rank \($one | round2) samples/s, two ranks \($two | round2) samples/s: \($two / $one | round2) times as many",
  "bench: \($efficiency * 100 | round2) % of what the split allows"'
