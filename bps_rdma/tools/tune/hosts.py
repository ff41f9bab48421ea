# SPDX-License-Identifier: Apache-2.0
"""What `bps tune --hosts` predicts: a step on other hosts than these, and what spare hosts beside them would bring.

A model (bps_rdma.tools.scale_model). Servers run inside the workers and on the spare hosts, with as many loops as they
have by default. The latency is half the measured overhead.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from bps_rdma.errors import InvalidArgumentError
from bps_rdma.tools.scale_model import Hosts, Protocol, best_seconds, partition_for, simulate, spare_share
from bps_rdma.tools.tune.measure import Found

_MOST_COUNTS = 16  # of spare hosts that are tried
_LOOPS = 4  # of a server by itself, where it has as many cores
_UNKNOWN_GBIT = 100.0
_NOTHING = 1e-6  # of a time


@dataclass(frozen=True)
class Cluster:
    """Hosts with workers, and the spare ones that they might get.

    Attributes:
        links: Gbit/s of each host's link.
        ranks: on each host.
        spare_link: Gbit/s of a spare host's link.
    """

    links: tuple[float, ...]
    ranks: int
    spare_link: float

    @property
    def line_rate(self) -> float:
        """Bytes per second of the slowest link of a worker: no placement of sums makes a push_pull faster."""
        return min(self.links) * 1e9 / 8

    def hosts(self, spares: int) -> list[Hosts]:
        """The hosts with so many spare ones."""
        own = [
            Hosts(self.links.count(gbit), gbit, worker=True, server=True, ranks=self.ranks)
            for gbit in dict.fromkeys(self.links)
        ]
        return [*own, Hosts(spares, self.spare_link, server=True)] if spares else own


@dataclass(frozen=True)
class WithSpares:
    """A cluster with some spare hosts.

    Attributes:
        spares: how many.
        share: part of the bytes that they sum.
        seconds: of a push_pull of all gradients.
        best_seconds: the least that any placement of sums could need.
        step_seconds: of a backward pass that sends its gradients in the best buckets.
    """

    spares: int
    share: float
    seconds: float
    best_seconds: float
    step_seconds: float


@dataclass(frozen=True)
class Predicted:
    """A cluster without spare hosts, and with more and more of them.

    Attributes:
        counts: without any first.
        enough: with so many, one more brings nothing: the slowest link of a worker is full of its own bytes.
    """

    cluster: Cluster
    nbytes: int
    counts: tuple[WithSpares, ...]
    enough: int

    @property
    def without(self) -> WithSpares:
        """The cluster as it is."""
        return self.counts[0]

    def of_line_rate(self, seconds: float) -> float:
        """The goodput of a push_pull that takes so long, as a part of the slowest link's speed."""
        return self.nbytes / seconds / self.cluster.line_rate


def cluster_of(found: Found, hosts: int, ranks: int, gbit: str | None, spare_gbit: float | None) -> Cluster:
    """The cluster that the options describe.

    Args:
        found: the links of the job count where no others are given.
        hosts: how many.
        ranks: on each.
        gbit: Gbit/s of their links: one number, or one for each host. None: as measured.
        spare_gbit: of a spare host's link. None: as the slowest of the others.
    """
    links = tuple(found.links) if gbit is None else speeds_of(gbit, hosts)
    if len(links) != hosts:
        links = (min(links, default=_UNKNOWN_GBIT),) * hosts
    return Cluster(links, ranks, min(links) if spare_gbit is None else spare_gbit)


def speeds_of(gbit: str, hosts: int) -> tuple[float, ...]:
    """Reads --gbit: one number, or one for each host."""
    try:
        speeds = tuple(float(one) for one in gbit.split(","))
    except ValueError:
        speeds = ()
    if len(speeds) not in (1, hosts) or not all(0 < one < math.inf for one in speeds):
        raise InvalidArgumentError(
            f"--gbit {gbit} are no speeds of {hosts} links", "give one number, or one for each host"
        )
    return speeds


def predict(found: Found, cluster: Cluster) -> Predicted:
    """What the cluster needs for these gradients, without and with spare hosts."""
    most = len(cluster.links) if len(cluster.links) > 1 else 0  # one host needs no network
    counts = sorted({*range(0, most, math.ceil(most / _MOST_COUNTS) or 1), most})
    return Predicted(cluster, found.nbytes, tuple(_with(found, cluster, count) for count in counts), enough(cluster))


def enough(cluster: Cluster) -> int:
    """The number of spare hosts from which on one more brings nothing, if all links are as full as they can be."""

    def seconds(spares: int) -> float:
        return best_seconds(cluster.hosts(spares), 1 << 30)

    most = math.ceil(len(cluster.links) * min(cluster.links) / cluster.spare_link)  # they sum everything
    full = seconds(most) * (1 + _NOTHING)
    return bisect_left(range(most), True, key=lambda spares: seconds(spares) <= full)


def _with(found: Found, cluster: Cluster, spares: int) -> WithSpares:
    hosts = cluster.hosts(spares)
    seconds = _seconds(found, hosts, found.nbytes)
    buckets = max(round(found.nbytes / found.bucket), 1)
    last = _seconds(found, hosts, found.nbytes // buckets)
    return WithSpares(
        spares=spares,
        share=spare_share(hosts),
        seconds=seconds,
        best_seconds=best_seconds(hosts, found.nbytes),
        # Either the last bucket follows the pass, or all follow the first one: on the links they overlap.
        step_seconds=max(found.backward_s + last, found.backward_s / buckets + seconds),
    )


def _seconds(found: Found, hosts: Sequence[Hosts], nbytes: int) -> float:
    protocol = Protocol(
        partition_bytes=found.partition or partition_for(hosts),
        latency_s=found.costs.overhead_s / 2,
        server_loops=_LOOPS,
    )
    return simulate(hosts, nbytes, protocol).seconds
