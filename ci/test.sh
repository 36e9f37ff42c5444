#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Set up everything and run every test layer that this machine can run.
#
#   ci/test.sh               style, types and all layers
#   ci/test.sh tests/unit    only these (arguments go to pytest)
#
# PYTHON      the interpreter to start from; its torch is used if it is new enough (python3)
# TORCH       what pip installs otherwise (torch==2.13.0)
# TEST_VENV   where the environment is kept (build/test-venv)
# TEST_ALL    set: test all of that of which other runs test a sample, as every night
#
# A change waits for this script, so a whole run on two processors that nobody else uses is to take at
# most BUDGET seconds. The last lines say what each step took, and above them which tests took long.
set -euo pipefail
cd "$(dirname "$0")/.."
STEPS=$(($# > 0 ? 2 : 3))
BUDGET=1200
. ci/common.sh

# Settings of the environment must not change what a test does.
for name in $(compgen -v PRECAST_) PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE; do
  unset "$name"
done
# Hundreds of processes import torch or this package. What Python compiles for the first one must be
# kept, and not beside the sources, of which some tests make copies.
export PYTHONPYCACHEPREFIX=$PWD/build/__pycache__

step "environment"
make_venv "${TEST_VENV:-$PWD/build/test-venv}"
# Python compiles a module when it is first imported; most modules of the environment never are.
export PIP_COMPILE=0
# Those that come with Python 3.10 to 3.12 take a minute to resolve what .[dev] needs.
pip_install "pip>=25"
install_torch
pip_install ".[dev]"
# Only its data model is needed; its dependencies would install FlashInfer.
pip_install --no-deps "flashinfer-bench==0.1.*"
unset PIP_COMPILE
export PYTHONPATH=$PWD/python # the checkout is tested; tests of wheels build their own

if [ $# -gt 0 ]; then
  step "tests"
  python -m pytest "$@"
  exit
fi

step "style, types and workflows, beside the tests of the GPU layers"
# Tests that time a GPU or count its memory run alone on it. They come first, so that the last summary
# is that of the tests which every machine runs. Lint is done before pytest has collected them.
log=$(mktemp)
budget=("$BUDGET")
if [ -n "${TEST_ALL:-}" ]; then budget=(); fi
trap 'rm -f "$log"; print_step_times "${budget[@]}"' EXIT
(
  begin=$SECONDS
  ./ci/lint.sh
  printf 'ci/lint.sh took %d s\n' $((SECONDS - begin))
) >"$log" 2>&1 &
lint=$!
tests_status=0 lint_status=0
python -m pytest tests/gpu tests/peer || tests_status=$?
wait "$lint" || lint_status=$?
printf '\nci/lint.sh:\n'
cat "$log"
[ "$lint_status" -eq 0 ] || die "ci/lint.sh failed with status $lint_status; its output is above"
[ "$tests_status" -eq 0 ] || die "tests of the GPU layers failed"

step "tests"
# One process more than cores, because some tests wait: for pip, or for processes that they kill. torch
# computes with one thread: the threads of several would wait for one another. All tests of a file run
# in one process, which makes its fixtures once. Files start in the order of their folders: tests/build,
# which takes longest, comes first.
workers=$(nproc)
OMP_NUM_THREADS=1 python -m pytest -n $((workers < 8 ? workers + 1 : 8)) --dist loadfile \
  --no-loadscope-reorder --times --ignore=tests/gpu --ignore=tests/peer tests
