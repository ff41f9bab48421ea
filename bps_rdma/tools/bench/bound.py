# SPDX-License-Identifier: Apache-2.0
"""An upper bound for this machine: the ranks sum shared memory without any communication or synchronisation.

All tensors lie in memory that every rank has mapped, and each rank sums its part of all of them into the first one.
Every sum on one host has to do at least this, so no library exceeds the bound by more than noise. Its rounds alternate
with those of the other implementations, because the memory bandwidth varies with other work on the machine.
"""

from __future__ import annotations

import mmap

import numpy as np

import bps_rdma
from bps_rdma.errors import BpsError
from bps_rdma.tools.bench.baselines import fall_in_step
from bps_rdma.tools.bench.pattern import Array, numpy_dtype
from bps_rdma.tools.bench.plan import Case, Plan

# numpy converts half types one element at a time, so the bound would be that of numpy, not of the machine.
_DTYPES = ("float32", "float64", "int32", "int64", "int8", "uint8")


def supports(case: Case) -> bool:
    """Only sums have this bound."""
    return case.op == "push_pull" and case.dtype in _DTYPES


def shared_bytes(plan: Plan, world: int) -> int:
    """Bytes that the ranks must share for `plan`; 0 if no case has a bound."""
    return max((case.round_bytes * world for case in plan.cases if plan.bound and supports(case)), default=0)


class Bound:
    """The bound in the form of an implementation."""

    name = "bound"

    def __init__(self, descriptor: int, size: int) -> None:
        """Maps the `size` bytes behind `descriptor`, the same on every rank."""
        self._memory = mmap.mmap(descriptor, size)
        self._rank, self._world = bps_rdma.rank(), bps_rdma.size()

    def supports(self, case: Case) -> bool:
        """Only sums have this bound."""
        return supports(case)

    def start(self, case: Case, memory: str) -> None:
        """Take this rank's part of every row; `memory` makes no difference."""
        count = case.elements * case.arrays
        rows = np.frombuffer(self._memory, numpy_dtype(case.dtype), count * self._world).reshape(self._world, count)
        begin, end = bps_rdma.shard_bounds(count, self._world, self._rank)
        self._parts: list[Array] = [row[begin:end] for row in rows]
        self._rounds = 0
        for row, part in enumerate(self._parts):
            part.fill(1 if row else 0)

    def prepare(self, round_: int) -> None:
        """Does nothing: every round adds the same ones."""

    def barrier(self) -> None:
        """Lets the ranks go at one time."""
        fall_in_step()

    def run(self) -> None:
        """Add the other rows' part to the first row's."""
        first, *others = self._parts
        for other in others:
            np.add(first, other, out=first)

    def check(self, round_: int) -> int:
        """Check that the work was done. This is not a result of bps_rdma, so it does not count as one."""
        self._rounds += 1
        ends = self._parts[0][[0, -1]] if self._parts[0].size else np.empty(0)
        wanted = np.array(self._rounds * (self._world - 1)).astype(self._parts[0].dtype)  # wraps as int8 does
        if (ends != wanted).any():
            raise BpsError(f"round {round_}: the sum in shared memory is {ends}, not {wanted}", "please report this")
        return 0
