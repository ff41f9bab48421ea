# SPDX-License-Identifier: Apache-2.0
"""Chooses the size of buckets, where the caller has not, by the size of all gradients and where they lie."""

from __future__ import annotations

import math
from typing import NamedTuple

_MB = 1 << 20


class BucketSizes(NamedTuple):
    """The largest size of the first bucket, and of all others, in bytes. A larger gradient has one of its own."""

    first: float
    others: float


# Overlap hides less than a second operation costs: with 3 MB of gradients on a CPU a step with one bucket took 4.9 ms,
# with two 5.3 and with one per layer 7.5. On a GPU each operation costs half a millisecond, as much as copying 6 MB.
_ONE_BUCKET = 4 * _MB
_FIRST = 1 * _MB  # small, so that communication starts early in backward; torch's DDP does the same
# On a CPU the size made no difference beyond the noise, from 1 MB to 1000 MB with 92 MB of gradients. 25 is torch's.
_OTHERS = 25 * _MB
# On a GPU, buckets of sqrt(s w o) bytes cost least (bps_rdma/tools/tune/model.py): an operation costs o = 0.5 ms and
# w = 12 GB/s are copied. That is more than 25 MB from 114 MB of gradients on.
_GPU_COST = 12e9 * 0.5e-3


def bucket_sizes(gradient_bytes: int, on_device: bool) -> BucketSizes:
    """The sizes with which a step is expected to take least; docs/notes/measurements.md has the figures.

    Args:
        gradient_bytes: of all gradients that are sent in buckets.
        on_device: they are on a GPU, and staged.
    """
    if gradient_bytes <= _ONE_BUCKET:
        return BucketSizes(_ONE_BUCKET, _ONE_BUCKET)
    if on_device:
        return BucketSizes(_FIRST, max(_OTHERS, math.sqrt(gradient_bytes * _GPU_COST)))
    return BucketSizes(_FIRST, _OTHERS)


def sizes_of(bucket_mb: float) -> BucketSizes:
    """The sizes where the caller has chosen one, in units of 2^20 bytes."""
    return BucketSizes(min(bucket_mb * _MB, _FIRST), bucket_mb * _MB)
