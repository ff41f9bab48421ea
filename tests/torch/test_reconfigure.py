# SPDX-License-Identifier: Apache-2.0
"""A group whose members change, by torch's interface for fault tolerance."""

import os
import signal
from datetime import timedelta
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist

from bps_rdma import NotInitializedError

HAS_IT = hasattr(dist, "_reconfigure")
pytestmark = pytest.mark.skipif(not HAS_IT, reason=f"torch {torch.__version__} has no reconfigure: it came with 2.14")
SOON = timedelta(seconds=60 * harness.PATIENCE)


def begin() -> tuple[Any, int]:
    """A group without members, and this process's number."""
    number, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("bps", enable_reconfigure=True)
    assert dist._supports_reconfigure()
    assert (dist.get_rank(), dist.get_world_size()) == (number, size)
    return dist.distributed_c10d._get_default_store(), number


def handles_of(store: Any, number: int, members: list[int], key: str) -> list[str]:
    store.set(f"{key} {number}", dist._get_reconfigure_handle())
    return [store.get(f"{key} {member}").decode() for member in members]


def all_sum(expected: float) -> None:
    tensor = torch.full((1000,), dist.get_rank() + 1.0)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [expected] * 1000


def until_an_error() -> None:
    while True:
        dist.all_reduce(torch.ones(3))


def survives(bps: Any) -> str:
    store, number = begin()
    with pytest.raises(NotInitializedError, match="no members yet"):
        dist.all_reduce(torch.ones(3))
    dist._reconfigure(1, handles_of(store, number, [0, 1, 2, 3], "first"), timeout=SOON).wait()
    all_sum(10.0)
    left = [0, 1, 3]
    handles = handles_of(store, number, left, "second")
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(bps.PeerLostError):
        until_an_error()
    dist._reconfigure(2, handles, timeout=SOON).wait()
    assert (dist.get_rank(), dist.get_world_size()) == (left.index(number), 3)
    assert (bps.rank(), bps.size()) == (left.index(number), 3)
    all_sum(6.0)
    with pytest.raises(RuntimeError, match="used"):
        dist._reconfigure(2, [dist._get_reconfigure_handle()])
    all_sum(6.0)
    for_two = handles_of(store, number, [3, 1], "third") if number else []
    if number == 0:
        dist._reconfigure(30, [dist._get_reconfigure_handle()], timeout=SOON).wait()
        all_sum(1.0)
    else:
        dist._reconfigure(3, for_two, timeout=SOON).wait()
        assert dist.get_rank() == [3, 1].index(number)
        all_sum(3.0)
    dist._reconfigure(4, handles_of(store, number, left, "fourth"), timeout=SOON).wait()
    all_sum(6.0)
    text = f"{dist.get_rank()} of {dist.get_world_size()}"
    dist.destroy_process_group()
    assert not bps.is_initialized()
    return text


def test_members_change():
    assert harness.run(survives, workers=4, init=False, but=[2]) == ["0 of 3", "1 of 3", "2 of 3"]


@harness.on_ranks(workers=1, init=False)
def test_a_job_that_runs_is_left_alone(bps: Any) -> None:
    bps.init()
    with pytest.raises(bps.InvalidArgumentError, match=r"call bps_rdma.shutdown\(\) before"):
        dist.init_process_group("bps", enable_reconfigure=True)
