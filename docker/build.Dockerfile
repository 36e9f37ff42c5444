# SPDX-License-Identifier: Apache-2.0
# An image to build wheels of modules in, for machines without cibuildwheel:
#
#   docker build -f docker/build.Dockerfile --build-arg CUDA=12 -t precast-build .
#   docker run --rm -v "$PWD:/project" -u "$(id -u):$(id -g)" precast-build 12 sm90a
#
# ci/images.toml states the digest and the packages; for aarch64:
#   --build-arg BASE_IMAGE="$(python ci/images.py manylinux.aarch64)"
ARG BASE_IMAGE=quay.io/pypa/manylinux_2_28_x86_64@sha256:b74a5b6f1705ecff17be8bd792589bef9b3b039766d12205720ecd2a9e919192
FROM ${BASE_IMAGE}

ARG CUDA=13
COPY ci/images.py ci/images.toml ci/install_cuda.sh /opt/precast/ci/
RUN bash /opt/precast/ci/install_cuda.sh "${CUDA}"

COPY pyproject.toml ci/build-constraints.txt ci/install_tools.sh /opt/tools/
RUN mkdir /opt/tools/ci \
    && mv /opt/tools/build-constraints.txt /opt/tools/install_tools.sh /opt/tools/ci/ \
    && /opt/python/cp312-cp312/bin/python -m venv /opt/venv \
    && PYTHON=/opt/venv/bin/python bash /opt/tools/ci/install_tools.sh build

RUN useradd --create-home --uid 10001 builder
USER 10001
ENV PATH=/opt/venv/bin:${PATH} PIP_CONSTRAINT=/project/ci/build-constraints.txt
WORKDIR /project
ENTRYPOINT ["ci/build_wheels.sh", "--here"]
CMD ["13", "sm90a"]
