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

from bps_rdma.tools.bench.baselines import SumInPlace
from bps_rdma.tools.bench.plan import Case, Plan
from bps_rdma.tools.bench.worker import CHANNEL, PLAN, serve

TEAM = "BPS_BENCH_TEAM"  # the name of the baseline


class Mpi(SumInPlace):
    """Allreduce in place."""

    def __init__(self, name: str) -> None:
        super().__init__(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
        self.name = name

    def supports(self, case: Case) -> bool:
        """Sums of the types that MPI supports."""
        return super().supports(case) and case.dtype not in ("float16", "bfloat16")

    def barrier(self) -> None:
        """The barrier of MPI."""
        MPI.COMM_WORLD.Barrier()

    def run(self) -> None:
        """Run all calls; several tensors of one call are started together."""
        if self._group == 1:
            for array in self._arrays:
                MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, array)
            return
        for call in range(0, len(self._arrays), self._group):
            these = self._arrays[call : call + self._group]
            MPI.Request.Waitall([MPI.COMM_WORLD.Iallreduce(MPI.IN_PLACE, array) for array in these])


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
