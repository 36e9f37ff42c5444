# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced by the scripts that run the gpu tests in several processes at once.

# in_parts NAME JOBS COMMAND...: run COMMAND as that many processes, each of which takes its part of
# tests/gpu (PRECAST_TEST_SHARD) on one of the GPUs in turn. Their output goes to $out/NAME-<i>.log;
# of a part that fails, the first 60 lines that say something are shown. Fails if any part does.
in_parts() {
  local name=$1 jobs=$2 folder=${out:?} gpus i status failed=0 start=$SECONDS processes=()
  shift 2
  IFS=, read -ra gpus <<<"${CUDA_VISIBLE_DEVICES:-$(visible_gpus)}"
  for ((i = 0; i < jobs; i++)); do
    CUDA_VISIBLE_DEVICES=${gpus[i % ${#gpus[@]}]} PRECAST_TEST_SHARD=$i/$jobs "$@" \
      >"$folder/$name-$i.log" 2>&1 &
    processes+=($!)
  done
  for ((i = 0; i < jobs; i++)); do
    status=0
    wait "${processes[$i]}" || status=$?
    grep -hE "^(=+ )?[0-9]+ (passed|failed)|^=+ (ERROR|RACECHECK) SUMMARY" "$folder/$name-$i.log" || true
    [ "$status" -eq 0 ] || {
      failed=1
      # sed reads to the end, so that no closed pipe stops grep.
      { grep -v "^[.s]*\( *\[ *[0-9]*%\]\)\?$" "$folder/$name-$i.log" || true; } | sed -n 1,60p
      echo "error: $name, part $i of $jobs: status $status; the whole log is in $folder/$name-$i.log" >&2
    }
  done
  echo "$name: $((SECONDS - start)) s"
  return $failed
}

# The numbers of the GPUs, with commas between them; 0 where that cannot be said.
visible_gpus() {
  local list
  list=$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd, -) || true
  echo "${list:-0}"
}
