"""MPI's Allreduce as a contender: Open MPI or MPICH, whichever this interpreter's mpi4py belongs to.

A rank of its own kind of job: mpiexec starts it (teams.py), in the peer's virtual environment (environments.py). There
it measures and checks by the same code as the other contenders.
"""

from __future__ import annotations

import os
import socket
import sys

from mpi4py import MPI

from bps_rdma.bench.contenders import allocate
from bps_rdma.bench.pattern import Pattern
from bps_rdma.bench.plan import Case, Plan
from bps_rdma.bench.worker import CHANNEL, PLAN, serve

TEAM = "BPS_BENCH_TEAM"  # the peer's name


class Mpi:
    """A contender for push_pull: Allreduce in place."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._world = MPI.COMM_WORLD

    def supports(self, case: Case) -> bool:
        """Sums of types that MPI knows."""
        return case.op == "push_pull" and case.dtype not in ("float16", "bfloat16")

    def start(self, case: Case, memory: str) -> None:
        """Arrays of its own. `memory` makes no difference to MPI, which knows no shared arrays here."""
        self._group = case.tensors
        self._pattern = Pattern(case.dtype, self._world.size)
        self._arrays = [allocate(case.elements, case.dtype, "plain") for _ in range(case.arrays)]

    def prepare(self, round_: int) -> None:
        """Own values everywhere."""
        for array in self._arrays:
            self._pattern.fill(array, self._world.rank, round_)

    def barrier(self) -> None:
        """MPI's."""
        self._world.Barrier()

    def run(self) -> None:
        """The tensors of a call in one go, as the others do."""
        if self._group == 1:
            for array in self._arrays:
                self._world.Allreduce(MPI.IN_PLACE, array)
            return
        for call in range(0, len(self._arrays), self._group):
            these = self._arrays[call : call + self._group]
            MPI.Request.Waitall([self._world.Iallreduce(MPI.IN_PLACE, array) for array in these])

    def check(self, round_: int) -> int:
        """Every element of every result."""
        for array in self._arrays:
            self._pattern.check_sum(array, round_)
        return len(self._arrays)


def main() -> None:
    """One rank: calls the launcher and serves."""
    channel = socket.socket(socket.AF_UNIX)
    channel.connect(os.environ[CHANNEL])
    with channel, channel.makefile("r") as requests, channel.makefile("w") as answers:
        contenders = [Mpi(os.environ[TEAM])]
        status = serve(Plan.from_json(os.environ[PLAN]), lambda: contenders, requests, answers)
    if status:  # the others wait for us in a collective call, perhaps
        MPI.COMM_WORLD.Abort(status)
    sys.exit(status)
