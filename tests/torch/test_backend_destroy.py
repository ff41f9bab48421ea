# SPDX-License-Identifier: Apache-2.0
"""destroy_process_group(): a rank leaves, waits for nobody, and whoever waits for it is told."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
from harness import mark

pytestmark = pytest.mark.timeout(300)

# Who waits for others, or is not told, waits for longer than the test.
NEVER = {"BPS_SHUTDOWN_TIMEOUT": "600", "BPS_HEARTBEAT_TIMEOUT": "600"}


def joined(name: str = "store") -> tuple[int, int]:
    """By a store in a file, which no rank ends: that of rank 0 may be the one before for a moment."""
    import bps_rdma.torch  # noqa: F401  registers the backend

    rank = int(os.environ.get("RANK") or os.environ["DMLC_WORKER_ID"])
    size = int(os.environ.get("WORLD_SIZE") or os.environ["DMLC_NUM_WORKER"])
    store = dist.FileStore(os.environ["BPS_TEST_FOLDER"] + f"/{name}", size)
    dist.init_process_group("bps", timeout=timedelta(seconds=600), store=store, rank=rank, world_size=size)
    return rank, size


def await_rank(rank: int, name: str) -> None:
    """Waits for a mark of another rank."""
    path = Path(os.environ["BPS_TEST_FOLDER"]) / f"mark-{rank}-{name}"
    harness.eventually(path.exists, what=f"{name!r} of rank {rank}")


def one_destroys(_: Any, leaver: int) -> None:
    rank, size = joined()
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    assert float(tensor[0]) == size
    if rank != leaver:
        await_rank(leaver, "gone")
    dist.destroy_process_group()
    mark("gone")


@pytest.mark.parametrize("servers", [None, 1])
@pytest.mark.parametrize("leaver", [0, 1])
def test_destroying_waits_for_nobody(leaver, servers):
    harness.run(one_destroys, leaver, workers=3, servers=servers, init=False, env=NEVER)


def waits_for_one_that_destroys(bps: Any, leaver: int, call: str) -> str:
    rank, size = joined()
    dist.all_reduce(torch.ones(1000))
    others = [other for other in range(size) if other != leaver]
    group = dist.new_group(others)
    if rank == leaver:
        for other in others:
            await_rank(other, "waits")
        dist.destroy_process_group()
        return ""
    mark("waits")
    calls: dict[str, Any] = {
        "all_reduce": lambda: dist.all_reduce(torch.ones(1000)),
        "barrier": dist.barrier,
        "new_group": lambda: bps.new_group(list(range(size)), "all"),
        "of others": lambda: dist.all_reduce(torch.ones(1000), group=group),
    }
    if call == "of others" and rank == max(others):  # it does not come
        await_rank(min(others), "told")
    with pytest.raises(bps.PeerLostError) as lost:
        calls[call]()
    mark("told")
    dist.destroy_process_group()
    return str(lost.value)


@pytest.mark.parametrize("call", ["all_reduce", "barrier", "new_group", "of others"])
@pytest.mark.parametrize("leaver", [0, 1])
def test_who_waits_for_a_rank_that_destroys_is_told(leaver, call):
    told = harness.run(waits_for_one_that_destroys, leaver, call, workers=3, init=False, env=NEVER)
    told.pop(leaver)
    assert all(f"worker {leaver}" in one and "has left the job" in one for one in told), told


def goes_on_in_a_group(_: Any) -> float:
    rank, _ = joined()
    group = dist.new_group([0, 2])
    dist.all_reduce(torch.ones(10))
    if rank != 1:
        await_rank(1, "gone")
    tensor = torch.full((1000,), float(rank))
    if rank != 1:
        dist.all_reduce(tensor, group=group)
    dist.destroy_process_group()
    mark("gone")
    return float(tensor[-1])


def test_with_servers_of_their_own_others_go_on():
    assert harness.run(goes_on_in_a_group, workers=3, servers=1, init=False, env=NEVER) == [2.0, 1.0, 2.0]


def destroys_at_once(_: Any, times: int) -> None:
    """Each rank destroys the group as soon as it has its own result."""
    for number in range(times):
        rank, size = joined(f"store {number}")
        tensors = [torch.full((count,), float(rank + 1)) for count in (10, 100_000, 2_000_000)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()
        dist.destroy_process_group()
        expected = size * (size + 1) / 2
        assert all(bool((tensor == expected).all()) for tensor in tensors)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_everybody_has_the_last_result(transport):
    env = NEVER | harness.over(transport)
    harness.run(destroys_at_once, 5, workers=3, init=False, env=env)
