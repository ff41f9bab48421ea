# SPDX-License-Identifier: Apache-2.0
"""Ranks that do things in different orders and at different speeds: nothing blocks for good, and no round mixes."""

from __future__ import annotations

import os
import random
import time
from collections import deque
from typing import Any

import harness
import numpy as np
import pytest
from reference.values import pushed, summed

KIB = 1024


def declared_in_other_orders(bps: Any) -> None:
    rank, size = bps.rank(), bps.size()
    names = [f"tensor {i}" for i in range(200)]
    counts = {name: 10 + i for i, name in enumerate(names)}
    mine = random.Random(rank).sample(names, len(names))
    for name in mine[: 50 * rank]:  # some one by one, some at once, some not at all
        bps.declare(name, shape=counts[name], dtype="int32")
    bps.declare_many({name: (counts[name], "int32") for name in mine[: 150 - 20 * rank]})
    random.Random(100 + rank).shuffle(mine)
    handles = {
        name: bps.push_pull_async(np.full(counts[name], rank * 1000 + counts[name], np.int32), False, name)
        for name in mine
    }
    for name in names:
        result = bps.synchronize(handles[name])
        expected = size * counts[name] + 1000 * sum(range(size))
        assert result.shape == (counts[name],)
        assert np.all(result == expected), name


@pytest.mark.parametrize(("servers", "transport"), [(None, "shm"), (2, "tcp")])
def test_names_declared_in_different_orders(servers, transport):
    harness.run(declared_in_other_orders, workers=3, servers=servers, env={"BPS_TRANSPORT": transport})


TENSORS = 20
ROUNDS = 100 if os.environ.get("BPS_TEST_ALL") else 50
COUNT = 6 * KIB  # float32: 24 KiB, more than a small landing slot


def random_orders(bps: Any, rounds: int = ROUNDS) -> int:
    """Each rank starts the tensors of a round in an order of its own, and has up to two rounds on the way."""
    rank, size = bps.rank(), bps.size()
    order = random.Random(rank)
    arrays = [[np.empty(COUNT, np.float32) for _ in range(TENSORS)] for _ in range(2)]
    wrong = 0
    pending: deque[list[Any]] = deque()

    def finish() -> int:
        bad = 0
        for round_, index, handle in pending.popleft():
            bad += not np.array_equal(bps.synchronize(handle), summed(COUNT, "float32", range(size), round_, index))
        return bad

    for round_ in range(rounds):
        if len(pending) == 2:
            wrong += finish()
        started = []
        for index in order.sample(range(TENSORS), TENSORS):
            array = arrays[round_ % 2][index]
            array[...] = pushed(COUNT, "float32", rank, round_, index)
            started.append((round_, index, bps.push_pull_async_inplace(array, False, f"t{index}")))
        order.shuffle(started)  # and waits in another order still
        pending.append(started)
    while pending:
        wrong += finish()
    return wrong


SMALL_PARTITIONS = {"BYTEPS_PARTITION_BYTES": str(12 * KIB), "BPS_MIN_PARTITION_BYTES": str(12 * KIB)}
SMALLEST_WINDOW = {"BPS_TRANSPORT": "tcp", "BPS_SERVER_WINDOW": "1"}
TINY_STAGING = {"BPS_TRANSPORT": "shm", "BPS_SHM_CMA": "0", "BPS_STAGING_BYTES": "65536"}


# Each case has 1,000 rounds of one tensor, together 8,000; twice as many in `ci/test --all`.
@pytest.mark.parametrize(
    ("workers", "servers", "env"),
    [
        (2, None, SMALLEST_WINDOW),
        (3, 1, SMALLEST_WINDOW),
        (4, 2, SMALLEST_WINDOW),
        (2, 1, SMALLEST_WINDOW | {"BYTEPS_SCHEDULING_CREDIT": "1"}),
        (3, None, SMALLEST_WINDOW | {"BYTEPS_SCHEDULING_CREDIT": "20000"}),
        (2, None, TINY_STAGING),
        (3, 2, TINY_STAGING | {"BYTEPS_SCHEDULING_CREDIT": "2"}),
        (3, 1, SMALLEST_WINDOW | {"BYTEPS_PUSH_THREAD": "2", "BYTEPS_SERVER_ENGINE_THREAD": "2"}),
    ],
)
def test_random_orders_never_block(workers, servers, env):
    assert harness.run(random_orders, workers=workers, servers=servers, env=SMALL_PARTITIONS | env) == [0] * workers


def last_slot_taken_before(bps: Any) -> None:
    """Rank 1 has filled its two slots with tensors that the others push only after the one it could not send yet."""
    array = {name: np.ones(16 * KIB, np.float32) for name in ("first", "second", "wanted")}
    bps.declare_many(array)
    if bps.rank() == 1:
        handles = [bps.push_pull_async(array[name], False, name) for name in ("first", "second")]
        time.sleep(0.3)
        bps.barrier()
        handles.append(bps.push_pull_async(array["wanted"], False, "wanted"))
        bps.wait(handles)
    else:
        bps.barrier()
        for name in ("wanted", "first", "second"):
            assert np.all(bps.push_pull(array[name], False, name) == 3)


def test_a_worker_without_slots_gets_one_when_only_it_is_missing():
    env = {"BPS_TRANSPORT": "tcp", "BPS_SERVER_WINDOW": "2", "BYTEPS_SERVER_ENGINE_THREAD": "1", "BPS_TIMEOUT": "20"}
    harness.run(last_slot_taken_before, workers=3, servers=1, env=env)


def fast_and_slow(bps: Any, ahead: int, rounds: int) -> int:
    """A tight loop on one name; every rank is slow in its turn. Values differ by round, so a mixed round shows."""
    rank, size = bps.rank(), bps.size()
    arrays = [np.empty(2000, np.int64) for _ in range(ahead)]
    wrong = 0
    pending: deque[tuple[int, Any]] = deque()

    def finish() -> int:
        round_, handle = pending.popleft()
        return int(not np.array_equal(bps.synchronize(handle), summed(2000, "int64", range(size), round_)))

    for round_ in range(rounds):
        if len(pending) == ahead:
            wrong += finish()
        if (round_ // 50) % size == rank and round_ % 5 == 0:
            time.sleep(0.002)
        array = arrays[round_ % ahead]
        array[...] = pushed(2000, "int64", rank, round_)
        pending.append((round_, bps.push_pull_async_inplace(array, False, "x")))
    while pending:
        wrong += finish()
    return wrong


@pytest.mark.parametrize("rounds", [300, pytest.param(1500, marks=pytest.mark.long)])
@pytest.mark.parametrize("ahead", [1, 16])
@pytest.mark.parametrize(("servers", "transport"), [(None, "shm"), (None, "tcp"), (1, "shm"), (2, "tcp")])
def test_rounds_of_a_fast_and_a_slow_rank_never_mix(servers, transport, ahead, rounds):
    env = {"BPS_TRANSPORT": transport}
    assert harness.run(fast_and_slow, ahead, rounds, workers=2, servers=servers, env=env) == [0, 0]


def far_ahead(bps: Any) -> None:
    """Rank 0 starts 500 rounds before rank 1 starts its first."""
    if bps.rank() == 1:
        bps.barrier()
    inputs = [pushed(100, "int32", bps.rank(), round_) for round_ in range(500)]
    handles = [bps.push_pull_async(array, False, "x") for array in inputs]
    if bps.rank() == 0:
        bps.barrier()
    for round_, result in enumerate(bps.wait(handles)):
        assert np.array_equal(result, summed(100, "int32", range(2), round_)), round_


@pytest.mark.parametrize(("servers", "transport"), [(None, "shm"), (None, "tcp"), (1, "tcp")])
def test_a_rank_may_be_hundreds_of_rounds_ahead(servers, transport):
    harness.run(far_ahead, workers=2, servers=servers, env={"BPS_TRANSPORT": transport})


def urgent_behind_bulk(bps: Any, urgency: int) -> tuple[bool, int, bool]:
    """Was the large tensor, which was started first, over before the small one, and how many pieces were?"""
    large, small = np.ones(2_000_000, np.float32), np.ones(100, np.float32)
    bps.declare_many({"large": large, "small": small})
    bps.barrier()
    bulk = bps.push_pull_async(large, False, "large", priority=0)
    urgent = bps.push_pull_async(small, False, "small", priority=urgency)
    urgent_result = bps.synchronize(urgent)
    bulk_was_over, pieces = bps.poll(bulk), bps.metrics()["total"]["partitions"]
    right = bool(np.all(bps.synchronize(bulk) == bps.size()) and np.all(urgent_result == bps.size()))
    return bulk_was_over, pieces, right


@pytest.mark.parametrize(("servers", "transport"), [(None, "shm"), (None, "tcp"), (1, "tcp")])
def test_an_urgent_tensor_overtakes_a_large_one(servers, transport):
    # 8 MB in pieces of 8 kB, one on its way at a time.
    env = {"BYTEPS_PARTITION_BYTES": "8000", "BPS_MIN_PARTITION_BYTES": "8000", "BYTEPS_SCHEDULING_CREDIT": "1"}
    env |= {"BPS_TRANSPORT": transport, "BYTEPS_SERVER_ENGINE_THREAD": "1"}
    for bulk_was_over, _, right in harness.run(urgent_behind_bulk, 10, workers=2, servers=servers, env=env):
        assert right
        assert not bulk_was_over
    for bulk_was_over, pieces, right in harness.run(urgent_behind_bulk, -10, workers=2, servers=servers, env=env):
        assert right
        # Servers do not wait for each other: what is less urgent waits for the bulk of its own server, all or half.
        assert pieces >= (1000 if servers == 1 else 490), "a less urgent tensor overtook"
        assert bulk_was_over or servers != 1
