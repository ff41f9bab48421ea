# SPDX-License-Identifier: Apache-2.0
"""Which GPUs sum what before anything is sent: decided once for a group, by the same function of the same facts on all.

A tensor is cut into slices. Each host spreads all of them over its ranks, in order, and a slice is then summed by the
ranks that have it: one of each host. With as many ranks on all hosts each rank has one slice. Hosts with 4 and 2 ranks
cut into 4: the ranks of the first have one each, those of the second two. So a rank sends 1/L of the tensor, with L
ranks on its host, however many the others have.

A tensor that has a part for each rank is not cut: a rank has the parts of those that have its place on their hosts.
That takes as many ranks on all hosts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

APART = "no two of its ranks are on one host"
_MOST_SLICES = 64  # each is an operation of its own


class Where(NamedTuple):
    """Where a rank computes.

    Attributes:
        host: alike on all ranks of a host.
        gpu: of the host; zeros: its GPU cannot sum with others.
    """

    host: bytes
    gpu: bytes


@dataclass(frozen=True)
class Plan:
    """The share of one rank.

    Attributes:
        hosts: the ranks of each.
        peers: the ranks of this one's host, itself included.
        slices: into so many a tensor is cut.
        first: slice of this rank.
        owners: of each slice of this rank: the ranks that sum it.
    """

    hosts: tuple[tuple[int, ...], ...]
    peers: tuple[int, ...]
    slices: int
    first: int
    owners: tuple[tuple[int, ...], ...]

    @property
    def is_even(self) -> bool:
        """Whether all hosts have as many ranks. Then this rank's owners are those of its place."""
        return len({len(host) for host in self.hosts}) == 1

    @property
    def by_place(self) -> tuple[int, ...]:
        """All ranks, if `is_even`: those of the first place on their hosts, those of the second, and so on."""
        return tuple(rank for place in zip(*self.hosts, strict=True) for rank in sorted(place))

    def owners_beside(self, rank: int) -> tuple[int, ...]:
        """Of each slice of this rank, the owner on the host of `rank`."""
        host = next(host for host in self.hosts if rank in host)
        return tuple(next(owner for owner in owners if owner in host) for owners in self.owners)


def plan_for(rank: int, ranks: Sequence[int], found: Sequence[Where]) -> Plan | str:
    """The plan for one of the ranks; or why there is none, which is the same on all of them.

    Args:
        rank: whose.
        ranks: of the group.
        found: where each of these computes.
    """
    hosts: dict[bytes, list[int]] = {}
    for each, where in zip(ranks, found, strict=True):
        hosts.setdefault(where.host, []).append(each)
    counts = {len(members) for members in hosts.values()}
    if counts == {1}:
        return APART
    if any(not any(where.gpu) for where in found):
        return "torch has no NCCL on some rank, or does not tell GPUs apart"
    if len(set(found)) < len(found):
        return "some of its ranks share a GPU, which NCCL refuses"
    slices = math.lcm(*counts)
    if slices > _MOST_SLICES:
        return f"its hosts have {', '.join(map(str, sorted(counts)))} ranks, which would take {slices} slices"
    peers = next(members for members in hosts.values() if rank in members)
    width = slices // len(peers)
    first = peers.index(rank) * width
    owners = [
        tuple(sorted(members[number * len(members) // slices] for members in hosts.values()))
        for number in range(first, first + width)
    ]
    return Plan(tuple(map(tuple, hosts.values())), tuple(peers), slices, first, tuple(owners))
