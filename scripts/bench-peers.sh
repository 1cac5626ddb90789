#!/usr/bin/env bash
# Times training steps of seven models, ours and PyTorch's in turn, and prints the medians of the rounds at 1 and 2 threads, with
# the geometric mean of the ratios. $TORCH_PYTHON names a Python that has torch; without it ours are timed alone.
# ROUNDS (3), THREADS ("1 2") and CASES (all) may be set; BUSY=1 does not wait for a quiet machine. WINOGRAD=0 takes convolutions
# without Winograd's products; ISA=avx2 keeps both sides to AVX2.
set -euo pipefail
cd "$(dirname "$0")/.."

program=${CARGO_TARGET_DIR:-target}/release/pipewright
rounds=${ROUNDS:-3}
threads=${THREADS:-1 2}
cases=${CASES:-mlp_b128 lenet_b64 vgg16_32_b32 vgg16_224_b4 resnet18_32_b32 gpt_d256_l6_t128_b8 lstm_d512_l4_t32_b32}
results=$(mktemp -d)
touch "$results/ours" "$results/theirs"

# What was measured, be it cut short; then standard output may be that of a run.
exec 3>&1
report() {
  jq -n -r --slurpfile ours "$results/ours" --slurpfile theirs "$results/theirs" '
  def r(n): if . == null then "-" else . * pow(10; n) | round / pow(10; n) end;
  def mib: if . == null then "-" else . / 1048576 | round end;
  # The median of a field over the rounds of one case.
  def median(all; one; field): all | map(select(.case == one.case and .threads == one.threads)[field]) | sort
    | .[(length - 1) / 2 | floor];
  def line: map(tostring) | "\(.[0])\(" " * (24 - (.[0] | length)))" + (.[1:] | map(" " * ([11 - length, 1] | max) + .) | add);
  [$ours | unique_by(.threads, .case)[] | . as $c | {case, threads,
    ours: median($ours; $c; "median_ms"), theirs: median($theirs; $c; "median_ms"), gflops: median($ours; $c; "gflops"),
    memory: median($ours; $c; "rss_bytes"), memory2: median($theirs; $c; "rss_bytes")}
    | .ratio = (if .theirs then .theirs / .ours else null end)]
  | group_by(.threads)[]
  | (["\(.[0].threads) threads", "ours ms", "PyTorch ms", "ratio", "GFLOP/s", "MiB", "PyTorch"] | line),
    (.[] | [.case, (.ours | r(1)), (.theirs | r(1)), (.ratio | r(2)), (.gflops | r(1)), (.memory | mib), (.memory2 | mib)] | line),
    (map(.ratio // empty) | if length > 0 then "bench: \(map(log) | add / length | exp | r(2)) times as fast as PyTorch (geometric mean)" else empty end)' >&3
  rm -rf "$results"
}
trap report EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

. scripts/quiet.sh

more=()
[ "${WINOGRAD:-1}" = 1 ] || more=(--no-winograd)
if [ -n "${ISA:-}" ]; then
  export PIPEWRIGHT_ISA=$ISA ATEN_CPU_CAPABILITY=$ISA ONEDNN_MAX_CPU_ISA=${ISA^^} MKL_ENABLE_INSTRUCTIONS=${ISA^^}
fi

ours() { timeout -k 5 600 "$program" bench step --case "$1" --threads "$2" --json "${more[@]}"; }
theirs() { timeout -k 5 600 "$TORCH_PYTHON" benches/peers/pytorch.py "$1" "$2"; }

[ -n "${TORCH_PYTHON:-}" ] || echo "bench: TORCH_PYTHON names no Python with torch: ours alone"
for t in $threads; do
  for round in $(seq "$rounds"); do
    echo "bench: $t threads, round $round of $rounds"
    for case in $cases; do
      quiet
      ours "$case" "$t" >> "$results/ours"
      [ -z "${TORCH_PYTHON:-}" ] || theirs "$case" "$t" >> "$results/theirs"
    done
  done
done
