#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# shellcheck disable=SC2329 # stages are called by their names
# Run the gpu tests and the benchmarks on a machine with a GPU and no network.
#
#   ci/gpu.sh [BUNDLE [STAGE...]]
#
# BUNDLE is a folder made by `precast bundle` (default ./bundle). Stages, all by default, in order:
#   install   an environment based on the Python that has torch, with the bundle installed
#   doctor    whether every kernel of the profile core would load here without a compile
#   tests     the gpu layer with prebuilt modules only (PRECAST_JIT=error)
#   jit       the tests that compile, into an empty cache; they need nvcc
#   peer      the same calls by other libraries, if they are installed
#   bench     every benchmark
#   startup   import, first call, compile and CPU time of a call
# Two more run only if they are named, because they take as long as the tests:
#   sanitize  a small sample of every op under compute-sanitizer (ci/sanitize.sh)
#   ranks     random all-reduces between the GPUs of this machine (ci/ranks.sh)
# A stage that needs the environment makes it if it is missing.
#
# PYTHON  the interpreter that has torch (default python3)
# JOBS    processes of the stage tests, over the GPUs in turn (default 1); what times a GPU, fills it
#         or needs several then runs by itself at the end
# PEERS   a folder of wheels of other libraries to install too, without their dependencies
# OUT     the folder of logs and results (default benchmarks/results/local)
# COMMIT  the commit that is measured, if there is no git
# GPU_WORK  the folder of the environment, caches and copies of the tests (default build/gpu)
set -euo pipefail
cd "$(dirname "$0")/.."
. ci/parts.sh

default_stages=(install doctor tests jit peer bench startup)
all_stages=("${default_stages[@]}" sanitize ranks)
bundle=${1:-bundle}
[ $# -eq 0 ] || shift
stages=("$@")
[ $# -gt 0 ] || stages=("${default_stages[@]}")
for stage in "${stages[@]}"; do
  [[ " ${all_stages[*]} " == *" $stage "* ]] || {
    echo "error: no stage $stage; legal: ${all_stages[*]}" >&2
    exit 2
  }
done
[ -f "$bundle/install.sh" ] || {
  echo "error: $bundle is no bundle. Fix: precast bundle -o $bundle --arch CC" >&2
  exit 2
}

out=${OUT:-benchmarks/results/local}
work=${GPU_WORK:-build/gpu}
mkdir -p "$out" "$work"
bundle=$(realpath "$bundle")
out=$(realpath "$out")
work=$(realpath "$work")
peers=${PEERS:+$(realpath "$PEERS")}
COMMIT=${COMMIT:-$(git describe --always --dirty --abbrev=40 2>/dev/null || echo unknown)}
export COMMIT PYTHONUNBUFFERED=1
ci=$PWD/ci
venv=$work/venv
tree=$work/tree
python=$venv/bin/python

pip_offline() {
  PIP_CONFIG_FILE=/dev/null "$python" -m pip --isolated --disable-pip-version-check install \
    --quiet --no-index --no-compile "$@"
}

install() {
  local base=${PYTHON:-python3}
  rm -rf "$venv"
  "$base" -m venv --without-pip --system-site-packages "$venv"
  # If $base is itself a virtual environment, the new one sees only the packages behind it.
  "$base" - "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" <<'PY'
import pathlib, sys, sysconfig

folders = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
lines = [f"import site; site.addsitedir({folder!r})\n" for folder in folders]
pathlib.Path(sys.argv[1], "_outer_environment.pth").write_text("".join(lines))
PY
  "$python" -c 'import sys, torch; torch.cuda.is_available() or sys.exit("error: torch sees no CUDA device")'
  PYTHON=$python bash "$bundle/install.sh" --quiet # artifacts of a workflow are not executable
  "$python" -c 'import pytest' 2>/dev/null ||
    pip_offline --find-links "$bundle/wheels" ${peers:+--find-links "$peers"} pytest
  if [ -n "$peers" ]; then pip_offline --no-deps "$peers"/*.whl; fi
  # Away from the checkout, the tests run on the installed wheels and not on the sources.
  rm -rf "$tree"
  mkdir -p "$tree/tests"
  cp -r tests/*.py tests/gpu tests/peer "$tree/tests/"
  cp -r benchmarks examples "$tree/"
  (cd "$tree" && "$python" -c 'import precast; print("precast", precast.__version__, precast.__file__)')
}

doctor() {
  (cd "$tree" && "$python" -m precast doctor --profile core)
}

run_pytest() {
  (cd "$tree" && "$python" -m pytest -c /dev/null --rootdir "$tree" -p no:cacheprovider -ra \
    --durations=5 --tb=short "$@")
}

tests() {
  export PRECAST_JIT=error
  if [ "${JOBS:-1}" -eq 1 ]; then
    run_pytest -q -m "not jit" tests/gpu
    return
  fi
  local status=0
  in_parts tests "$JOBS" run_pytest -q -m "not jit and not alone" tests/gpu || status=1
  run_pytest -q -m "alone and not jit" tests/gpu || status=1
  return "$status"
}

jit() {
  rm -rf "$work/cache"
  PRECAST_JIT=auto PRECAST_CACHE_DIR=$work/cache run_pytest -q -m jit tests/gpu
}

peer() {
  PRECAST_JIT=error run_pytest -q tests/peer
}

sanitize() {
  (cd "$tree" && PYTHON=$python OUT=$out/sanitize "$ci/sanitize.sh")
}

ranks() {
  (cd "$tree" && PYTHON=$python OUT=$out/ranks "$ci/ranks.sh")
}

bench() {
  (cd "$tree" && PRECAST_JIT=error "$python" benchmarks/run.py --json "$out")
}

startup() {
  (cd "$tree" && "$python" benchmarks/bench_startup.py --json "$out/startup.json")
}

log=$out/gpu.log
: >"$log"
[ -x "$python" ] && [ -d "$tree" ] || [[ " ${stages[*]} " == *" install "* ]] ||
  stages=(install "${stages[@]}")
summary=()
status=0
for stage in "${stages[@]}"; do
  echo "== $stage" | tee -a "$log"
  start=$SECONDS
  # A separate shell keeps -e in force inside the stage.
  set +e
  (
    set -e
    "$stage"
  ) 2>&1 | tee -a "$log"
  code=${PIPESTATUS[0]}
  set -e
  summary+=("$stage: $([ "$code" = 0 ] && echo ok || echo "failed ($code)"), $((SECONDS - start)) s")
  if [ "$code" != 0 ]; then
    status=1
    [ "$stage" = install ] && break
  fi
done
printf '%s\n' "== summary" "${summary[@]}" "results in $out" | tee -a "$log"
exit $status
