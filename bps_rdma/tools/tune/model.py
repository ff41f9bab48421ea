# SPDX-License-Identifier: Apache-2.0
"""The cost of an operation, and the sizes that follow from it. Pure functions.

An operation on b bytes takes o + b / w: a fixed overhead o, and a bandwidth w. Gradients of s bytes are sent in n
buckets while the backward pass makes them. What cannot be hidden behind it is the last bucket, s / (w n), and the
overheads of all, n o. Their sum is smallest with buckets of sqrt(s w o) bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_ITERATIONS = 60
_SMALL = 1e-4  # ratios that differ from 1 by less count as equal
_LEAST = 1e-13  # seconds per byte: more than any machine moves


@dataclass(frozen=True)
class Costs:
    """The costs of one operation.

    Attributes:
        overhead_s: o, seconds per operation.
        bytes_per_s: w, bytes of a rank's tensor per second.
        error: of the fit: the median of |predicted / measured - 1|.
    """

    overhead_s: float
    bytes_per_s: float
    error: float

    def seconds(self, nbytes: int) -> float:
        """The time that an operation takes."""
        return self.overhead_s + nbytes / self.bytes_per_s

    def best_bucket(self, nbytes: int) -> int:
        """The size of buckets, bytes, with the least that shows of sending `nbytes`; at most all of it."""
        return min(max(round(math.sqrt(nbytes * self.bytes_per_s * self.overhead_s)), 1), nbytes)

    def step(self, nbytes: int, bucket: int, backward_s: float) -> float:
        """Seconds of a step that makes `nbytes` in a backward pass and sends them in buckets of `bucket` bytes."""
        buckets = max(round(nbytes / bucket), 1)
        return step_seconds(backward_s, buckets, self.seconds(round(nbytes / buckets)))

    def visible(self, nbytes: int, bucket: int) -> float:
        """Seconds that show when `nbytes` are sent in buckets of `bucket` bytes: the last one, and all overheads."""
        buckets = max(round(nbytes / bucket), 1)
        return nbytes / (self.bytes_per_s * buckets) + buckets * self.overhead_s


def step_seconds(backward_s: float, buckets: int, bucket_s: float) -> float:
    """The time that a backward pass and the sending of its gradients take together.

    The pass completes a bucket after the other, at even intervals; they are sent one after the other, each as soon as
    it is complete and the one before it is over. Either the last bucket follows the pass, or all follow the first one.

    Args:
        backward_s: seconds of the pass alone.
        buckets: into which the gradients are cut.
        bucket_s: seconds of sending one.
    """
    return max(backward_s + bucket_s, backward_s / buckets + buckets * bucket_s)


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> Costs:
    """The costs that describe these measurements best, by the ratios between both.

    Args:
        sizes: bytes, at least two different ones.
        seconds: of one operation each.
    """
    times = np.asarray(seconds, np.float64)
    nbytes = np.asarray(sizes, np.float64)
    costs = np.array([times.min(), max(times[nbytes.argmax()] / nbytes.max(), _LEAST)])
    for _ in range(_ITERATIONS):
        predicted = costs[0] + costs[1] * nbytes
        ratios = np.log(times / predicted)
        # The least sum of absolute values, by least squares: a time that was disturbed, in either direction, does not
        # bend the line.
        weights = 1 / np.sqrt(np.maximum(np.abs(ratios), _SMALL))
        rows = np.stack([1 / predicted, nbytes / predicted], axis=1)
        costs, *_ = np.linalg.lstsq(rows * weights[:, None], (1 + ratios) * weights, rcond=None)
        # Noise can make a straight line cross zero.
        costs = np.maximum(costs, [0.1 * times.min(), _LEAST])
    predicted = costs[0] + costs[1] * nbytes
    return Costs(float(costs[0]), float(1 / costs[1]), float(np.median(np.abs(predicted / times - 1))))


def neighbours(bucket: int, nbytes: int, also: Sequence[int] = ()) -> list[int]:
    """Sizes to try around a size of buckets: a quarter of it to four times as much, and `also`.

    All of them are powers of two times 4 KiB, at most `nbytes`.
    """
    wanted = [bucket / 4, bucket / 2, bucket, bucket * 2, bucket * 4, *also]
    steps = {max(round(math.log2(max(size, 1) / 4096)), 0) for size in wanted}
    return sorted({min(4096 << step, nbytes) for step in steps})
