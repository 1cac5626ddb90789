#!/usr/bin/env bash
# Hosts on one machine: network namespaces, each behind a link of its own whose rate is limited in both directions. Needs root and
# iproute2. All traffic stays inside them.
#   scripts/hosts.sh up N RATE            makes N hosts on links of RATE, as 300mbit, or `none`
#   scripts/hosts.sh rate N RATE          changes the rate
#   scripts/hosts.sh run N PROGRAM ARG…   runs MPI ranks on the first N hosts, each host on a core of its own while they last
#   scripts/hosts.sh reach COMMAND ARG…   runs a command, such as an mpirun of one's own, from where it reaches all hosts
#   scripts/hosts.sh on K PROGRAM ARG…    runs a program on host K (from 1)
#   scripts/hosts.sh down N               ends what runs there and removes them
# $RANKS_PER_HOST (1) ranks run on each host, numbered as $MAP_BY says: by `node` (the default) neighbours are on different hosts, by
# `slot` on one. Further options of mpirun in $MPIRUN_OPTIONS.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
command=${1:-help}
shift || true

# What a link lets pass at once, at the speed of memory: messages should be much longer.
burst=128k

limit() {
  local n=$1 rate=$2 i
  for i in $(seq "$n"); do
    if [ "$rate" = none ]; then
      ip netns exec "pwhost$i" tc qdisc del dev eth0 root 2>/dev/null || true
      ip netns exec pwhost0 tc qdisc del dev "port$i" root 2>/dev/null || true
    else
      ip netns exec "pwhost$i" tc qdisc replace dev eth0 root tbf rate "$rate" burst $burst latency 400ms
      ip netns exec pwhost0 tc qdisc replace dev "port$i" root tbf rate "$rate" burst $burst latency 400ms
    fi
  done
}

up() {
  local n=$1 i
  ip netns add pwhost0
  ip -n pwhost0 link set lo up
  ip -n pwhost0 link add switch type bridge
  ip -n pwhost0 addr add 10.98.0.254/24 dev switch
  ip -n pwhost0 link set switch up
  for i in $(seq "$n"); do
    ip netns add "pwhost$i"
    ip -n "pwhost$i" link set lo up
    ip -n pwhost0 link add "port$i" mtu 9000 type veth peer name eth0 mtu 9000 netns "pwhost$i"
    ip -n pwhost0 link set "port$i" master switch up
    ip -n "pwhost$i" addr add "10.98.0.$i/24" dev eth0
    ip -n "pwhost$i" link set eth0 up
    # Buffers for the bandwidth, and no slow start after every pause between two steps.
    ip netns exec "pwhost$i" sh -c 'cd /proc/sys/net/ipv4 && echo "4096 4194304 16777216" > tcp_rmem &&
      echo "4096 4194304 16777216" > tcp_wmem && echo reno > tcp_congestion_control && echo 0 > tcp_slow_start_after_idle'
  done
  limit "$n" "$2"
}

down() {
  local i
  for i in $(seq 0 "$1"); do
    ip netns pids "pwhost$i" 2>/dev/null | xargs -r kill -9 2>/dev/null || true
    ip netns del "pwhost$i" 2>/dev/null || true
  done
}

case $command in
  up | rate)
    [ "$command" = rate ] && limit "$1" "$2" && exit
    trap 'down "$1"' ERR
    up "$1" "$2"
    ;;
  down) down "$1" ;;
  on)
    host=$1
    shift
    exec ip netns exec "pwhost$host" taskset -c $(((host - 1) % $(nproc))) "$@"
    ;;
  # What mpirun calls instead of ssh: options, an address, and a command for a shell.
  ssh)
    while [ "${1#-}" != "$1" ]; do shift; done
    host=${1##*.}
    shift
    exec ip netns exec "pwhost$host" taskset -c $(((host - 1) % $(nproc))) unshare --uts sh -c "hostname pwhost$host; $*"
    ;;
  reach)
    agent=$(mktemp)
    trap 'rm -f "$agent"' EXIT
    printf '#!/bin/sh\nexec %s ssh "$@"\n' "$here/hosts.sh" > "$agent"
    chmod +x "$agent"
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    # Ranks are of one session with mpirun, so that those that wait give way to others.
    export OMPI_MCA_plm=rsh OMPI_MCA_plm_rsh_agent="$agent" OMPI_MCA_plm_rsh_no_tree_spawn=1 OMPI_MCA_orte_leave_session_attached=1
    ip netns exec pwhost0 "$@"
    ;;
  run)
    n=$1
    each=${RANKS_PER_HOST:-1}
    shift
    # Long messages leave at once and overlap with compute.
    # shellcheck disable=SC2086
    exec "$here/hosts.sh" reach mpirun -n $((n * each)) -H "$(seq -s, -f "10.98.0.%g:$each" 1 "$n")" \
      --map-by "${MAP_BY:-node}" --bind-to none --mca oob_tcp_if_include 10.98.0.0/24 --mca pml ob1 --mca btl tcp,self,vader \
      --mca btl_tcp_if_include 10.98.0.0/24 --mca mpi_yield_when_idle 1 --mca btl_tcp_eager_limit 4194304 \
      --mca btl_tcp_rndv_eager_limit 4194304 --mca btl_tcp_max_send_size 4194304 ${MPIRUN_OPTIONS:-} "$@"
    ;;
  *)
    sed -n '2,12p' "$0"
    exit 2
    ;;
esac
