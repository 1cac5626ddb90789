#!/usr/bin/env bash
# Time to 90 % test accuracy on Fashion-MNIST: a CNN with a wide classifier (7 MB of gradients) on two hosts behind a slow link, one
# core each, by data parallelism that waits for all gradients (BSP) and that does not (ASP), model parallelism without pipelining,
# GPipe and PipeDream. Needs root and iproute2. RATE (300mbit), GOAL (0.9) and EPOCHS (12, at most) may be set.
set -euo pipefail
cd "$(dirname "$0")/.."

program=$(readlink -f "${CARGO_TARGET_DIR:-target}/release/pipewright")
rate=${RATE:-300mbit}
goal=${GOAL:-0.9}
result=$(mktemp)
trap 'scripts/hosts.sh down 2; rm -f "$result"' EXIT

echo "bench: LeNet, classifier 512 wide, Fashion-MNIST, 128 samples an update (ASP: 64), two hosts at $rate, until $goal"
echo '| | plan | accuracy | seconds | epochs | seconds an epoch |'
echo '|---|---|---|---|---|---|'
scripts/hosts.sh up 2 "$rate"
run() {
  local name=$1
  shift
  timeout -k 5 1200 scripts/hosts.sh run 2 "$program" train --model lenet --width 512 --data fashion-mnist --epochs "${EPOCHS:-12}" \
    --until "$goal" --quiet --json "$@" 2> /dev/null | sed -n '/^{/,$p' > "$result"
  jq -r --arg name "$name" '"| \($name) | \([.stages[].workers | length] | join("-")) | \(.test_accuracy * 10000 | round / 100) % | " +
    "\(.seconds_per_epoch | add | round) | \(.seconds_per_epoch | length) | \((.seconds_per_epoch | add) / (.seconds_per_epoch | length) * 10 | round / 10) |"' "$result"
}
run 'BSP (data parallel, `--plan 2`)' --plan 2 --batch 64 --lr 0.05
run 'ASP (`--asp`)' --asp --batch 64 --lr 0.02
run 'model parallelism (`--schedule sequential`)' --schedule sequential --plan 1-1 --batch 128 --micro-batches 1 --lr 0.05
run 'GPipe, 4 micro-batches' --schedule gpipe --plan 1-1 --batch 128 --micro-batches 4 --lr 0.05
run 'PipeDream' --plan 1-1 --batch 128 --lr 0.05
