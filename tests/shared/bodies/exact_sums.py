# SPDX-License-Identifier: Apache-2.0
"""Exact sums, and their digests."""

import functools
import hashlib
from typing import Any

import numpy as np
from reference.exact_sums import exact_sum, gradients


@functools.cache
def expected(dtype: str, divisor: int = 1) -> bytes:
    return exact_sum(gradients(dtype), divisor).tobytes()


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def summed(bps: Any, dtype: str, grouping: str) -> str:
    """Of eight gradients, which are spread over the ranks, and which each rank adds up in its own order."""
    strided, blocks = range(8)[bps.rank() :: bps.size()], np.array_split(range(8), bps.size())[bps.rank()]
    mine = strided if grouping == "strided" else blocks
    order = reversed(mine) if bps.rank() % 2 else mine
    total = bps.ExactSum(gradients(dtype)[0], name="micro-batches")
    for number in order:
        total.add(gradients(dtype)[number])
    first = total.push_pull().tobytes()
    assert total.push_pull().tobytes() == first
    return digest(first)


def in_one_call(bps: Any, dtype: str, average: bool) -> list[str]:
    found, of = [], f"{dtype} {average}"
    for exact in (True, None):  # as declared
        array = gradients(dtype)[bps.rank()]
        found.append(digest(bps.push_pull(array, average=average, name=f"g {of}", exact=exact).tobytes()))
    prepared = bps.prepare("push_pull", gradients(dtype)[bps.rank()], average=average, name=f"p {of}", exact=True)
    found.append(digest(prepared().tobytes()))
    whole = gradients(dtype)[bps.rank()]
    part = bps.reduce_scatter(whole, average=average, name=f"s {of}", exact=True)
    found.append(digest(bps.all_gather(part, name=f"w {of}", out=np.empty_like(whole)).tobytes()))
    return found
