#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Run a small sample of every op under compute-sanitizer: accesses outside of a tensor's memory, and
# races in shared memory.
#
#   ci/sanitize.sh [TOOL...]    memcheck and racecheck by default; also initcheck, synccheck
#
# The sample is tests/gpu/test_gpu_sanitize.py. Modules must be prebuilt. First, the tool must find a
# call that deliberately reads past its tensor; otherwise finding nothing would prove nothing. To run
# one process of memcheck alone:
#
#   PYTORCH_NO_CUDA_MEMORY_CACHING=1 PRECAST_JIT=error \
#     compute-sanitizer --tool memcheck --report-api-errors no --padding 64 \
#     --kernel-name kns=precast --error-exitcode 99 python -m pytest -m "not jit" tests/gpu/test_gpu_sanitize.py
#
# and one of racecheck:
#
#   PYTORCH_NO_CUDA_MEMORY_CACHING=1 PRECAST_JIT=error \
#     PRECAST_SANITIZER=racecheck compute-sanitizer --tool racecheck --kernel-name kns=precast \
#     --error-exitcode 99 python -m pytest -m "not jit" tests/gpu/test_gpu_sanitize.py
#
# PYTHON          the interpreter that has torch, pytest and precast (default python3)
# JOBS            processes at once (default: as many as cores, at most 8)
# SANITIZER       compute-sanitizer (default: on the PATH, or the CUDA toolkit's)
# OUT             the folder of logs (default build/sanitize)
set -euo pipefail
# shellcheck source=ci/parts.sh
. "$(dirname "$0")/parts.sh"
tools=("$@")
[ $# -gt 0 ] || tools=(memcheck racecheck)
python=${PYTHON:-python3}
jobs=${JOBS:-$(nproc)}
[ -n "${JOBS:-}" ] || [ "$jobs" -le 8 ] || jobs=8
out=${OUT:-build/sanitize}
sanitizer=${SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}
[ -x "$sanitizer" ] || {
  echo "error: no $sanitizer. Fix: install the CUDA toolkit's, or name it in SANITIZER" >&2
  exit 2
}
[ -f tests/gpu/test_gpu_sanitize.py ] || {
  echo "error: no tests/gpu/test_gpu_sanitize.py in $PWD. Fix: run it where the tests are" >&2
  exit 2
}
mkdir -p "$out"

found=99 # the exit status if the tool found an error
# Each tensor gets its own allocation, which ends where the tensor ends.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 PRECAST_JIT=error OMP_NUM_THREADS=1
# Only our kernels are instrumented. The option had another name before CUDA 13.
filter=--kernel-name
help=$("$sanitizer" --help 2>&1 || true)
[[ $help == *"$filter"* ]] || filter=--kernel-regex

checked() {
  local tool=$1 options=()
  shift
  # torch asks the driver for functions that it may not have. The padding keeps allocations apart.
  [ "$tool" != memcheck ] || options=(--report-api-errors no --padding 64)
  # Some calls of the sample are not for each tool.
  PRECAST_SANITIZER=$tool "$sanitizer" --tool "$tool" "${options[@]}" "$filter" kns=precast --error-exitcode "$found" "$@"
}

echo "== a deliberate error"
status=0
checked memcheck "$python" tests/gpu/out_of_bounds.py >"$out/planted.log" 2>&1 || status=$?
[ "$status" -eq "$found" ] || {
  tail -n 20 "$out/planted.log"
  echo "error: a read past a tensor's end was not found (status $status)" >&2
  exit 1
}

failed=0
for tool in "${tools[@]}"; do
  echo "== $tool"
  in_parts "$tool" "$jobs" checked "$tool" "$python" -m pytest -c /dev/null --rootdir "$PWD" \
    -p no:cacheprovider -q --tb=short -m "not jit" tests/gpu/test_gpu_sanitize.py || failed=1
done
exit $failed
