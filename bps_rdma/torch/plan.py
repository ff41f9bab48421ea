# SPDX-License-Identifier: Apache-2.0
"""Chooses the gradients that are sent together: the strategies, and the filling of buckets."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from bps_rdma.errors import InvalidArgumentError
from bps_rdma.torch.bucket_sizes import BucketSizes
from bps_rdma.torch.sparse import Rows
from bps_rdma.torch.units import Bucket, IndexedParameter, Sent, Single

Unit = Single | Bucket | Rows

StrategyName = Literal["naive", "flat", "overlap", "bucketed"]


@dataclass(frozen=True)
class Strategy:
    """A way to send gradients.

    Attributes:
        buckets: several in one block of memory, or each in place.
        eager: during backward, as soon as they are complete; otherwise after it.
        one_by_one: each is waited for before the next one is sent.
    """

    buckets: bool
    eager: bool
    one_by_one: bool = False


STRATEGIES = {
    "naive": Strategy(buckets=False, eager=False, one_by_one=True),
    "flat": Strategy(buckets=True, eager=False),
    "overlap": Strategy(buckets=False, eager=True),
    "bucketed": Strategy(buckets=True, eager=True),
}


def strategy_of(name: str) -> Strategy:
    """The strategy of this name.

    Raises:
        InvalidArgumentError: there is no such strategy.
    """
    if name not in STRATEGIES:
        raise InvalidArgumentError(f"strategy {name!r} is not known", f"use one of {', '.join(STRATEGIES)}")
    return STRATEGIES[name]


def units_of(
    order: Sequence[IndexedParameter],
    strategy: Strategy,
    sizes: BucketSizes,
    generation: int,
    sent: Sent,
    sparse: Container[str] = (),
) -> list[Unit]:
    """The units in which the gradients are sent.

    Args:
        order: the parameters in the order in which their gradients are expected.
        sizes: of buckets; the flat strategy ignores them.
        strategy: whether there are buckets, and when they are sent.
        generation: part of the names of buckets, so that those filled in another order have other names.
        sent: prefix, group and compression.
        sparse: names of the parameters whose gradients are sparse; each is a unit of its own.
    """
    rows: list[Unit] = [Rows(entry, sent) for entry in order if entry.name in sparse]
    order = [entry for entry in order if entry.name not in sparse]
    if not strategy.buckets:
        return [*rows, *(Single(entry, sent) for entry in order)]
    if not strategy.eager:
        sizes = BucketSizes(float("inf"), float("inf"))
    parts: list[list[IndexedParameter]] = []
    # One open bucket per dtype and device: neighbours of mixed dtypes do not close each other's.
    open_parts: dict[tuple[torch.dtype, torch.device], tuple[list[IndexedParameter], float]] = {}
    for entry in order:
        dtype = entry.parameter.dtype
        size = entry.parameter.numel() * dtype.itemsize
        kind = dtype, entry.parameter.device
        part, filled = open_parts.get(kind, ([], 0.0))
        limit = sizes.others if parts and part is not parts[0] else sizes.first
        if not part or filled + size > limit:
            part, filled = [], 0.0
            parts.append(part)
        part.append(entry)
        open_parts[kind] = (part, filled + size)
    return [*rows, *(Bucket(f"{generation}.{number}", part, sent) for number, part in enumerate(parts))]
