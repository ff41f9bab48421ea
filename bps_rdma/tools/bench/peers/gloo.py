# SPDX-License-Identifier: Apache-2.0
"""torch.distributed's gloo all_reduce, in the same processes and on the same kind of memory as a plain push_pull."""

from __future__ import annotations

import torch
import torch.distributed as dist

from bps_rdma.tools.bench.baselines import allocate, as_operand
from bps_rdma.tools.bench.pattern import Pattern
from bps_rdma.tools.bench.plan import Case


class Gloo:
    """A baseline for push_pull; sums in place, as push_pull_inplace(average=False) does."""

    name = "gloo"

    def __init__(self) -> None:
        dist.init_process_group("gloo", init_method="env://")
        self._rank = dist.get_rank()

    def supports(self, case: Case) -> bool:
        """Only sums: training uses all_reduce."""
        return case.op == "push_pull"

    def start(self, case: Case, memory: str) -> None:
        """Allocate tensors; gloo copies them anyway, so `memory` makes no difference."""
        self._group = case.tensors
        self._pattern = Pattern(case.dtype, dist.get_world_size())
        self._arrays = [allocate(case.elements, case.dtype, "plain") for _ in range(case.arrays)]
        operands = (as_operand(array, case.dtype) for array in self._arrays)
        self._tensors = [o if isinstance(o, torch.Tensor) else torch.from_numpy(o) for o in operands]

    def prepare(self, round_: int) -> None:
        """Fill in this rank's values."""
        for array in self._arrays:
            self._pattern.fill(array, self._rank, round_)

    def barrier(self) -> None:
        """The barrier of gloo."""
        dist.barrier()

    def run(self) -> None:
        """Run all calls; several tensors of one call are started together."""
        if self._group == 1:
            for tensor in self._tensors:
                dist.all_reduce(tensor)
            return
        for call in range(0, len(self._tensors), self._group):
            for work in [dist.all_reduce(t, async_op=True) for t in self._tensors[call : call + self._group]]:
                work.wait()

    def check(self, round_: int) -> int:
        """Check every element of every result."""
        for array in self._arrays:
            self._pattern.check_sum(array, round_)
        return len(self._arrays)
