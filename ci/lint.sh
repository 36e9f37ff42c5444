#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Check style, types and layers, and files that only run elsewhere: scripts, workflows, Dockerfiles
# and pins.
#
#   ci/lint.sh         everything, in the current environment (pip install ".[dev]")
#   ci/lint.sh code    style, types and layers alone
#   ci/lint.sh ci      scripts, workflows, Dockerfiles and pins alone
#
# The tools for workflows and wheels need Python 3.11; with an older one these checks are left out.
#
# Nothing here needs a network.
set -euo pipefail
cd "$(dirname "$0")/.."
part=${1:-all}
[[ $part =~ ^(all|code|ci)$ ]] || {
  echo "error: no part $part; legal: all, code, ci" >&2
  exit 2
}

if [ "$part" != ci ]; then
  ruff check .
  ruff format --check .
  mypy
  # The sources of this checkout, not an installed precast.
  PYTHONPATH=python lint-imports --no-cache --no-logo
  codespell
  git ls-files '*.cuh' '*.cu' '*.cc' '*.h' | xargs clang-format --dry-run --Werror
fi

if [ "$part" != code ]; then
  git ls-files '*.sh' | xargs shellcheck --severity=style
  hadolint --no-color docker/*.Dockerfile
  python ci/pins.py
  python ci/images.py --check
  if python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
    check-jsonschema --quiet --builtin-schema vendor.dependabot .github/dependabot.yml
    zizmor --quiet --offline --persona pedantic --config .github/zizmor.yml .github
    ci/build_wheels.sh "$(python ci/matrix.py --newest)" sm90a --print-build-identifiers
  else
    echo "workflows and cibuildwheel are not checked: their tools need Python 3.11"
  fi
fi
