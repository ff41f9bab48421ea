# SPDX-License-Identifier: Apache-2.0
"""Ranks that do things in different orders and at different speeds."""

import os
import random
import time
from collections import deque
from typing import Any

import numpy as np
from harness import await_mark, mark
from reference.values import pushed, summed

KIB = 1024
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


def urgent_behind_bulk(bps: Any, urgency: int) -> tuple[bool, int, bool]:
    """Was the large tensor, which was started first, over before the small one, and how many pieces at the most?

    Nothing of the large one is complete before the last rank starts both, when all others have. That rank begins with a
    small one that is urgent: how soon after the other its call would come is for the machine to say.
    """
    large, small = np.ones(2_000_000, np.float32), np.ones(100, np.float32)
    bps.declare_many({"large": large, "small": small})
    bps.barrier()
    starts = {
        "large": lambda: bps.push_pull_async(large, False, "large", priority=0),
        "small": lambda: bps.push_pull_async(small, False, "small", priority=urgency),
    }
    if bps.rank() == bps.size() - 1:
        await_mark("started", *range(bps.rank()))
        starts = dict(sorted(starts.items(), reverse=urgency > 0))
    handles = {name: start() for name, start in starts.items()}
    mark("started")
    bulk, urgent = handles["large"], handles["small"]
    urgent_result = bps.synchronize(urgent)
    bulk_was_over, pieces = bps.poll(bulk), bps.metrics()["total"]["partitions"]
    right = bool(np.all(bps.synchronize(bulk) == bps.size()) and np.all(urgent_result == bps.size()))
    # This thread may have been late to look. Both times begin a moment apart, in milliseconds.
    ended = {one["name"]: one["duration_us"] - 1000 * one["age_ms"] for one in bps.dump()["recent"]}
    return bulk_was_over and ended["large"] < ended["small"] + 2000, pieces, right
