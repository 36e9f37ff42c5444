#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Put the CUDA compiler of one major into a manylinux image, where the build finds it.
#
#   ci/install_cuda.sh CUDA      such as 12
#
# ci/images.toml has the packages and their versions. If PyPI has the compiler of a major, this script
# has nothing to do: the build gets it by pip.
set -euo pipefail
cuda=${1:?usage: ci/install_cuda.sh CUDA}
here=$(cd "$(dirname "$0")" && pwd)
python=$(command -v python3.12 || command -v python3)

mapfile -t packages < <("$python" "$here/images.py" --packages "$cuda")
if [ "${#packages[@]}" -eq 0 ] || [ -z "${packages[0]}" ]; then
  echo "CUDA $cuda comes from PyPI, with the build"
  exit 0
fi
case $(uname -m) in
  x86_64) folder=x86_64 ;;
  aarch64) folder=sbsa ;;
  *)
    echo "error: NVIDIA has no CUDA packages for $(uname -m)" >&2
    exit 1
    ;;
esac
# The repository file makes dnf check NVIDIA's signature of every package.
repository=https://developer.download.nvidia.com/compute/cuda/repos/rhel8/$folder/cuda-rhel8.repo
dnf -y install dnf-plugins-core
dnf config-manager --add-repo "$repository"
dnf -y --setopt=install_weak_deps=False install "${packages[@]}"
dnf clean all
home=$(dirname "$(dirname "$(rpm -ql "${packages[0]}" | grep '/bin/nvcc$')")")
ln -sfn "$home" /usr/local/cuda
/usr/local/cuda/bin/nvcc --version
