# SPDX-License-Identifier: Apache-2.0
"""A job that loses servers, which its ranks do not notice."""

from typing import Any

import harness
import numpy as np
from harness import mark

FAST = {
    "BPS_HEARTBEAT_TIMEOUT": str(3 * harness.PATIENCE),
    "BPS_SHUTDOWN_TIMEOUT": str(5 * harness.PATIENCE),
    "BPS_MIN_WORKERS": "1",
    "BPS_SERVER_FAILOVER": "1",
}
COUNT = 300_000  # several partitions
KINDS = ("push_pull", "reduce_scatter", "all_gather", "broadcast")


def check_round(bps: Any, kind: str, step: int) -> None:
    """One operation of this kind; every element of the result is checked."""
    rank, size = bps.rank(), bps.size()
    total = size * step + size * (size - 1) / 2  # of step + rank
    if kind == "push_pull":
        array = np.full(COUNT, step + rank, np.float64)
        bps.push_pull_inplace(array, name=kind, average=False)
        assert array.min() == array.max() == total, (kind, step, array.min(), array.max(), total)
    elif kind == "reduce_scatter":
        array = np.full(COUNT, step + rank, np.float64)
        part = bps.reduce_scatter(array, name=kind, average=False)
        assert part.min() == part.max() == total, (kind, step, part.min(), part.max(), total)
        assert (array == step + rank).all()
        array[:] = -1  # the caller's again
    elif kind == "all_gather":
        whole = bps.all_gather(np.full(COUNT // size, step + rank, np.float64), name=kind)
        expected = np.repeat(np.arange(size) + step, COUNT // size)
        assert (whole == expected).all(), (kind, step)
    else:
        array = np.full(COUNT, step if rank == 1 else -1, np.float64)
        bps.broadcast(array, root=1, name=kind)
        assert (array == step).all(), (kind, step)
        array[:] = -1


def train(bps: Any, steps: int) -> dict[str, Any]:
    canary = np.full(COUNT, 7, np.float64)
    group = bps.new_group([0, 1]) if bps.rank() < 2 else None
    fixed = np.empty(COUNT, np.float32)
    prepared = bps.prepare("push_pull", fixed, average=False, name="prepared")
    for step in range(1, steps + 1):
        for kind in KINDS:
            check_round(bps, kind, step)
        several = [np.full(COUNT // 3, step * (i + 1) + bps.rank(), np.float32) for i in range(6)]
        handles = [bps.push_pull_async_inplace(each, name=f"t{i}", average=False) for i, each in enumerate(several)]
        for i, handle in enumerate(handles):
            total = bps.size() * step * (i + 1) + bps.size() * (bps.size() - 1) / 2
            result = handle.wait()
            assert result.min() == result.max() == total, (i, step, result.min(), result.max(), total)
        fixed[:] = step + bps.rank()
        prepared()
        total = bps.size() * step + bps.size() * (bps.size() - 1) / 2
        assert fixed.min() == fixed.max() == total, (step, fixed.min(), fixed.max(), total)
        if group is not None:
            fixed[:] = step + bps.rank()
            bps.push_pull_inplace(fixed, name="in group", average=False, group=group)
            assert fixed.min() == fixed.max() == 2 * step + 1, (step, fixed.min(), fixed.max())
        if step % 7 == 0:
            bps.commit()
        if step % 10 == 0:
            mark(f"step-{step}")
    assert (canary == 7).all()
    bps.barrier()
    return {"rank": bps.rank(), "size": bps.size(), "servers": len(bps.metrics()["transports"])}


def env(transport: str = "") -> dict[str, str]:
    """Over any transport, unless one is named."""
    return FAST | (harness.over(transport) if transport else {}) | {"BPS_PARTITION_BYTES": str(256 * 1024)}
