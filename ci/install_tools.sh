#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Install the packages of extras of pyproject.toml without precast itself. So torch is not installed,
# which a machine that only builds or checks does not need.
#
#   ci/install_tools.sh build ci
#
# A name that is no extra is a package. ci/build-constraints.txt fixes the versions that it lists.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || {
  echo "usage: ci/install_tools.sh EXTRA..." >&2
  exit 2
}
python=${PYTHON:-python3}
mapfile -t packages < <("$python" - "$@" <<'PY'
import sys

try:
    import tomllib
except ModuleNotFoundError:
    from pip._vendor import tomli as tomllib

with open("pyproject.toml", "rb") as file:
    extras = tomllib.load(file)["tool"]["dynamic-metadata"][0]["optional-dependencies"]
for name in sys.argv[1:]:
    print("\n".join(extras.get(name, [name])))
PY
)
"$python" -m pip install --disable-pip-version-check -c ci/build-constraints.txt "${packages[@]}"
