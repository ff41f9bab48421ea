# SPDX-License-Identifier: Apache-2.0
"""A server's memory is bounded by what is on the way to it, not by what the workers synchronise."""

from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
from harness import await_mark, mark

MIB = 2**20
TENSORS = 128
TENSOR_BYTES = 16 * MIB  # 2 GiB in all, on every worker


def resident(pid: int, field: str) -> int:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status[field].split()[0]) * 1024


def two_gib(bps: Any) -> None:
    # The tensors of a worker may lie in the same memory: only their number and size matter to a server.
    blocks = [np.ones(TENSOR_BYTES // 4, np.float32) for _ in range(8)]
    bps.declare_many({f"t{i}": blocks[0] for i in range(TENSORS)})
    bps.push_pull(np.ones(10), name="warm")
    mark("ready")
    await_mark("go")
    for start in range(0, TENSORS, 8):
        handles = [bps.push_pull_async_inplace(blocks[i], True, f"t{start + i}") for i in range(8)]
        bps.wait(handles)
        assert all(block[0] == block[-1] == 1 for block in blocks)
    mark("done")
    await_mark("measured")


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_server_needs_little_memory_for_2_gib_of_tensors():
    with harness.start(two_gib, workers=2, servers=2, env={"BPS_TRANSPORT": "tcp"}) as job:
        job.await_marks("ready")
        before = [resident(job.pid(f"server {i}"), "VmRSS") for i in range(2)]
        job.set_mark("go")
        job.await_marks("done", timeout=200)
        most = [resident(job.pid(f"server {i}"), "VmHWM") for i in range(2)]
        job.set_mark("measured")
        job.results()
    added = [(high - low) // MIB for high, low in zip(most, before, strict=True)]
    assert max(added) <= 256, f"{added} MiB more"


def out_of_step(bps: Any) -> None:
    """Rank 1 starts everything in the opposite order: what differs may stay in the server, what does not may not."""
    blocks = [np.full(4 * MIB, bps.rank() + 1.0, np.float32) for _ in range(12)]
    bps.declare_many({f"t{i}": blocks[0] for i in range(12)})
    mark("ready")
    await_mark("go")
    order = range(12) if bps.rank() == 0 else range(11, -1, -1)
    for _ in range(3):
        handles = [bps.push_pull_async(blocks[i], False, f"t{i}") for i in order]
        for result in bps.wait(handles):
            assert result[0] == result[-1] == 3
    mark("done")
    await_mark("measured")


def test_opposite_orders_cost_a_server_at_most_what_differs():
    with harness.start(out_of_step, workers=2, servers=1, env={"BPS_TRANSPORT": "tcp"}) as job:
        job.await_marks("ready")
        before = resident(job.pid("server 0"), "VmRSS")
        job.set_mark("go")
        job.await_marks("done", timeout=120)
        most = resident(job.pid("server 0"), "VmHWM")
        job.set_mark("measured")
        job.results()
    # 12 tensors of 16 MiB: a server that kept all of both workers would need 384 MiB and the results.
    assert (most - before) // MIB <= 256
