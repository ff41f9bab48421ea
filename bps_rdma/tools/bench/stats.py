# SPDX-License-Identifier: Apache-2.0
"""Statistics of the times of one case."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bps_rdma.tools.bench.measure import Run
from bps_rdma.tools.bench.plan import Case


@dataclass(frozen=True)
class Rates:
    """GB/s (10^9 bytes) of one implementation in one case, from its median time.

    Defined as in BytePS's benchmark and nccl-tests: `per_rank` = bytes of one rank / time, `aggregate` = per_rank times
    the number of ranks, `bus` = per_rank times what an optimal algorithm must move over each link: 2(n-1)/n for a sum
    on all ranks, (n-1)/n for reduce_scatter and all_gather, 1 for a broadcast.
    """

    per_rank: float
    aggregate: float
    bus: float


@dataclass(frozen=True)
class Timing:
    """One implementation in one case.

    Attributes:
        seconds: of each round, the time of the slowest rank.
        cpu: processor seconds of all ranks in all rounds; dedicated servers are not included.
        switches: context switches of all ranks in all rounds; dedicated servers are not included.
    """

    seconds: tuple[float, ...]
    cpu: float = 0.0
    switches: int = 0

    def __add__(self, more: Timing) -> Timing:
        """The rounds of both."""
        return Timing(self.seconds + more.seconds, self.cpu + more.cpu, self.switches + more.switches)

    @property
    def median(self) -> float:
        """The median time."""
        return statistics.median(self.seconds)

    @property
    def p99(self) -> float:
        """The time that 99 of 100 rounds do not exceed; the largest time of fewer rounds."""
        return quantile(self.seconds, 0.99)

    @property
    def least(self) -> float:
        """The shortest time."""
        return min(self.seconds)


@dataclass(frozen=True)
class Ratio:
    """Speedup over another implementation: quartiles of time(other) / time(ours) over paired rounds."""

    median: float
    lower: float
    upper: float


def rates(case: Case, world: int, seconds: float) -> Rates:
    """Rates of a round of `case` among `world` ranks that took `seconds`."""
    per_rank = case.round_bytes / seconds / 1e9
    factor = {"push_pull": 2 * (world - 1) / world, "broadcast": 1.0}.get(case.op, (world - 1) / world)
    return Rates(per_rank, per_rank * world, per_rank * factor)


def cpu_per_gb(case: Case, world: int, timing: Timing) -> float:
    """Processor seconds of all ranks per 10^9 bytes of all ranks' tensors."""
    return timing.cpu / (case.round_bytes * len(timing.seconds) * world / 1e9)


def merge(per_rank: Sequence[Run]) -> Timing:
    """Per round, the time of the slowest rank: a round ends when it has ended on every rank."""
    seconds = zip(*(run["seconds"] for run in per_rank), strict=True)
    return Timing(
        tuple(max(times) for times in seconds),
        sum(run["cpu"] for run in per_rank),
        sum(run["switches"] for run in per_rank),
    )


def compare(ours: Timing, other: Timing) -> Ratio:
    """Compare round by round, so that other work on the machine disturbs both sides of a ratio."""
    ratios = [b / a for a, b in zip(ours.seconds, other.seconds, strict=True)]
    return Ratio(statistics.median(ratios), quantile(ratios, 0.25), quantile(ratios, 0.75))


def quantile(values: Sequence[float], q: float) -> float:
    """The quantile `q` by the nearest-rank method: the smallest value that a share `q` of all does not exceed."""
    ordered = sorted(values)
    index = -(-len(ordered) * round(q * 1000) // 1000) - 1
    return ordered[max(index, 0)]
