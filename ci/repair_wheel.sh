#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Give a wheel of modules its manylinux tag, without adding libraries to it.
#
#   ci/repair_wheel.sh WHEEL FOLDER
#
# libcudart comes with NVIDIA's wheel, libcuda with the driver, libtvm_ffi with apache-tvm-ffi: a
# copy inside the wheel would be a second one in the process. auditwheel fails if a module needs a
# newer system than the tag promises.
#
# PLAT   the tag (default: that of the manylinux image, else manylinux_2_28)
set -euo pipefail
wheel=${1:?usage: ci/repair_wheel.sh WHEEL FOLDER}
folder=${2:?usage: ci/repair_wheel.sh WHEEL FOLDER}
# Fixed time and permissions for the files that auditwheel adds, so that the wheel is reproducible.
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-315532800}
umask 022
auditwheel show "$wheel"
auditwheel repair --plat "${PLAT:-${AUDITWHEEL_PLAT:-manylinux_2_28_$(uname -m)}}" --only-plat \
  --exclude 'libcudart.so.*' --exclude libcuda.so.1 --exclude libtvm_ffi.so \
  --wheel-dir "$folder" "$wheel"
