# SPDX-License-Identifier: Apache-2.0
"""MPI's Allreduce as a baseline, by the MPI of this interpreter's mpi4py: Open MPI or MPICH.

mpiexec starts the ranks (teams.py) in the virtual environment of that library (environments.py). They measure and check
with the same code as the other implementations.
"""

from __future__ import annotations

import os
import socket
import sys

from mpi4py import MPI

from bps_rdma.tools.bench.baselines import allocate
from bps_rdma.tools.bench.pattern import Pattern
from bps_rdma.tools.bench.plan import Case, Plan
from bps_rdma.tools.bench.worker import CHANNEL, PLAN, serve

TEAM = "BPS_BENCH_TEAM"  # the name of the baseline


class Mpi:
    """A baseline for push_pull: Allreduce in place."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._world = MPI.COMM_WORLD

    def supports(self, case: Case) -> bool:
        """Sums of the types that MPI supports."""
        return case.op == "push_pull" and case.dtype not in ("float16", "bfloat16")

    def start(self, case: Case, memory: str) -> None:
        """Allocate plain arrays; `memory` makes no difference to MPI."""
        self._group = case.tensors
        self._pattern = Pattern(case.dtype, self._world.size)
        self._arrays = [allocate(case.elements, case.dtype, "plain") for _ in range(case.arrays)]

    def prepare(self, round_: int) -> None:
        """Fill in this rank's values."""
        for array in self._arrays:
            self._pattern.fill(array, self._world.rank, round_)

    def barrier(self) -> None:
        """The barrier of MPI."""
        self._world.Barrier()

    def run(self) -> None:
        """Run all calls; several tensors of one call are started together."""
        if self._group == 1:
            for array in self._arrays:
                self._world.Allreduce(MPI.IN_PLACE, array)
            return
        for call in range(0, len(self._arrays), self._group):
            these = self._arrays[call : call + self._group]
            MPI.Request.Waitall([self._world.Iallreduce(MPI.IN_PLACE, array) for array in these])

    def check(self, round_: int) -> int:
        """Check every element of every result."""
        for array in self._arrays:
            self._pattern.check_sum(array, round_)
        return len(self._arrays)


def main() -> None:
    """Run one rank: connect to the launcher and serve its requests."""
    channel = socket.socket(socket.AF_UNIX)
    channel.connect(os.environ[CHANNEL])
    with channel, channel.makefile("r") as requests, channel.makefile("w") as answers:
        implementations = [Mpi(os.environ[TEAM])]
        status = serve(Plan.from_json(os.environ[PLAN]), lambda: implementations, requests, answers)
    if status:  # the other ranks may wait in a collective call
        MPI.COMM_WORLD.Abort(status)
    sys.exit(status)
