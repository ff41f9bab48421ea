"""One rank's part of the measuring: rounds of a case, all contenders in turn."""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from typing import TypedDict

from bps_rdma.bench.contenders import Contender
from bps_rdma.bench.plan import Case


class Run(TypedDict):
    """What some rounds of one contender came to on this rank.

    `seconds`: of each round. `cpu`: processor seconds, and `switches`: context switches, of the whole process in all of
    those rounds.
    """

    seconds: list[float]
    cpu: float
    switches: int


class CaseRunner:
    """The contenders that can do `case`, with their memory. Making one is collective over the ranks."""

    def __init__(self, case: Case, memory: str, contenders: Sequence[Contender]) -> None:
        self.checked = 0
        self._contenders = [contender for contender in contenders if contender.supports(case)]
        self._rounds = 0
        for contender in self._contenders:
            contender.start(case, memory)

    def run(self, count: int, only: str | None = None) -> dict[str, Run]:
        """Run `count` rounds, of one contender `only` or of all; what they came to, by the contender's name.

        Raises WrongResultError when a result, of any contender, is not the known sum.
        """
        contenders = [contender for contender in self._contenders if only in (None, contender.name)]
        runs: dict[str, Run] = {c.name: {"seconds": [], "cpu": 0.0, "switches": 0} for c in contenders}
        for _ in range(count):
            # Who goes first alternates: the first one finds the caches as the checks of the round before left them.
            order = contenders if self._rounds % 2 == 0 else contenders[::-1]
            for contender in order:
                self._round(contender, runs[contender.name])
            self._rounds += 1
        return runs

    def _round(self, contender: Contender, run: Run) -> None:
        contender.prepare(self._rounds)
        contender.barrier()
        before = resource.getrusage(resource.RUSAGE_SELF)
        begin = time.perf_counter()
        contender.run()
        run["seconds"].append(time.perf_counter() - begin)
        after = resource.getrusage(resource.RUSAGE_SELF)
        run["cpu"] += after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        run["switches"] += after.ru_nvcsw + after.ru_nivcsw - before.ru_nvcsw - before.ru_nivcsw
        checked = contender.check(self._rounds)
        if contender.name == "bps_rdma":
            self.checked += checked
