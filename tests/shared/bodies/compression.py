# SPDX-License-Identifier: Apache-2.0
"""Compressed tensors."""

from typing import Any

import numpy as np
from reference import codecs

from bps_rdma import job

PARTITION = 16 * 1024
COUNT = 10_000  # two full partitions and one shorter


def gradient(rank: int, step: int, count: int = COUNT) -> np.ndarray:
    return np.random.default_rng(1000 * rank + step).standard_normal(count).astype(np.float32)


def by_partition(text: str, values: np.ndarray, tensor: int, step: int, sender: int) -> np.ndarray:
    """What the code of a whole tensor says."""
    size = PARTITION // 4
    parts = []
    for partition, begin in enumerate(range(0, len(values), size)):
        seed = codecs.seed_of(tensor, partition, step, sender)
        parts.append(codecs.reference(text, values[begin : begin + size], seed)[1])
    return np.concatenate(parts)


def sums(bps: Any, text: str, average: bool) -> list[bytes]:
    results = []
    for step in range(3):
        array = gradient(bps.rank(), step)
        bps.push_pull_inplace(array, average=average, name="g", compression=bps.Compression.from_text(text))
        tensor = job.current().tensors[0, "g"].id
        total = by_partition(text, gradient(0, step), tensor, step, 0)
        for rank in range(1, bps.size()):
            total += by_partition(text, gradient(rank, step), tensor, step, rank)
        if average:
            total /= np.float32(bps.size())
        expected = by_partition(text, total, tensor, step, 2**32 - 1)
        assert (array == expected).all(), (step, np.flatnonzero(array != expected)[:5])
        results.append(array.tobytes())
    return results


def equal_everywhere(bps: Any, method: str) -> tuple[bytes, dict[str, int]]:
    array = gradient(bps.rank(), 0, 50_000)
    bps.push_pull_inplace(array, name="g", compression=bps.Compression.from_text(method))
    exact = np.mean([gradient(rank, 0, 50_000).astype(np.float64) for rank in range(bps.size())], axis=0)
    assert np.abs(array - exact).max() < 0.05
    return array.tobytes(), {key: value for key, value in bps.metrics()["total"].items() if "compressed" in key}


def scattered(bps: Any) -> None:
    for step in range(3):
        array = gradient(bps.rank(), step, 60_000)
        part = bps.reduce_scatter(array, name="s", compression=bps.Int8(), average=False)
        exact = sum(gradient(rank, step, 60_000).astype(np.float64) for rank in range(bps.size()))
        begin, end = bps.shard_bounds(60_000, bps.size(), bps.rank())
        assert np.abs(part - exact[begin:end]).max() < 0.15
    assert bps.metrics()["total"]["compressed_bytes"] > 0


def fed_back(bps: Any, text: str) -> None:
    total = np.zeros(COUNT)
    plain = np.zeros(COUNT)
    array = gradient(bps.rank(), 0)
    steps = 50
    with_it, without_it = map(bps.Compression.from_text, (text + ":feedback=1", text))
    for _ in range(steps):
        total += bps.push_pull(array, name="fed back", compression=with_it)
        plain += bps.push_pull(array, name="plain", compression=without_it)
    exact = steps * np.mean([gradient(rank, 0).astype(np.float64) for rank in range(bps.size())], axis=0)
    with_feedback, without = np.abs(total - exact).mean(), np.abs(plain - exact).mean()
    assert with_feedback < without / 10, (with_feedback, without)


def many_at_once(bps: Any) -> list[bytes]:
    arrays = [gradient(bps.rank(), step, 40_000) for step in range(20)]
    order = np.random.default_rng(bps.rank()).permutation(20)
    handles = {
        i: bps.push_pull_async_inplace(arrays[i], name=f"t{i}", priority=i % 3, compression=bps.Int8(feedback=True))
        for i in order
    }
    for i in range(20):
        handles[i].wait()
        exact = np.mean([gradient(rank, i, 40_000).astype(np.float64) for rank in range(bps.size())], axis=0)
        assert np.abs(arrays[i] - exact).max() < 0.05
    return [array.tobytes() for array in arrays]
