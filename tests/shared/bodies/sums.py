# SPDX-License-Identifier: Apache-2.0
"""Rounds of push_pull of which every element is checked."""

from collections import deque
from typing import Any

import numpy as np
from reference.values import NUMPY_DTYPES, pushed, summed

ROUNDS = 1000
AHEAD = 3  # rounds of every name on their way at once
# One name per dtype and two more; the sizes are below, at and above what a vector instruction takes at once.
NAMES = [*NUMPY_DTYPES, "float32", "float64"]
COUNTS = [257, 64, 1000, 31, 4096, 1, 129, 77, 2050, 3]


def interleaved_rounds(bps: Any, memory: str, rounds: int = ROUNDS) -> int:
    rank, size = bps.rank(), bps.size()
    make = bps.empty if memory == "empty" else np.empty
    arrays = [[make(n, dtype) for n, dtype in zip(COUNTS, NAMES, strict=True)] for _ in range(AHEAD)]
    wrong = 0
    pending: deque[tuple[int, int, Any]] = deque()

    def check_one() -> int:
        round_, index, handle = pending.popleft()
        result = bps.synchronize(handle)
        expected = summed(COUNTS[index], NAMES[index], range(size), round_, index)
        return int(not np.array_equal(result, expected))

    for round_ in range(rounds):
        for step in range(len(NAMES)):
            index = (step + rank * 3 + round_) % len(NAMES)  # each rank in an order of its own
            while len(pending) > (AHEAD - 1) * len(NAMES):
                wrong += check_one()
            array = arrays[round_ % AHEAD][index]
            array[...] = pushed(COUNTS[index], NAMES[index], rank, round_, index)
            handle = bps.push_pull_async_inplace(array, average=False, name=f"name {index}")
            pending.append((round_, index, handle))
    while pending:
        wrong += check_one()
    return wrong


def averages(bps: Any, transport: str) -> list[str]:
    rank, size = bps.rank(), bps.size()
    assert transport in bps.metrics()["transports"]
    wrong = []
    for dtype in NUMPY_DTYPES:
        if dtype == "bool":
            continue
        for count in (1, 31, 257, 5000):
            unsigned = dtype == "uint8"
            bias = 30 if unsigned else 0
            array = (pushed(count, "int64", rank) + bias).astype(dtype)
            total = summed(count, "int64", range(size)) + bias * size
            bps.push_pull_inplace(array, average=True, name=f"{dtype} {count}")
            if dtype.startswith("float"):
                # Half types divide in float32 and round once.
                wide = np.float64 if dtype == "float64" else np.float32
                expected = (total.astype(wide) / wide(size)).astype(dtype)
            else:
                expected = (total // size).astype(dtype)  # numpy floors as Python does
                assert not (unsigned and np.any(total > 255))
            if not np.array_equal(array, expected):
                wrong.append(f"{dtype} {count}: {array[:4]} is not {expected[:4]}")
    return wrong


def in_place_and_not(bps: Any) -> None:
    mine = np.arange(1000, dtype=np.float32) + bps.rank()
    kept = mine.copy()
    result = bps.push_pull(mine, average=False, name="out of place")
    assert result is not mine
    assert not np.shares_memory(result, mine)
    assert np.array_equal(mine, kept), "push_pull() changed its input"
    assert np.array_equal(result, 2 * np.arange(1000, dtype=np.float32) + 1)

    address = mine.ctypes.data
    assert bps.push_pull_inplace(mine, average=False, name="in place") is mine
    assert mine.ctypes.data == address
    assert np.array_equal(mine, result)

    handle = bps.push_pull_async_inplace(mine, average=False, name="in place, async")
    assert bps.synchronize(handle) is mine
    assert np.array_equal(mine, 2 * result)

    # A part of an array: its neighbours stay as they are.
    whole = np.full(100, 7, np.int32)
    bps.push_pull_inplace(whole[10:20], average=False, name="part")
    assert np.array_equal(whole, np.where((np.arange(100) >= 10) & (np.arange(100) < 20), 14, 7))

    # More dimensions, and none.
    matrix = np.ones((3, 4, 5), np.float64)
    assert bps.push_pull(matrix, average=False, name="matrix").shape == (3, 4, 5)
    scalar = np.array(3.0, np.float32)
    assert bps.push_pull(scalar, average=False, name="scalar").shape == ()
    assert bps.push_pull_inplace(scalar, average=False, name="scalar") == 6.0


def rounds_of(bps: Any, rounds: int, count: int) -> list[int]:
    """Rounds of one tensor in place; those whose sum was wrong."""
    rank, size = bps.rank(), bps.size()
    wrong = []
    array = np.empty(count, np.int32)
    for round_ in range(rounds):
        array[...] = pushed(count, "int32", rank, round_)
        bps.push_pull_inplace(array, average=False, name="x")
        if not np.array_equal(array, summed(count, "int32", range(size), round_)):
            wrong.append(round_)
    return wrong
