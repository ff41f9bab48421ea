# SPDX-License-Identifier: Apache-2.0
"""Who is interrupted while it waits for a work waits for it once more, and is told what became of the collective."""

import contextlib
import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import harness
import pytest
import torch
import torch.distributed as dist
from harness import await_mark, mark
from interrupts import interrupted

from bps_rdma import _core
from bps_rdma.operations.begun import give_up


def all_reduces(tensor: torch.Tensor) -> Any:
    return dist.all_reduce(tensor, async_op=True)


def all_reduces_several(tensor: torch.Tensor) -> Any:
    return dist.group.WORLD.allreduce_coalesced(list(tensor.chunk(3)))


STARTS = [all_reduces, all_reduces_several]


@pytest.mark.parametrize("start", STARTS)
@harness.on_ranks(workers=2, init=False)
def test_it_succeeds(bps: Any, start: Callable[[torch.Tensor], Any]) -> None:
    dist.init_process_group("bps", timeout=timedelta(seconds=20 * harness.PATIENCE))
    goes_on, point = torch.ones(1), 0
    while goes_on:
        tensor = torch.full((6000,), float(point))
        work = start(tensor)
        if dist.get_rank() == 0:
            goes_on.fill_(interrupted(point, work.wait))
        work.wait()
        assert tensor.eq(2 * point).all()
        dist.broadcast(goes_on, 0)
        point += 1
    assert point > 5


@harness.on_ranks(workers=2, init=False)
def test_it_fails(bps: Any) -> None:
    dist.init_process_group("bps", timeout=timedelta(seconds=20 * harness.PATIENCE))
    goes_on, point = torch.ones(1), 0
    while goes_on:
        if dist.get_rank() == 0:
            await_mark(f"differs {point}", 1)
            work = all_reduces(torch.ones(6000))
            goes_on.fill_(interrupted(point, lambda: fails(bps, work)))  # noqa: B023  called at once
            for _ in range(2):
                fails(bps, work)
        else:
            work = dist.all_reduce(torch.ones(6000), op=dist.ReduceOp.MAX, async_op=True)
            mark(f"differs {point}")
            fails(bps, work)
        dist.broadcast(goes_on, 0)
        point += 1
    assert point > 5


def fails(bps: Any, work: Any) -> None:
    with pytest.raises(bps.MismatchError):
        work.wait()


@pytest.mark.parametrize("count", [3, 5000])
@pytest.mark.parametrize("way", ["one", "any"])
@harness.on_ranks(workers=2, init=False)
def test_who_starts_to_receive(bps: Any, way: str, count: int) -> None:
    """Nobody has the work, so nobody knows when the memory would be the caller's again: it is so at once."""
    dist.init_process_group("bps", timeout=timedelta(seconds=20 * harness.PATIENCE))
    goes_on, point = torch.ones(1), 0
    while goes_on:
        if dist.get_rank() == 0:
            given_up, works = torch.full((count,), -1.0), list[Any]()
            start = functools.partial(dist.irecv, given_up, 1 if way == "one" else None)
            goes_on.fill_(interrupted(point, lambda: works.append(start())))  # noqa: B023  called at once
            for work in works:
                work.wait()
            kept, found = given_up.clone(), [float(given_up[0])] if works else []
            while 2 not in found:
                tensor = torch.zeros(count)
                with contextlib.suppress(bps.PeerLostError):  # the sender was told that its message was given up
                    dist.recv(tensor, 1)
                    assert tensor.eq(tensor[0]).all()
                    found.append(float(tensor[0]))
            assert found in ([2], [1, 2]), point
            assert given_up.equal(kept), f"the memory was not the caller's again, at point {point}"
        else:
            for value in (1.0, 2.0):
                with contextlib.suppress(bps.PeerLostError):
                    dist.send(torch.full((count,), value), 0)
        dist.broadcast(goes_on, 0)
        point += 1
    assert point > 20


def all_gathers(tensor: torch.Tensor) -> Any:
    return dist.all_gather([torch.zeros(6000), tensor], torch.ones(6000), async_op=True)


def all_gathers_uneven_parts(tensor: torch.Tensor) -> Any:
    return dist.all_gather([torch.zeros(6001), tensor], torch.ones(6001), async_op=True)


def reduces_and_scatters(tensor: torch.Tensor) -> Any:
    return dist.reduce_scatter_tensor(tensor[:3000], tensor, async_op=True)


def broadcasts(tensor: torch.Tensor) -> Any:
    return dist.broadcast(tensor, 1, async_op=True)


@pytest.mark.parametrize("start", [*STARTS, all_gathers, all_gathers_uneven_parts, reduces_and_scatters, broadcasts])
@harness.on_ranks(workers=2, init=False)
def test_who_starts(bps: Any, start: Callable[[torch.Tensor], Any]) -> None:
    """What has begun is over when the call has raised: nobody has its work."""
    dist.init_process_group("bps", timeout=timedelta(seconds=20 * harness.PATIENCE))
    begun, works = list[Any](), list[Any]()
    goes_on, point, has_begun = dist.get_rank() == 0, 0, False
    begin = _core.start_operation

    def note(*what: Any) -> Any:
        begun.append(begin(*what))
        return begun[-1]

    with mock.patch.object(_core, "start_operation", note):
        while goes_on:
            tensor = torch.full((6000,), -1.0)
            goes_on = interrupted(point, lambda: works.append(start(tensor)))  # noqa: B023  called at once
            assert not goes_on or all(handle.done() for handle in begun), point
            has_begun = has_begun or (goes_on and len(begun) > 0)
            point += 4
    assert (point > 80 and has_begun) or dist.get_rank() == 1
    give_up(begun)
    with contextlib.suppress(bps.PeerLostError):
        for work in works:
            work.wait()
    bps.barrier()
