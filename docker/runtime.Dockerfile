# SPDX-License-Identifier: Apache-2.0
# An image that runs prebuilt kernels and cannot compile any:
#
#   ci/make_bundle.sh 9.0a --with-torch                       # once; see also `precast bundle`
#   docker build -f docker/runtime.Dockerfile --build-context bundle=bundle -t precast .
#   docker run --rm --gpus all precast
#
# Everything comes from the bundle; the network is not used. A base image that has torch (such as an
# engine's) takes a bundle without torch: --build-arg BASE_IMAGE=NAME@sha256:...
ARG BASE_IMAGE=docker.io/library/python@sha256:782412e85d0f0984994c290652577d4018aff08145c85b262bb63dc0c7522254
FROM ${BASE_IMAGE}

RUN --network=none --mount=type=bind,from=bundle,target=/bundle \
    sh /bundle/install.sh --no-cache-dir --no-compile --root-user-action=ignore
COPY docker/entrypoint.sh /usr/local/bin/precast-entrypoint

RUN useradd --create-home --uid 10001 precast
USER 10001
WORKDIR /home/precast

# A kernel that must be compiled is an error at start-up rather than in a request.
ENV PRECAST_JIT=error PRECAST_DOCTOR_PROFILE=core
HEALTHCHECK --interval=60s --timeout=30s --start-period=60s --retries=2 \
    CMD ["sh", "-c", "exec precast doctor --profile \"$PRECAST_DOCTOR_PROFILE\" >/dev/null"]
ENTRYPOINT ["precast-entrypoint"]
CMD ["precast", "list"]
