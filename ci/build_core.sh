#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Build and check the core wheel.
#
#   ci/build_core.sh
#
# OUT                the folder of the wheel (wheelhouse)
# SOURCE_DATE_EPOCH  the time of the files in the wheel (the commit's)
set -euo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-wheelhouse}
python=${PYTHON:-python3}
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 315532800)}
export SOURCE_DATE_EPOCH
"$python" -m pip wheel --no-deps ${NO_ISOLATION:+--no-build-isolation --no-index} -w "$out" .
"$python" ci/check_wheel.py "$out"/precast-*.whl
