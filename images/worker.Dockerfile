# SPDX-License-Identifier: Apache-2.0
# Ranks: Python, torch, bps_rdma with its commands and examples. images/build makes it; docs/kubernetes.md uses it.
#   --target worker    what the manifests call bps_rdma (the default)
#   --target ray       the same with Ray and Megatron: bps_rdma-ray
# Without further arguments torch is PyPI's, which brings CUDA's libraries on amd64 (3 GB). For the CPU alone, name the
# index with torch's builds for it: --build-arg TORCH_INDEX=URL.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS wheel
# The newest of what a stable distribution has are security fixes, so that no version is pinned.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ cmake ninja-build libibverbs-dev librdmacm-dev \
    && rm -rf /var/lib/apt/lists/*
COPY CMakeLists.txt pyproject.toml README.md LICENSE /src/
COPY cmake /src/cmake
COPY csrc /src/csrc
COPY bps_rdma /src/bps_rdma
COPY bps_rdma_torch /src/bps_rdma_torch
ARG BUILD_JOBS=""
RUN CMAKE_BUILD_PARALLEL_LEVEL="${BUILD_JOBS:-$(nproc)}" SKBUILD_CMAKE_DEFINE=BPS_RDMA=ON \
    pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /src

FROM python:${PYTHON}-slim AS worker
# The libraries of RDMA, which are opened when there is a device, and the drivers of all cards.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends libibverbs1 librdmacm1 ibverbs-providers \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* \
    && useradd --uid 1000 --create-home --shell /bin/bash bps
# Alone and first: what follows then fits this torch, and a change of the sources does not install it again.
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=""
# The version is in TORCH.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH"
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels pip install --no-cache-dir /wheels/*.whl
COPY --chown=1000:1000 examples /workspace
WORKDIR /workspace
USER 1000:1000
CMD ["bps", "doctor"]

FROM worker AS ray
USER 0:0
# wget is what KubeRay's probes call.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends wget \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* \
    && pip install --no-cache-dir "megatron-core==0.16.1" "ray[default]>=2.60"
USER 1000:1000

# The last stage is the default.
FROM worker
