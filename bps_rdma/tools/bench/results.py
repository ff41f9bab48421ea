# SPDX-License-Identifier: Apache-2.0
"""The results of a run, and their JSON form. Keys are stable: within one `schema` they are only added."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import bps_rdma
from bps_rdma.tools.bench.plan import Case, Plan
from bps_rdma.tools.bench.stats import Timing, compare, cpu_per_gb, rates

SCHEMA = 2  # in 1 a round was one call
OURS = "bps_rdma"


@dataclass(frozen=True)
class CaseResult:
    """One case: the timing of each implementation, and how many results of bps_rdma were checked on all ranks."""

    case: Case
    timings: dict[str, Timing]
    checked: int

    @property
    def ours(self) -> Timing:
        """The timing of bps_rdma."""
        return self.timings[OURS]


@dataclass(frozen=True)
class Outcome:
    """A whole run.

    Attributes:
        plan: what was measured.
        results: one per case.
        workers: number of worker processes.
        servers: number of dedicated server processes; 0: servers inside the workers.
        routes: the transports in use between ranks and servers: "self", "shm", "tcp", "rdma".
    """

    plan: Plan
    results: tuple[CaseResult, ...]
    workers: int
    servers: int
    routes: tuple[str, ...]

    @property
    def transport(self) -> str:
        """The transport between processes, as `shm` or `shm+tcp`; `self` with one rank."""
        return "+".join(sorted(set(self.routes) - {"self"})) or "self"

    @property
    def job(self) -> str:
        """`2 workers, 1 server process, transport tcp, plain memory`."""
        workers = f"{self.workers} worker{'s' * (self.workers != 1)}"
        servers = f"{self.servers} server process{'es' * (self.servers != 1)}"
        place = servers if self.servers else "servers in the workers"
        load = f", with {self.plan.load} busy processes" * bool(self.plan.load)
        return f"{workers}, {place}, transport {self.transport}, {self.plan.memory} memory{load}"

    @property
    def checked(self) -> int:
        """Results of bps_rdma that equal the known sum. A single wrong one ends the run."""
        return sum(result.checked for result in self.results)


def routes_of(per_rank: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """All routes that any rank reports."""
    return tuple(sorted({route for routes in per_rank for route in routes}))


def to_json(outcome: Outcome) -> dict[str, Any]:
    """Everything in the tables, and all times. Milliseconds are per call."""
    return {
        "schema": SCHEMA,
        "version": bps_rdma.__version__,
        "machine": {"processor": platform.machine(), "cpus": os.cpu_count(), "kernel": platform.release()},
        "job": {
            "workers": outcome.workers,
            "servers": outcome.servers,
            "transport": outcome.transport,
            "routes": list(outcome.routes),
            "memory": outcome.plan.memory,
            "load": outcome.plan.load,
        },
        "checked": outcome.checked,
        "results": [_case_json(result, outcome.workers) for result in outcome.results],
    }


def _case_json(result: CaseResult, world: int) -> dict[str, Any]:
    case = result.case
    others = {name: timing for name, timing in result.timings.items() if name != OURS}
    return {
        "op": case.op,
        "dtype": case.dtype,
        "size_bytes": case.nbytes,
        "tensors": case.tensors,
        "calls_per_round": case.calls,
        "rounds": len(result.ours.seconds),
        "checked": result.checked,
        **_timing_json(case, world, result.ours),
        "compare": {
            name: _timing_json(case, world, timing) | {"speedup": asdict(compare(result.ours, timing))}
            for name, timing in others.items()
        },
    }


def _timing_json(case: Case, world: int, timing: Timing) -> dict[str, Any]:
    gbps = rates(case, world, timing.median)
    return {
        "median_ms": timing.median / case.calls * 1e3,
        "p99_ms": timing.p99 / case.calls * 1e3,
        "min_ms": timing.least / case.calls * 1e3,
        "per_rank_gbps": gbps.per_rank,
        "aggregate_gbps": gbps.aggregate,
        "bus_gbps": gbps.bus,
        "cpu_seconds_per_gb": cpu_per_gb(case, world, timing),
        "switches_per_call": timing.switches / (case.calls * len(timing.seconds) * world),
        "times_ms": [round(seconds / case.calls * 1e3, 5) for seconds in timing.seconds],
    }
