#!/usr/bin/env bash
# Times the kernels, then VGG-16 at 32×32, batch 32, whenever the machine is quiet: PipeDream on two ranks of one core each
# against one rank on one core, in turn, and compares the medians. BUSY=1 does not wait for quiet.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/mpi-env.sh

program=${CARGO_TARGET_DIR:-target}/release/pipewright
rounds=${ROUNDS:-5}
steps=${STEPS:-24}
results=$(mktemp -d)
. scripts/quiet.sh
trap 'rm -rf "$results"' EXIT

[ "${KERNELS:-1}" = 0 ] || cargo bench --features mpi

# Times steps on $1 ranks, each bound to a core of its own, with the flags that follow the file $2 in which the result is kept.
step() {
  ranks=$1 file=$2
  shift 2
  timeout -k 5 600 mpirun --bind-to core -n "$ranks" "$program" bench step --schedule pipedream --quiet --json "$@" \
    | tail -n 1 >> "$file"
}

for round in $(seq "$rounds"); do
  echo "bench: round $round of $rounds"
  for ranks in 1 2; do
    quiet
    step "$ranks" "$results/$ranks" --model vgg16 --data synthetic:32x32x3:10 --batch 32 --steps "$steps"
  done
done
# Hardly any compute: what is left is the runtime and the transport.
step 2 "$results/small" --model mlp --width 8 --data synthetic:4x4x1:2 --batch 1 --steps 2000

# The median of the jq expression $1 over the results in file $2.
median() { jq -s "map($1) | sort | .[(length - 1) / 2 | floor]" "$2"; }
jq -n -r --argjson one "$(median .samples_per_s "$results/1")" --argjson two "$(median .samples_per_s "$results/2")" \
  --argjson allowed "$(median '(.busy | add / max)' "$results/2")" \
  --argjson gflops1 "$(median .gflops_per_core "$results/1")" --argjson gflops2 "$(median .gflops_per_core "$results/2")" \
  --argjson small "$(cat "$results/small")" '
  def r: . * 100 | round / 100;
  "bench: vgg16, one rank: \($one | r) samples/s, \($gflops1 | r) GFLOP/s a core",
  "bench: vgg16, two ranks: \($two | r) samples/s, \($gflops2 | r) GFLOP/s a core",
  "bench: \($two / $one | r) times as fast; the split allows \($allowed | r) (total time / slowest stage): \($two / $one / $allowed * 100 | r) % of it",
  "bench: \($small.overhead_us | r) µs of overhead an instruction over MPI, of \($small.instructions | add) instructions of a small model"'
