# Waits for a quiet machine; to be sourced, with $program set. Other programs show in the idle time of the cores. What shares the
# units of a core with us from outside, as other guests of a virtual machine's host do, shows only in what multiply-adds reach.

# Time of all cores since the machine started: all of it, and what they were idle; as whole numbers, however large.
cores() { awk '/^cpu / { for (i = 2; i <= 9; i++) all += $i; printf "%.0f %.0f\n", all, $5 + $6 }' /proc/stat; }

# GFLOP/s of multiply-adds on the slowest of all cores at once, in whole numbers.
peak() { "$program" bench peak --milliseconds 100 --json | jq '.gflops | min | floor'; }

# The most that was seen of it.
quiet_best=0

# Whether others use less than a tenth of the cores' time and leave all of them at least 93 % of their best speed, now.
is_quiet() {
  local all idle all2 idle2 now
  read -r all idle < <(cores)
  sleep 0.5
  read -r all2 idle2 < <(cores)
  now=$(peak)
  ((now <= quiet_best)) || quiet_best=$now
  (((idle2 - idle) * 10 >= (all2 - all) * 9 && now * 100 >= quiet_best * 93))
}

# Waits for that, $QUIET seconds (30) at most, and says so if it was in vain. BUSY=1 waits for nothing.
quiet() {
  local i
  [ "${BUSY:-0}" = 1 ] && return
  if ((quiet_best == 0)); then
    for i in 1 2 3 4 5; do is_quiet || true; done
  fi
  for ((i = 0; i < ${QUIET:-30}; i++)); do
    is_quiet && return
  done
  echo "bench: the machine is at work, multiply-adds reach less than 93 % of $quiet_best GFLOP/s; measured all the same" >&2
}
