#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Run the programs of precast.comm at length: many random calls and replays, by several processes.
#
#   ci/ranks.sh [WORLD...]    how many GPUs take part, one run after another (default: 2, 4 and 8, as
#                             far as this machine has them)
#
# The tests of the gpu layer are short runs of the same programs. Modules must be prebuilt.
#
# PYTHON     the interpreter that has torch and precast (default python3)
# CALLS      random calls of each dtype (default 5000)
# REPLAYS    replays of each captured graph, of which there are eight (default 12500)
# SECONDS_OF_CALLS  the most that the random calls of one dtype may take (default 150)
# OUT        the folder of logs (default build/ranks)
set -euo pipefail
python=${PYTHON:-python3}
calls=${CALLS:-5000}
replays=${REPLAYS:-12500}
most=${SECONDS_OF_CALLS:-150}
out=${OUT:-build/ranks}
fused=tests/gpu/allreduce_fusion_ranks.py
registered=tests/gpu/custom_all_reduce_ranks.py
[ -f "$fused" ] || {
  echo "error: no $fused in $PWD. Fix: run it where the tests are" >&2
  exit 2
}
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
worlds=("$@")
if [ $# -eq 0 ]; then
  for world in 2 4 8; do [ "$world" -gt "$gpus" ] || worlds+=("$world"); done
fi
[ ${#worlds[@]} -gt 0 ] || {
  echo "error: this machine has $gpus GPUs, and ranks need at least 2" >&2
  exit 2
}
mkdir -p "$out"
export PRECAST_JIT=${PRECAST_JIT:-error} PYTHONUNBUFFERED=1
export PYTHONPATH=$PWD/tests:$PWD/tests/gpu${PYTHONPATH:+:$PYTHONPATH}

failed=0
# step NAME SECONDS COMMAND...: shows the last line of what the command prints, or why it failed.
step() {
  local log=$out/$1.log limit=$2 start=$SECONDS status=0
  shift 2
  timeout --kill-after=20 "$limit" "$@" >"$log" 2>&1 || status=$?
  echo "$(basename "$log" .log): status $status, $((SECONDS - start)) s of $limit: $(tail -n 1 "$log")"
  [ "$status" -eq 0 ] || {
    failed=1
    echo "error: the whole log is in $log" >&2
    { grep -aE 'Error|assert|Case\(' "$log" || true; } | sed -n 1,8p
  }
}

step streams 120 "$python" tests/gpu/allreduce_fusion_streams.py 150 100
step registered-streams 120 "$python" tests/gpu/custom_all_reduce_streams.py 100 500
for world in "${worlds[@]}"; do
  [ "$world" -le "$gpus" ] || {
    echo "error: this machine has $gpus GPUs, got $world" >&2
    exit 2
  }
  ranks=("$python" -m torch.distributed.run --standalone --nproc-per-node "$world")
  parts=("${ranks[@]}" "$fused" --parts)
  step "calls-$world" $((2 * most + 60)) "${parts[@]}" calls --calls "$calls" --seconds "$most"
  step "graphs-$world" 300 "${parts[@]}" graphs --replays "$replays"
  step "rest-$world" 300 "${parts[@]}" errors legacy groups compiled fallback
  step "ipc-$world" 120 "${parts[@]}" calls graphs --calls 300 --seconds 30 --replays 500 --ipc
  step "registered-$world" 120 "${ranks[@]}" "$registered" 200 2000
done
exit $failed
