# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Functions that the scripts of ci/ share. Source it in bash with `set -euo pipefail`.
#
# PYTHON  the interpreter that environments are made from (default python3)
# TORCH   what pip installs where PYTHON has no torch that is new enough (default torch==2.13.0)
# STEPS   how many steps the script has, for the lines that `step` prints

# By its full path, which an activated environment does not change.
PYTHON=$(command -v "${PYTHON:-python3}")
TORCH=${TORCH:-torch==2.13.0}
_step=0 _step_start=0 _step_text="" _step_times=""

# step TEXT: the line that starts a step, with its number and the seconds since the script started.
step() {
  _end_step
  _step=$((_step + 1)) _step_start=$SECONDS _step_text=$*
  printf '\n== [%s%s, %d s] %s\n' "$_step" "${STEPS:+/$STEPS}" "$SECONDS" "$*"
}

_end_step() {
  if [ -n "$_step_text" ]; then
    _step_times+=$(printf '%6d s  %s' $((SECONDS - _step_start)) "$_step_text")$'\n'
  fi
  _step_text=""
}

# print_step_times [BUDGET]: the seconds of each step and of all, and a warning above BUDGET seconds.
print_step_times() {
  _end_step
  printf '\n== seconds\n%s%6d s  in all\n' "$_step_times" "$SECONDS"
  if [ $# -gt 0 ] && [ "$SECONDS" -gt "$1" ]; then
    printf 'warning: these are more than %d s. Fix: see which step and which tests became slower\n' "$1"
  fi
}

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# make_venv FOLDER: make and activate a virtual environment; one of an earlier run is kept if complete.
make_venv() {
  local version='import sys; print(sys.version_info[:2])'
  if [ "$("$1/bin/python" -c "$version" 2>/dev/null)" != "$("$PYTHON" -c "$version")" ]; then
    rm -rf "$1"
    "$PYTHON" -m venv "$1" 2>/dev/null || make_venv_without_pip "$1"
  fi
  # shellcheck disable=SC1091
  . "$1/bin/activate"
}

# Some systems package ensurepip separately; then the pip of PYTHON itself is used.
make_venv_without_pip() {
  rm -rf "$1"
  if ! "$PYTHON" -m pip --version >/dev/null 2>&1 || ! "$PYTHON" -m venv --without-pip "$1"; then
    die "$PYTHON cannot make a virtual environment with pip. Fix: install its venv module"
  fi
  # shellcheck disable=SC1091
  . "$1/bin/activate"
  link_packages_of "$PYTHON"
}

pip_install() {
  python -m pip install --quiet --disable-pip-version-check "$@"
}

# install_torch: install torch into the active environment, or link the torch of PYTHON if it has one.
install_torch() {
  if has_torch python; then return; fi
  if has_torch "$PYTHON"; then
    link_packages_of "$PYTHON"
  else
    echo "installing $TORCH"
    pip_install "$TORCH" numpy # without numpy, torch warns
  fi
}

# has_torch PYTHON: whether PYTHON has a torch that the core accepts.
has_torch() {
  "$1" - 2>/dev/null <<'PY'
import torch

raise SystemExit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10))
PY
}

# link_packages_of PYTHON: let the active environment see another's packages, after its own.
# (--system-site-packages does not work if that Python is a virtual environment itself.)
link_packages_of() {
  local folders own
  own=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  folders=$("$1" - <<'PY'
import sysconfig

for folder in dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")):
    print(f"import site; site.addsitedir({folder!r})")
PY
  )
  printf '%s\n' "$folders" >"$own/_linked_packages.pth"
  # The version that came with the environment would hide the newer one that torch needs.
  python -m pip uninstall --quiet --yes setuptools 2>/dev/null || true
}

# logged FILE COMMAND...: run it with its output in FILE and print the time every 15 s; if it fails,
# show the end of FILE.
logged() {
  local log=$1 start=$SECONDS status=0 beat
  shift
  (
    trap 'kill "$nap" 2>/dev/null; exit' TERM
    while true; do
      sleep 15 &
      nap=$!
      wait "$nap"
      printf '   ... %d s\n' $((SECONDS - start))
    done
  ) &
  beat=$!
  "$@" >"$log" 2>&1 || status=$?
  kill "$beat" 2>/dev/null || true
  wait "$beat" 2>/dev/null || true
  if [ "$status" -ne 0 ]; then
    tail -n 40 "$log" >&2
    die "$1 failed with status $status; all of its output is in $log"
  fi
}
