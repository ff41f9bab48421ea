# SPDX-License-Identifier: Apache-2.0
"""Receives get messages in the order in which they were posted, from any rank or from one, whoever is waited for first.

A message that does not fit is told, and never comes as another one.
"""

import contextlib
import functools
import random
from datetime import timedelta
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
from harness import await_mark
from interrupts import interrupted

import bps_rdma.torch

SMALL, LARGE, LARGER = 3, 5000, 6000


def exchanged(sent: list[int], expected: list[tuple[str, int]], backwards: bool) -> list[str]:
    """What comes of messages from rank 1 to rank 0 of so many elements, of which each holds its number."""
    rank = dist.get_rank()
    works, tensors = [], []
    for number, (count, (who, room)) in enumerate(zip(sent, expected, strict=True)):
        tensors.append(torch.full((room if rank == 0 else count,), float(number) if rank else -1.0))
        if rank == 1:
            works.append(dist.isend(tensors[-1], 0))
        else:
            works.append(dist.irecv(tensors[-1], 1 if who == "one" else None))
    found = [""] * len(works)
    for number in sorted(range(len(works)), reverse=backwards):
        try:
            works[number].wait()
        except bps_rdma.MismatchError:
            found[number] = "mismatch"
        else:
            assert rank == 1 or tensors[number].eq(number).all(), (sent, expected, tensors[number][0])
            found[number] = "came"
    return found


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("backwards", [False, True])
@harness.on_ranks("workers", init=False)
def test_messages_that_fit(bps: Any, backwards: bool) -> None:
    dist.init_process_group("bps")
    if dist.get_rank() < 2:
        for kinds in (["any", "one"], ["any", "any"], ["one", "any", "one", "any", "any", "one"]):
            for sizes in ([SMALL], [LARGE], [SMALL, LARGE]):
                sent = [sizes[number % len(sizes)] for number in range(len(kinds))]
                assert exchanged(sent, list(zip(kinds, sent, strict=True)), backwards) == ["came"] * len(kinds)
    bps.barrier()


@pytest.mark.parametrize("kinds", [["one"], ["one", "any"]])
@harness.on_ranks(workers=2, init=False)
def test_messages_of_which_some_do_not_fit(bps: Any, kinds: list[str]) -> None:
    """Whichever of them is waited for first, nothing waits for a message that will never come."""
    dist.init_process_group("bps", timeout=timedelta(seconds=20 * harness.PATIENCE))
    chance = random.Random(2)
    for _ in range(40):
        sent = [chance.choice([SMALL, LARGE, LARGER]) for _ in range(chance.randint(2, 6))]
        rooms = [count if chance.random() < 0.7 else chance.choice([SMALL, LARGE, LARGER]) for count in sent]
        expected = [(chance.choice(kinds), room) for room in rooms]
        backwards = chance.choice([False, True]), chance.choice([False, True])
        found = exchanged(sent, expected, backwards[dist.get_rank()])
        if dist.get_rank() == 0 or kinds == ["one"]:
            fits = [count == room for count, room in zip(sent, rooms, strict=True)]
            assert all(one == "mismatch" or fit for one, fit in zip(found, fits, strict=True)), (sent, rooms, found)
        before = next((number for number, count in enumerate(sent) if count != rooms[number]), len(sent))
        assert found[:before] == ["came"] * before, (sent, rooms, found)
    bps.barrier()


@harness.on_ranks(workers=2, init=False, interrupts=True)
def test_an_interrupted_receive_takes_no_message(bps: Any) -> None:
    dist.init_process_group("bps", timeout=timedelta(seconds=20 * harness.PATIENCE))
    if dist.get_rank() == 0:
        given_up, tensor = torch.full((SMALL,), -1.0), torch.zeros(SMALL)
        harness.is_interrupted(lambda: dist.recv(given_up))
        assert dist.recv(tensor) == 1
        assert tensor.eq(1).all()
        assert given_up.eq(-1).all()
    else:
        await_mark("interrupted", 0)
        dist.send(torch.ones(SMALL), 0)


@pytest.mark.parametrize("count", [SMALL, LARGE])
@pytest.mark.parametrize("way", ["one", "any"])
@harness.on_ranks(workers=2, init=False)
def test_a_receive_is_interrupted_at_each_point(bps: Any, way: str, count: int) -> None:
    dist.init_process_group("bps", timeout=timedelta(seconds=20 * harness.PATIENCE))
    goes_on, point = torch.ones(1), 0
    while goes_on:
        if dist.get_rank() == 0:
            given_up, tensor = torch.full((count,), -1.0), torch.zeros(count)
            goes_on.fill_(interrupted(point, functools.partial(dist.recv, given_up, 1 if way == "one" else None)))
            kept, found = given_up.clone(), []
            while 2 not in found:
                with contextlib.suppress(bps.PeerLostError):  # the sender was told that its message was given up
                    assert dist.recv(tensor, 1 if way == "one" else None) == 1
                    assert tensor.eq(tensor[0]).all()
                    found.append(int(tensor[0]))
            assert found in ([2], [1, 2]), point
            assert given_up.equal(kept), f"the memory was not the caller's again, at point {point}"
            assert way == "one" or found == [1, 2] or kept.eq(1).all(), f"the message was lost at point {point}"
        else:
            for value in (1.0, 2.0):
                with contextlib.suppress(bps.PeerLostError):
                    dist.send(torch.full((count,), value), 0)
        dist.broadcast(goes_on, 0)
        point += 1
