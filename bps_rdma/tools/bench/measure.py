# SPDX-License-Identifier: Apache-2.0
"""One rank's part of the measurement: runs the rounds of a case, with all implementations in turn."""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from typing import TypedDict

from bps_rdma.tools.bench.baselines import Implementation
from bps_rdma.tools.bench.plan import Case


class Run(TypedDict):
    """Measurements of some rounds of one implementation on this rank.

    Attributes:
        seconds: of each round.
        cpu: processor seconds of the whole process in all these rounds.
        switches: context switches of the whole process in all these rounds.
    """

    seconds: list[float]
    cpu: float
    switches: int


class CaseRunner:
    """The implementations that support `case`, with their memory. The constructor is a collective call."""

    def __init__(self, case: Case, memory: str, implementations: Sequence[Implementation]) -> None:
        self.checked = 0
        self._implementations = [implementation for implementation in implementations if implementation.supports(case)]
        self._rounds = 0
        for implementation in self._implementations:
            implementation.start(case, memory)

    def run(self, count: int, only: str | None = None) -> dict[str, Run]:
        """Run `count` rounds of all implementations, or of `only` one; returns the measurements by name.

        Raises WrongResultError when a result of any implementation differs from the known sum.
        """
        implementations = [
            implementation for implementation in self._implementations if only in (None, implementation.name)
        ]
        runs: dict[str, Run] = {c.name: {"seconds": [], "cpu": 0.0, "switches": 0} for c in implementations}
        for _ in range(count):
            # The order alternates, because the first one finds the caches as the previous round's checks left them.
            order = implementations if self._rounds % 2 == 0 else implementations[::-1]
            for implementation in order:
                self._round(implementation, runs[implementation.name])
            self._rounds += 1
        return runs

    def _round(self, implementation: Implementation, run: Run) -> None:
        implementation.prepare(self._rounds)
        implementation.barrier()
        before = resource.getrusage(resource.RUSAGE_SELF)
        begin = time.perf_counter()
        implementation.run()
        run["seconds"].append(time.perf_counter() - begin)
        after = resource.getrusage(resource.RUSAGE_SELF)
        run["cpu"] += after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        run["switches"] += after.ru_nvcsw + after.ru_nivcsw - before.ru_nvcsw - before.ru_nivcsw
        checked = implementation.check(self._rounds)
        if implementation.name == "bps_rdma":
            self.checked += checked
