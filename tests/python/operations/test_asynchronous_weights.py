# SPDX-License-Identifier: Apache-2.0
"""Weights that servers keep: ranks add to them without waiting for each other, or only for those far behind."""

import os
import re
import signal
from typing import Any
from unittest import mock

import harness
import numpy as np
import pytest
from bodies.stored_weights import COUNT, added, bounded

from bps_rdma.errors import InvalidArgumentError, InvalidTensorError, MismatchError, PeerLostError

TCP = {"BPS_TRANSPORT": "tcp"}
SMALL = harness.cut_at(16384)


@pytest.mark.parametrize("dtype", ["float32", "int64"])
@pytest.mark.parametrize("env", [{}, TCP, TCP | SMALL], ids=["shm", "tcp", "small"])
@pytest.mark.parametrize("servers", [None, 2])
def test_nothing_that_was_added_is_lost(servers: int | None, env: dict[str, str], dtype: str) -> None:
    results = harness.run(added, dtype, workers=3, servers=servers, env=env)
    assert len(set(results)) == 1


def alone(bps: Any) -> None:
    bps.store(np.zeros(COUNT, np.float32), name="w")
    if bps.rank() == 0:
        for number in range(1, 31):
            assert (bps.accumulate(np.ones(COUNT, np.float32), name="w") == number).all()
    bps.barrier()  # until here the other one has not added anything
    weights = np.ones(COUNT, np.float32)
    assert bps.accumulate(weights, name="w", out=weights) is weights
    assert weights.min() >= 31
    bps.barrier()
    bps.store(np.full(COUNT, 7, np.float32), root=1, name="w")
    bps.barrier()
    assert (bps.accumulate(np.zeros(COUNT, np.float32), name="w") == 7).all()


def test_nobody_waits() -> None:
    harness.run(alone, workers=2)
    harness.run(alone, workers=2, servers=1, env=TCP)


@pytest.mark.parametrize("env", [{}, TCP | SMALL], ids=["shm", "tcp"])
def test_a_rank_that_is_too_far_ahead_waits(env: dict[str, str]) -> None:
    harness.run(bounded, workers=2, env=env)


@pytest.mark.parametrize("env", [{}, TCP | SMALL], ids=["shm", "tcp"])
@harness.on_ranks("env", workers=2)
def test_weights_are_given_back(bps: Any) -> None:
    weights = np.full(COUNT, 1, np.float32)
    bps.store(weights, name="w")
    bps.accumulate(weights, name="w")
    bps.barrier()
    mine = np.empty(COUNT, np.float32)
    assert bps.unstore(mine, name="w") is mine
    assert (mine == 1 + bps.size()).all()
    with pytest.raises(InvalidArgumentError, match=r"store\(\)"):
        bps.accumulate(weights, name="w")
    with pytest.raises(InvalidArgumentError, match=r"store\(\)"):
        bps.unstore(mine, name="w")
    bps.store(mine, name="w")
    assert (bps.accumulate(0 * mine, name="w") == 1 + bps.size()).all()


@harness.on_ranks(workers=3, servers=1, env=TCP, but=[1])
def test_a_lost_worker_is_not_waited_for(bps: Any) -> None:
    one = np.ones(COUNT, np.float32)
    bps.store(np.zeros(COUNT, np.float32), name="w")
    if bps.rank() == 1:
        bps.accumulate(one, name="w", staleness=1)
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(10):
        last = bps.accumulate(one, name="w", staleness=1)
    assert last[0] >= 10


@harness.on_ranks(workers=2, servers=2, env=TCP, kills="server 1")
def test_a_lost_server_takes_the_weights_with_it(bps: Any) -> None:
    one = np.ones(10 * COUNT, np.float32)
    bps.store(0 * one, name="w")
    bps.accumulate(one, name="w")
    harness.mark("running")
    lost: PeerLostError | None = None
    while lost is None:
        try:
            bps.accumulate(one, name="w")
        except PeerLostError as error:
            lost = error
    assert re.search("server [01]", str(lost)), lost  # a server of which nobody says which it is gets any free number


@harness.on_ranks(workers=2)
def test_bad_input_is_refused(bps: Any) -> None:
    one = np.ones(4, np.float32)
    with pytest.raises(InvalidArgumentError, match=r"store\(\)"):
        bps.accumulate(one, name="never stored")
    for call in (bps.accumulate, bps.accumulate_async, bps.store, bps.unstore):
        with pytest.raises(InvalidArgumentError, match="need a name"):
            call(one, name=None)
        with pytest.raises(TypeError, match="'name'"):
            call(one)
    for staleness in (-1, 0.5, "2"):
        with pytest.raises(InvalidArgumentError, match="staleness"):
            bps.accumulate(one, name="w", staleness=staleness)
    bps.store(one, name="w")
    for root in (bps.rank(), 1 - bps.rank()):  # both send, or none
        with pytest.raises(MismatchError, match="different roots"):
            bps.store(np.zeros(4, np.float32), name="w", root=root)
    assert (bps.accumulate(0 * one, name="w") == 1).all()  # they keep what they kept
    with pytest.raises(MismatchError):
        bps.accumulate(np.ones(5, np.float32), name="w")
    with pytest.raises(InvalidTensorError, match="`out`"):
        bps.accumulate(one, name="w", out=np.ones(5, np.float32))
    if bps.rank() == 0:
        group = bps.new_group([0])
        bps.store(one, name="of one", group=group)
        assert (bps.accumulate(one, name="of one", group=group, staleness=0) == 2).all()
    assert (bps.push_pull(one, name="w", average=False) == bps.size()).all()  # the name serves for sums as well


def summed_on_host(bps: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="BPS_ASYNC=1"):
        bps.store(np.ones(4, np.float32), name="w")


def test_hosts_that_sum_first_are_refused() -> None:
    harness.run(summed_on_host, **harness.on_hosts("aab"))
    harness.run(added, "float32", env={"BPS_ASYNC": "1"}, **harness.on_hosts("aab"))


@pytest.mark.parametrize("how", ["refused", "interrupted"])
@harness.on_ranks(workers=2, env={"BPS_ASYNC": "1"})
def test_an_addition_that_never_began_is_added_when_it_is_made_again(bps: Any, how: str) -> None:
    bps.store(np.zeros(5000), "w")
    bps.accumulate(np.ones(5000), "w")
    bps.barrier()
    delta = np.full(5000, 10.0)
    for expected in (12, 22):
        if bps.rank() == 0:
            if how == "refused":
                with pytest.raises(bps.InvalidArgumentError):
                    bps.accumulate(delta, "w", staleness=-1)
            else:
                with (
                    mock.patch("bps_rdma.operations.start.accumulate", side_effect=KeyboardInterrupt),
                    pytest.raises(KeyboardInterrupt),
                ):
                    bps.accumulate(delta, "w")
            for _ in range(2):  # and nothing twice
                assert np.all(bps.accumulate(delta, "w", again=True) == expected)
    bps.barrier()
    assert np.all(bps.unstore(np.empty(5000), "w") == 22)
