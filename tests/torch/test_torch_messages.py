# SPDX-License-Identifier: Apache-2.0
"""Messages and grouped sums of torch tensors, on the CPU and on a device that is simulated; against torch."""

import contextlib
from typing import Any

import harness
import pytest
import torch
from interrupts import interrupted
from simulated import install

import bps_rdma.torch as bps_torch
from bps_rdma.operations.begun import give_up

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.int16, torch.complex64, torch.float8_e5m2]


def values(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    found = torch.randint(0, 2 if dtype is torch.bool else 100, (count,), generator=torch.Generator().manual_seed(seed))
    return found.to(dtype)


def same(found: Any, right: torch.Tensor) -> None:
    assert found.dtype == right.dtype
    assert found.shape == right.shape
    as_bytes = [one.contiguous().view(-1).view(torch.uint8) for one in (found, right)]
    assert torch.equal(*as_bytes)


@pytest.mark.parametrize("on_device", [False, True])
@harness.on_ranks(workers=3)
def test_messages(bps: Any, on_device: bool) -> None:
    rank, size = bps.rank(), bps.size()
    if on_device:
        install(immediate=True)
    after, before = (rank + 1) % size, (rank - 1) % size
    for dtype in DTYPES:
        for count in (1, 100, 5000):
            mine, theirs = values(count, dtype, rank), values(count, dtype, before)
            sent = bps_torch.send_async(mine, "a", dst=after, tag=3)
            got = torch.empty_like(mine)
            assert bps_torch.recv(got, "a", src=before, tag=3) is got
            assert bps_torch.synchronize(sent) is mine
            same(got, theirs)
            sent = bps_torch.send_async(mine, dst=after)
            got = torch.empty_like(mine)
            assert bps_torch.recv_async(got, src=before).wait() is got
            sent.wait()
            same(got, theirs)

            everybody = torch.cat([values(count, dtype, other) for other in range(size)])
            whole = bps_torch.gather(mine, "g", root=1)
            assert (whole is None) == (rank != 1)
            if whole is not None:
                same(whole, everybody)
            out = torch.empty_like(everybody) if rank == 0 else None
            found = bps_torch.gather_async(mine, out=out).wait()
            assert found is out
            if out is not None:
                same(out, everybody)
            part = torch.empty_like(mine)
            assert bps_torch.scatter(everybody if rank == 1 else None, root=1, out=part) is part
            same(part, mine)
            assert bps_torch.scatter_async(everybody if rank == 0 else None, "s", out=part).wait() is part
            same(part, mine)

            same(bps_torch.all_to_all(everybody, "x"), mine.repeat(size))
            out = torch.empty_like(everybody)
            assert bps_torch.all_to_all_async(everybody, out=out).wait() is out
            same(out, mine.repeat(size))
            sizes = [other + 1 for other in range(size)]
            given = torch.cat([values(one, dtype, one) for one in sizes])
            same(bps_torch.all_to_all(given, sizes=sizes), values(rank + 1, dtype, rank + 1).repeat(size))
    if rank == 0:
        got = torch.empty(3)
        assert sorted(bps_torch.recv_any(got) for _ in range(size - 1)) == list(range(1, size))
    else:
        bps_torch.send(torch.ones(3), dst=0)
    rows = torch.full((rank + 1, 2), float(rank))
    right = torch.cat([torch.full((other + 1, 2), float(other)) for other in range(size)])
    same(bps_torch.all_gather(rows, "u", uneven=True), right)
    same(bps_torch.all_gather_async(rows, uneven=True, out=torch.empty_like(right)).wait(), right)


@pytest.mark.parametrize("on_device", [False, True])
@harness.on_ranks(workers=2)
def test_many_tensors_at_once(bps: Any, on_device: bool) -> None:
    rank, size = bps.rank(), bps.size()
    if on_device:
        install(immediate=True)
    total = float(sum(range(size)))
    tensors = {"a": torch.full((3,), float(rank)), "b": torch.full((5, 7), float(rank), dtype=torch.float64)}
    found = bps_torch.push_pull_many(tensors, "m", op="sum")
    assert {name: one.unique().tolist() for name, one in found.items()} == {"a": [total], "b": [total]}
    assert found["b"].shape == (5, 7)
    assert tensors["a"].tolist() == [float(rank)] * 3
    listed = list(tensors.values())
    replaced = bps_torch.push_pull_many_async(listed, average=False, inplace=True).wait()
    assert all(one is other for one, other in zip(replaced, listed, strict=True))
    assert all(one.unique().tolist() == [total] for one in listed)
    weight = torch.ones(2, requires_grad=True)
    squared = weight * weight
    bps_torch.push_pull_many([weight.detach()], inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.sum().backward()
    first = torch.full((3,), float(rank))
    no_mean = torch.ones(4, dtype=torch.bool)
    for wrong, words in ((torch.ones(4, 4).t(), "not contiguous"), (no_mean, "no mean"), (first[1:], "overlap")):
        with pytest.raises(bps.InvalidTensorError, match=words):
            bps_torch.push_pull_many([first, wrong], inplace=True)
    bps_torch.push_pull_many([first], average=False, inplace=True)
    assert first.tolist() == [total] * 3, "nothing was sent of what was refused"


@pytest.mark.long
@pytest.mark.parametrize("way", ["push_pull", "recv", "broadcast"])
@harness.on_ranks(workers=2)
def test_who_starts_an_operation_is_interrupted(bps: Any, way: str) -> None:
    """Nobody has the handle, so nobody knows when the memory would be the caller's again: it is so at once."""
    peer, point, goes_on = 1 - bps.rank(), 0, True
    how = {"recv": {"src": peer}, "broadcast": {"root": 1}}.get(way, {})
    call = getattr(bps_torch, "push_pull_async_inplace" if way == "push_pull" else f"{way}_async")
    while goes_on:
        tensor, handles, name = torch.full((5000,), 3.0 + bps.rank()), [], f"given up {point}"
        if bps.rank() == 0:
            goes_on = interrupted(point, lambda: handles.append(call(tensor, name, **how)))  # noqa: B023  called at once
            give_up(handles)
            kept = tensor.clone()
            bps.barrier()
        else:
            bps.barrier()
            with contextlib.suppress(bps.PeerLostError, bps.DeadlineError):
                if way == "recv":
                    bps_torch.send(tensor, name, dst=0, timeout=0.1)
                else:
                    call(tensor, name, timeout=0.1, **how).wait()
        bps.barrier()
        assert bps.rank() == 1 or torch.equal(tensor, kept), f"the memory was not the caller's again, at point {point}"
        goes_on = bool(bps.broadcast(torch.tensor([goes_on]), "goes on")[0])
        point += 1
    assert point > 10


@harness.on_ranks(workers=2, interrupts=True)
def test_many_sums_are_given_up(bps: Any) -> None:
    tensors = [torch.full((5000,), float(number)) for number in range(3)]
    if bps.rank() == 0:
        harness.is_interrupted(lambda: bps_torch.push_pull_many(tensors, "many", inplace=True))
        bps.barrier()
        bps.barrier()
        assert all(bool((each == number).all()) for number, each in enumerate(tensors)), "they are the caller's again"
    else:
        bps.barrier()
        with contextlib.suppress(bps.PeerLostError, bps.DeadlineError):
            bps_torch.push_pull_many([each + 10 for each in tensors], "many", timeout=0.3)
        bps.barrier()
