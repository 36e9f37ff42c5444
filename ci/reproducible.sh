#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Build the same wheels twice and compare them byte for byte.
#
#   ci/reproducible.sh [CUDA [ARCH]]    the core and one wheel of modules (default: the newest, sm90a)
#
# The second build is made later, in another place, with the compiler and tvm-ffi under other paths,
# with another temporary folder, time zone, language, umask, home and number of jobs, and with variables
# set that change what compilers do. If auditwheel is installed, its outputs are compared, too. The script uses the current Python environment, which
# needs the packages of `pip install ".[build]"`.
#
# PRECAST_PROFILE  the profile to build (core)
# WORK             the folder to work in (build/reproducible)
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(command -v "${PYTHON:-python3}")
cuda=${1:-$("$python" ci/matrix.py --newest)} arch=${2:-sm90a}
work=${WORK:-build/reproducible}
rm -rf "$work"
mkdir -p "$work"
work=$(realpath "$work")
export PRECAST_PROFILE=${PRECAST_PROFILE:-core} PIP_DISABLE_PIP_VERSION_CHECK=1
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 315532800)}
export SOURCE_DATE_EPOCH
unset PYTHONPATH

# build TREE OUT: both wheels, from a copy of the checkout.
build() {
  mkdir -p "$1" "$2"
  git ls-files -z --cached --others --exclude-standard | tar -c --null -T - | tar -x -C "$1"
  (
    cd "$1"
    "$python" ci/make_provider.py --cuda "$cuda" --arch "$arch" -o build/provider
    "$python" -m pip wheel --quiet --no-deps --no-build-isolation --no-index -w "$2" \
      . ./build/provider
    if command -v auditwheel >/dev/null; then
      libc=$(getconf GNU_LIBC_VERSION | sed 's/.* //; s/\./_/')
      PLAT=manylinux_${libc}_$(uname -m) ci/repair_wheel.sh "$2"/precast_jit_cache*.whl "$2" \
        >"$2/repair.log" 2>&1 || { cat "$2/repair.log" >&2; exit 1; }
      rm "$2/repair.log"
    fi
  )
}

echo "== first build"
build "$work/a" "$work/first"

echo "== second build"
elsewhere="$work/another place, and a longer one"
elsewhere=${elsewhere//,/} # nvcc splits folders at commas
mkdir -p "$elsewhere/tmp" "$elsewhere/home" "$elsewhere/site"
read -r nvcc ffi < <(PYTHONPATH=python "$python" -c '
import sys
from precast._jit.toolchain import find_toolchain
tools = find_toolchain(cuda_major=int(sys.argv[1]))
print(tools.toolkit.nvcc, tools.tvm_ffi_include.parent)' "$cuda")
ln -s "$(dirname "$(dirname "$nvcc")")" "$elsewhere/toolkit"
ln -s "$ffi" "$elsewhere/site/tvm_ffi"
(
  umask 077
  export TMPDIR=$elsewhere/tmp HOME=$elsewhere/home TZ=Asia/Tokyo LC_ALL=C.UTF-8 MAX_JOBS=1
  mkdir "$elsewhere/hostile"
  while IFS= read -r variable; do export "${variable?}"; done < <(
    PYTHONPATH=tests "$python" -c '
import sys
from pathlib import Path
from hostile_environment import hostile_environment
for name, value in hostile_environment(Path(sys.argv[1])).items():
    print(f"{name}={value}")' "$elsewhere/hostile"
  )
  export PYTHONPATH=$elsewhere/site
  # The packages of PyPI have lib instead of lib64, by which they are recognised.
  [ ! -d "$elsewhere/toolkit/lib64" ] || export PRECAST_CUDA_HOME=$elsewhere/toolkit
  build "$elsewhere/tree" "$work/second"
)

echo "== comparison"
status=0
for wheel in "$work"/first/*.whl; do
  other=$work/second/$(basename "$wheel")
  if cmp --quiet "$wheel" "$other"; then
    sha256sum "$wheel" | sed "s|  .*/|  |"
    continue
  fi
  status=1
  echo "$(basename "$wheel"): the builds differ"
  if command -v diffoscope >/dev/null; then
    diffoscope "$wheel" "$other" || true
  else
    rm -rf "$work/x" && mkdir -p "$work/x/first" "$work/x/second"
    "$python" -m zipfile -e "$wheel" "$work/x/first"
    "$python" -m zipfile -e "$other" "$work/x/second"
    diff -r "$work/x/first" "$work/x/second" || true
    diff <("$python" -m zipfile -l "$wheel") <("$python" -m zipfile -l "$other") || true
  fi
done
[ $status -eq 0 ] && echo "all the same"
exit $status
