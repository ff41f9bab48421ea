# SPDX-License-Identifier: Apache-2.0
"""torch.distributed's gloo all_reduce, in the same processes and on the same kind of memory as a plain push_pull."""

from __future__ import annotations

import torch
import torch.distributed as dist

from bps_rdma.tools.bench.baselines import SumInPlace, as_operand
from bps_rdma.tools.bench.plan import Case


class Gloo(SumInPlace):
    """Its all_reduce. Gloo copies tensors anyway, wherever they lie."""

    name = "gloo"

    def __init__(self) -> None:
        dist.init_process_group("gloo", init_method="env://")
        super().__init__(dist.get_rank(), dist.get_world_size())

    def start(self, case: Case, memory: str) -> None:
        """Allocate tensors."""
        super().start(case, memory)
        operands = (as_operand(array, case.dtype) for array in self._arrays)
        self._tensors = [o if isinstance(o, torch.Tensor) else torch.from_numpy(o) for o in operands]

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
