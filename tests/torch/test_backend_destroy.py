# SPDX-License-Identifier: Apache-2.0
"""destroy_process_group(): a rank leaves, waits for nobody, and whoever waits for it is told."""

import os
from datetime import timedelta
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
from harness import await_mark, mark

import bps_rdma.torch  # noqa: F401  registers the backend

# Who waits for others, or is not told, waits for longer than the test.
NEVER = {"BPS_SHUTDOWN_TIMEOUT": "600", "BPS_HEARTBEAT_TIMEOUT": "600"}


def joined(port: int) -> tuple[int, int]:
    """By a store that rank 0 holds. On the port of a life before, that of rank 0 may be the one before for a moment."""
    rank = int(os.environ.get("RANK") or os.environ["DMLC_WORKER_ID"])
    size = int(os.environ.get("WORLD_SIZE") or os.environ["DMLC_NUM_WORKER"])
    dist.init_process_group(
        "bps", init_method=f"tcp://127.0.0.1:{port}", timeout=timedelta(seconds=600), rank=rank, world_size=size
    )
    return rank, size


def one_destroys(_: Any, port: int, leaver: int) -> None:
    rank, size = joined(port)
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    assert float(tensor[0]) == size
    if rank != leaver:
        await_mark("gone", leaver)
    dist.destroy_process_group()
    mark("gone")


@pytest.mark.parametrize("servers", [None, 1])
@pytest.mark.parametrize("leaver", [0, 1])
def test_destroying_waits_for_nobody(leaver, servers):
    harness.run(one_destroys, harness.free_port(), leaver, workers=3, servers=servers, init=False, env=NEVER)


def waits_for_one_that_destroys(bps: Any, port: int, leaver: int, call: str) -> str:
    rank, size = joined(port)
    dist.all_reduce(torch.ones(1000))
    others = [other for other in range(size) if other != leaver]
    if rank == leaver:
        for other in others:
            await_mark("waits", other)
        dist.destroy_process_group()
        return ""
    mark("waits")
    calls: dict[str, Any] = {
        "all_reduce": lambda: dist.all_reduce(torch.ones(1000)),
        "barrier": dist.barrier,
        "new_group": lambda: bps.new_group(list(range(size)), "all"),
    }
    with pytest.raises(bps.PeerLostError) as lost:
        calls[call]()
    dist.destroy_process_group()
    return str(lost.value)


@pytest.mark.parametrize("call", ["all_reduce", "barrier", "new_group"])
@pytest.mark.parametrize("leaver", [0, 1])
def test_who_waits_for_a_rank_that_destroys_is_told(leaver, call):
    told = harness.run(waits_for_one_that_destroys, harness.free_port(), leaver, call, workers=3, init=False, env=NEVER)
    told.pop(leaver)
    assert all(f"worker {leaver}" in one and "has left the job" in one for one in told), told


def goes_on_in_a_group(_: Any, port: int, leaver: int) -> float:
    rank, size = joined(port)
    others = [other for other in range(size) if other != leaver]
    group = dist.new_group(others)
    dist.all_reduce(torch.ones(10))
    if rank == leaver:
        dist.destroy_process_group()
        mark("gone")
        return -1.0
    await_mark("gone", leaver)
    tensor = torch.full((100_000,), float(rank))
    dist.all_reduce(tensor, group=group)  # a part of it is summed by the server of the rank that has left
    talked = torch.full((3,), float(rank))
    if rank == others[0]:
        dist.send(talked, others[1])
    else:
        dist.recv(talked, others[0])
        assert talked.tolist() == [float(others[0])] * 3
    dist.destroy_process_group()
    return float(tensor[-1])


@pytest.mark.parametrize("servers", [None, 1])
@pytest.mark.parametrize("leaver", [0, 1])
def test_others_go_on_in_their_groups(leaver, servers):
    # Those of one host would sum by themselves, and on hosts alike one that is not in the group helps.
    ranks = {"workers": 3, "servers": 1} if servers else harness.on_hosts("abc")
    env = NEVER | harness.over("tcp") | {"BPS_LINK_GBPS": "1"}
    found = harness.run(goes_on_in_a_group, harness.free_port(), leaver, **ranks, init=False, env=env)
    assert found == [-1.0 if rank == leaver else 3.0 - leaver for rank in range(3)]


def lives(_: Any, port: int, times: int) -> None:
    """Groups of all, and of some, come and go, and no rank waits for the others at the end."""
    for life in range(times):
        rank, size = joined(port + life)
        first, last = dist.new_group([0, 1]), dist.new_group([1, 2])
        tensor = torch.full((100_000,), float(rank))
        dist.all_reduce(tensor)
        assert float(tensor[-1]) == sum(range(size))
        if rank < 2:
            dist.all_reduce(tensor, group=first)
            assert float(tensor[0]) == 2 * sum(range(size))
        if rank > 0:
            talked = torch.full((3,), float(life * rank))
            dist.all_reduce(talked, group=last)
            if rank == 1:
                dist.send(talked, 2)
            else:
                dist.recv(talked, 1)
            assert talked.tolist() == [3.0 * life] * 3
        dist.destroy_process_group()


def test_groups_come_and_go_and_nobody_waits():
    harness.run(lives, harness.free_ports(6), 6, workers=3, init=False, env=NEVER)


def destroys_at_once(_: Any, port: int, times: int) -> None:
    """Each rank destroys the group as soon as it has its own result."""
    for life in range(times):
        rank, size = joined(port + life)
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
    harness.run(destroys_at_once, harness.free_ports(5), 5, workers=3, init=False, env=env)
