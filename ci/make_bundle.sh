#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Make an offline bundle of existing wheels, for ci/gpu.sh and docker/runtime.Dockerfile.
#
#   ci/make_bundle.sh ARCH [OPTION...]    such as: ci/make_bundle.sh 9.0a
#
# Options go to `precast bundle`, such as --with-torch.
#
# WHEELS  the folder with the core and the modules (wheelhouse)
# OUT     the bundle (bundle)
set -euo pipefail
cd "$(dirname "$0")/.."
arch=${1:?usage: ci/make_bundle.sh ARCH [OPTION...]}
shift
python=${PYTHON:-python3}
export PYTHONPATH=$PWD/python
rm -rf "${OUT:-bundle}"
"$python" -m precast bundle -o "${OUT:-bundle}" --arch "$arch" --find-links "${WHEELS:-wheelhouse}" "$@"
