#!/usr/bin/env bash
# Set up everything and run every test layer that this machine can run.
#
#   ci/test.sh              all layers
#   ci/test.sh tests/unit   only these (arguments go to pytest)
#
# PYTHON chooses the interpreter, PRECAST_TEST_VENV where the environment is kept.
set -euo pipefail
cd "$(dirname "$0")/.."
. ci/common.sh

venv=${PRECAST_TEST_VENV:-$PWD/build/test-venv}
step "environment in $venv"
make_venv "$venv"
install_torch
pip_install ".[dev]"

step "style and types"
ruff check .
ruff format --check .
mypy
codespell
git ls-files '*.cuh' '*.cu' '*.cc' '*.h' | xargs clang-format --dry-run --Werror

step "tests"
python -m pytest "${@:-tests}"
