# SPDX-License-Identifier: Apache-2.0
"""A job that loses servers while arrays of a GPU travel, which its ranks do not notice."""

from typing import Any

import gpu_arrays
import harness
import numpy as np
from gpu_arrays import GpuArray, fake
from harness import mark

from bodies.failover import FAST

COUNT = 60_000  # many partitions


def env(transport: str = "", **more: str) -> dict[str, str]:
    """Over any transport, unless one is named."""
    return (harness.over(transport) if transport else {}) | gpu_arrays.env() | FAST | harness.cut_at(16384) | more


def values(rank: int, step: int, count: int = COUNT) -> np.ndarray[Any, Any]:
    """Other ones in each place, on each rank and at each step; their sums are exact."""
    return (np.arange(count) * 7 % 1000 + 1000 * rank + step).astype(np.float64)


def total(size: int, step: int) -> np.ndarray[Any, Any]:
    return sum((values(rank, step) for rank in range(1, size)), values(0, step))


def expect(array: Any, expected: np.ndarray[Any, Any], *what: Any) -> None:
    found = array.read() if isinstance(array, GpuArray) else array
    wrong = np.flatnonzero(found != expected)
    assert not len(wrong), (*what, len(wrong), wrong[:3], found[wrong[:3]], expected[wrong[:3]])
    assert not isinstance(array, GpuArray) or array.is_contained(), what


class Arrays:
    """What the operations of a rank work on: of a GPU, unless it is said otherwise."""

    def __init__(self, bps: Any) -> None:
        self.rank, self.size = bps.rank(), bps.size()
        low, high = bps.shard_bounds(COUNT, self.size, self.rank)
        self.own = slice(low, high)
        self.array, self.out, self.fixed, self.fixed_out = (GpuArray(COUNT, "float64") for _ in range(4))
        self.part = GpuArray(high - low, "float64")
        self.on_host = np.empty(COUNT)
        # Ranks need not agree on where their arrays lie.
        self.mixed: Any = GpuArray(COUNT, "float64") if self.rank % 2 == 0 else np.empty(COUNT)

    def check_sums(self, bps: Any, step: int) -> None:
        mine, summed = values(self.rank, step), total(self.size, step)
        self.array.write(mine)
        bps.push_pull_inplace(self.array, average=False, name="in place")
        expect(self.array, summed, "in place", step)
        self.array.write(mine)
        out = bps.push_pull(self.array, average=False, name="new")
        expect(out, summed, "new", step)
        expect(self.array, mine, "input", step)
        _write(self.mixed, mine)
        bps.push_pull_inplace(self.mixed, average=False, name="mixed")
        expect(self.mixed, summed, "mixed", step)

    def check_moves(self, bps: Any, step: int) -> None:
        mine, summed = values(self.rank, step), total(self.size, step)
        self.array.write(mine)
        bps.reduce_scatter(self.array, "scattered", out=self.part, average=False)
        expect(self.part, summed[self.own], "scattered", step)
        expect(self.array, mine, "scattered from", step)
        self.part.write(mine[self.own])
        bps.all_gather(self.part, "gathered", out=self.out)
        parts = [values(rank, step)[slice(*bps.shard_bounds(COUNT, self.size, rank))] for rank in range(self.size)]
        expect(self.out, np.concatenate(parts), "gathered", step)
        self.array.write(mine)
        bps.broadcast(self.array, root=1, name="broadcast")
        expect(self.array, values(1, step), "broadcast", step)

    def check_many(self, bps: Any, step: int, prepared: list[Any]) -> None:
        """Several at a time, in the memory of both."""
        mine, summed = values(self.rank, step), total(self.size, step)
        self.array.write(mine)
        self.on_host[:] = mine
        self.fixed.write(mine)
        handles = [
            bps.push_pull_async_inplace(one, name=f"async {i}", average=False)
            for i, one in enumerate((self.array, self.on_host))
        ]
        for one in prepared:
            one.start()
        for handle, one in zip(handles, (self.array, self.on_host), strict=True):
            handle.wait()
            expect(one, summed, "async", step)
        for one in prepared:
            one.wait()
        expect(self.fixed, mine, "prepared from", step)
        expect(self.fixed_out, summed, "prepared", step)


def _write(array: Any, wanted: np.ndarray[Any, Any]) -> None:
    if isinstance(array, GpuArray):
        array.write(wanted)
    else:
        array[:] = wanted


def train(bps: Any, steps: int, delay_us: int = 200) -> dict[str, Any]:
    fake().fake_delay(delay_us)
    arrays = Arrays(bps)
    prepared = [bps.prepare("push_pull", arrays.fixed, out=arrays.fixed_out, average=False, name="prepared")]
    for step in range(1, steps + 1):
        arrays.check_sums(bps, step)
        arrays.check_moves(bps, step)
        arrays.check_many(bps, step, prepared)
        if step % 5 == 0:
            bps.commit()
            mark(f"step-{step}")
    bps.barrier()
    total = bps.metrics()["total"]
    return {"size": bps.size(), "device_bytes": total["device_bytes_from"] + total["device_bytes_to"]}
