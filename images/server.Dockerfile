# SPDX-License-Identifier: Apache-2.0
# bps-server and bps-scheduler, for hosts and DPUs (amd64 and arm64) that have neither Python nor torch. images/build
# makes it; docs/servers.md and docs/kubernetes.md use it. What runs in it is named at its start: bps-server (the
# default) or bps-scheduler.

# Compiles for the target on the machine that builds: emulating a compiler takes ten times as long.
FROM --platform=$BUILDPLATFORM debian:bookworm-slim AS build
ARG TARGETARCH
# The newest of what a stable distribution has are security fixes, so that no version is pinned.
# hadolint ignore=DL3008
RUN set -eu; \
    native=$(dpkg --print-architecture); \
    case "$native,${TARGETARCH:-$native}" in \
      "$native,$native") cross=libc6-dev ;; \
      amd64,arm64) cross=g++-aarch64-linux-gnu ;; \
      *) echo "error: no cross build from $native to $TARGETARCH; build on a machine that is $TARGETARCH" >&2; exit 1 ;; \
    esac; \
    apt-get update; \
    apt-get install -y --no-install-recommends g++ cmake ninja-build libibverbs-dev librdmacm-dev "$cross"; \
    rm -rf /var/lib/apt/lists/*
COPY CMakeLists.txt /src/
COPY cmake /src/cmake
COPY csrc /src/csrc
ARG BUILD_JOBS=""
RUN set -eu; \
    native=$(dpkg --print-architecture); \
    [ "${TARGETARCH:-$native}" = "$native" ] || { export CMAKE_TOOLCHAIN_FILE=/src/cmake/aarch64.cmake; tool=aarch64-linux-gnu-; }; \
    cmake -S /src -B /build -G Ninja -DCMAKE_BUILD_TYPE=Release -DBPS_PYTHON=OFF -DBPS_RDMA=ON; \
    cmake --build /build --target bps-server bps-scheduler --parallel "${BUILD_JOBS:-$(nproc)}"; \
    mkdir /out; \
    install --strip --strip-program="${tool:-}strip" /build/bps-server /build/bps-scheduler /out

FROM debian:bookworm-slim
# The libraries of RDMA, which are opened when there is a device, and the drivers of all cards. Kubernetes' probes need a
# shell, cat and grep, so that the base is no smaller one.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends libibverbs1 librdmacm1 ibverbs-providers \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* \
    && useradd --uid 1000 --no-create-home --shell /usr/sbin/nologin bps
COPY --from=build /out/ /usr/local/bin/
USER 1000:1000
CMD ["bps-server"]
