# SPDX-License-Identifier: Apache-2.0
"""Tensors of sizes around the borders of partitions."""

from typing import Any

import numpy as np
from reference.values import pushed, summed

PARTITION = 4096  # bytes


def check(bps: Any, count: int, dtype: str, name: str) -> None:
    """One round of a tensor, in place and out of place, exact."""
    rank, size = bps.rank(), bps.size()
    expected = summed(count, dtype, range(size))
    mine = pushed(count, dtype, rank)
    assert np.array_equal(bps.push_pull(mine, average=False, name=name), expected), f"{name}, out of place"
    guarded = np.concatenate([mine[:0], mine, mine[:1]])  # one element more, which nobody may touch
    last = guarded[-1:].copy()
    bps.push_pull_inplace(guarded[:count], average=False, name=name)
    assert np.array_equal(guarded[:count], expected), f"{name}, in place"
    assert np.array_equal(guarded[count:], last), f"{name} wrote beyond its end"


def sizes_around_partitions(bps: Any) -> None:
    for count in (0, 1, 2, PARTITION - 1, PARTITION, PARTITION + 1, 3 * PARTITION - 1, 3 * PARTITION, 77777):
        check(bps, count, "uint8", f"bytes {count}")
    for count in (0, 1, PARTITION // 8 - 1, PARTITION // 8, PARTITION // 8 + 1, 12345):
        check(bps, count, "float64", f"doubles {count}")
    check(bps, 3333, "float16", "halves")


def loops_and_hashes(bps: Any) -> None:
    for count in (1, 5000, 40_000):
        for index in range(6):
            check(bps, count, "float32", f"{count} {index}")
    rank, size = bps.rank(), bps.size()
    part = bps.reduce_scatter(pushed(30_001, "int32", rank), average=False, name="scattered")
    begin, end = bps.shard_bounds(30_001, size, rank)
    assert np.array_equal(part, summed(30_001, "int32", range(size))[begin:end])
