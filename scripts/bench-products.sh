#!/usr/bin/env bash
# Times the matrix products of the seven cases, with operands from beyond a core's own caches, ours and PyTorch's (MKL) in turn, and
# prints for each what a tenth of the times reaches in the best round, the share of multiply-adds in registers, and the ratio.
# $TORCH_PYTHON names a Python that has torch; without it ours are timed alone. ROUNDS (3) and THREADS (1) may be set.
set -euo pipefail
cd "$(dirname "$0")/.."

program=${CARGO_TARGET_DIR:-target}/release/pipewright
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
. scripts/quiet.sh

[ -n "${TORCH_PYTHON:-}" ] || echo "bench: TORCH_PYTHON names no Python with torch: ours alone"
for _ in $(seq "${ROUNDS:-3}"); do
  quiet
  timeout -k 5 600 "$program" bench products --threads "${THREADS:-1}" --json > "$results/last"
  cat "$results/last" >> "$results/ours"
  [ -z "${TORCH_PYTHON:-}" ] || jq -r '.products[].product' "$results/last" \
    | timeout -k 5 600 "$TORCH_PYTHON" benches/peers/pytorch.py products "${THREADS:-1}" >> "$results/theirs"
done

touch "$results/theirs"
jq -n -r --slurpfile ours "$results/ours" --slurpfile theirs "$results/theirs" '
  def r: . * 100 | round / 100;
  def best(all; name): [all[].products[] | select(.product == name)] | max_by(.best_gflops);
  [$ours[0] | .threads as $threads | .products[].product | . as $name
    | best($ours; $name) as $o | best($theirs; $name) as $t
    | {$name, gflops: $o.best_gflops, share: ($o.best_gflops / $o.peak_gflops / $threads),
       ratio: (if $t then $o.best_gflops / $t.best_gflops else null end)}]
  | (.[] | "\(.name)\(" " * (20 - (.name | length))) \(.gflops | round) GFLOP/s, \(.share * 100 | round) % of multiply-adds in registers"
      + (if .ratio then ", \(.ratio | r) times MKL" else "" end)),
    (map(.ratio // empty) | if length > 0 then "bench: \(map(log) | add / length | exp | r) times MKL (geometric mean)" else empty end)'
