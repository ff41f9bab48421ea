# SPDX-License-Identifier: Apache-2.0
"""bps_rdma as what a benchmark measures."""

from __future__ import annotations

from bps_rdma.tools.bench.baselines import PushPull
from bps_rdma.tools.bench.plan import Plan


def make_ours(plan: Plan) -> PushPull:
    """bps_rdma, with tensors in the memory that the plan names."""
    if plan.memory != "cuda":
        return PushPull(prepared=plan.prepared)
    from bps_rdma.tools.bench.on_gpu import PushPullOnGpu

    return PushPullOnGpu(prepared=plan.prepared)
