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
# TEST_ALL_TARGETS  set: compile every op for every target with CUDA 12, as every night
set -euo pipefail
cd "$(dirname "$0")/.."
STEPS=3
. ci/common.sh

# Settings of the environment must not change what a test does.
for name in $(compgen -v PRECAST_) PYTHONPATH PYTHONHOME; do unset "$name"; done

step "environment"
make_venv "${TEST_VENV:-$PWD/build/test-venv}"
install_torch
pip_install ".[dev]"
# Only its data model is needed; its dependencies would install FlashInfer.
pip_install --no-deps "flashinfer-bench==0.1.*"
export PYTHONPATH=$PWD/python # the checkout is tested; tests of wheels build their own

if [ $# -eq 0 ]; then
  step "style, types and workflows"
  ./ci/lint.sh
fi

step "tests"
if [ $# -gt 0 ]; then
  python -m pytest "$@"
else
  # Tests that time a GPU or count its memory run alone on it. They come first, so that the last
  # summary is that of the tests which every machine runs.
  python -m pytest tests/gpu tests/peer
  # One process for each core. All tests of a file run in one process, which makes its fixtures once.
  workers=$(nproc)
  python -m pytest -n $((workers < 8 ? workers : 8)) --dist loadfile \
    --ignore=tests/gpu --ignore=tests/peer tests
fi
