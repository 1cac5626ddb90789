#!/usr/bin/env bash
# Trains VGG-16 at 32×32 with a 4096-wide classifier (135 MB of gradients) on hosts whose links have a limited rate, 64 samples an
# update, one core a host, as data parallelism, straight pipelines and what lies between, and prints samples per second, measured and
# predicted; data parallelism also with compressed gradients, and the straight pipeline with compressed edges. Needs root and iproute2.
# RATES ("300mbit 1gbit"), HOSTS (2), PLANS (all shapes), COMPRESSED (those of gradients: "bf16 powersgd:4"), STEPS (12) may be set.
# $TORCH_PYTHON names a Python that has torch: then its DistributedDataParallel runs beside, and on two hosts its 1F1B pipeline.
set -euo pipefail
cd "$(dirname "$0")/.."

program=$(readlink -f "${CARGO_TARGET_DIR:-target}/release/pipewright")
hosts=${HOSTS:-2}
rates=${RATES:-300mbit 1gbit}
steps=${STEPS:-12}
case $hosts in
  2) shapes=${PLANS:-2 1-1} ;;
  *) shapes=${PLANS:-4 1-1-1-1 2-1-1 3-1 2-2} ;;
esac
results=$(mktemp)
trap 'scripts/hosts.sh down "$hosts"; rm -f "$results"' EXIT

# Samples of a minibatch so that 64 make an update of the first stage.
batch() { echo $((64 / ${1%%-*})); }

# A line of a run on all hosts: rate, plan, what it was told, and what came of it.
run() {
  local shape=$1
  shift
  timeout -k 5 600 scripts/hosts.sh run "$hosts" "$program" train --model vgg16 --width 4096 --data synthetic:32x32x3:10:100000 \
    --plan "$shape" --batch "$(batch "$shape")" --steps $((steps * ${shape%%-*})) --quiet --json "$@" 2> /dev/null > "$results"
  jq -r --arg rate "$rate" --arg shape "$shape" --arg told "$*" '"\($rate)  plan \($shape) \($told)  \(.samples_per_s * 10 | round / 10) samples/s, " +
    "predicted \(.predicted_samples_per_s * 10 | round / 10); busy \(.efficiency * 100 | round) %, waiting \(.bubble_fraction * 100 | round) %, " +
    "communicating \(.communication_fraction * 100 | round) %"' < <(sed -n '/^{/,$p' "$results")
}

echo "bench: VGG-16 32×32, classifier 4096 wide, 64 samples an update; $hosts hosts, one core each"
for rate in $rates; do
  scripts/hosts.sh up "$hosts" "$rate"
  for shape in $shapes; do
    run "$shape" --compress-gradients none
    case $shape in
      *-*-* | *[2-9]*-* | *-*[2-9]*) ;;
      *-*) run "$shape" --compress-edges ;;
      *) for compressed in ${COMPRESSED-bf16 powersgd:4}; do run "$shape" --compress-gradients "$compressed"; done ;;
    esac
  done
  modes=data-parallel
  [ "$hosts" != 2 ] || modes+=" 1f1b"
  [ -n "${TORCH_PYTHON:-}" ] || modes=
  for mode in $modes; do
    for host in $(seq "$hosts"); do
      timeout -k 5 300 scripts/hosts.sh on "$host" env RANK=$((host - 1)) WORLD_SIZE="$hosts" MASTER_ADDR=10.98.0.1 MASTER_PORT=29500 \
        GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1 "$TORCH_PYTHON" benches/peers/pytorch_network.py "$mode" 64 2> /dev/null > "$results.$host" &
    done
    wait
    echo "$rate  PyTorch $mode  $(cat "$results.1")"
    rm -f "$results".*
  done
  scripts/hosts.sh down "$hosts"
done
