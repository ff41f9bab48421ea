"""One rank's part of the measuring: rounds of a case, all contenders in turn."""

from __future__ import annotations

import time
from collections.abc import Sequence

from bps_rdma.bench.contenders import Contender
from bps_rdma.bench.plan import Case


class CaseRunner:
    """The contenders that can do `case`, with their memory. Making one is collective over the ranks."""

    def __init__(self, case: Case, memory: str, contenders: Sequence[Contender]) -> None:
        self.checked = 0
        self._contenders = [contender for contender in contenders if contender.supports(case)]
        self._rounds = 0
        for contender in self._contenders:
            contender.start(case, memory)

    def run(self, count: int) -> dict[str, list[float]]:
        """Run `count` rounds; seconds per contender and round on this rank.

        Raises WrongResultError when a result, of any contender, is not the known sum.
        """
        times: dict[str, list[float]] = {contender.name: [] for contender in self._contenders}
        for _ in range(count):
            # Who goes first alternates: the first one finds the caches as the checks of the round before left them.
            order = self._contenders if self._rounds % 2 == 0 else self._contenders[::-1]
            for contender in order:
                times[contender.name].append(self._round(contender))
            self._rounds += 1
        return times

    def _round(self, contender: Contender) -> float:
        contender.prepare(self._rounds)
        contender.barrier()
        begin = time.perf_counter()
        contender.run()
        seconds = time.perf_counter() - begin
        checked = contender.check(self._rounds)
        if contender.name == "bps_rdma":
            self.checked += checked
        return seconds
