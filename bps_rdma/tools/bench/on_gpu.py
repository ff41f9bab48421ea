# SPDX-License-Identifier: Apache-2.0
"""bps_rdma with the tensors of a case on a GPU, as bps_rdma.torch sends them under the current settings.

Values are made and checked in arrays of the host, from and to which they are copied outside of the timed part. A round
ends when the GPU has its results.
"""

from __future__ import annotations

from typing import Any

import torch

import bps_rdma
import bps_rdma.torch
from bps_rdma.errors import InvalidArgumentError
from bps_rdma.tools.bench.baselines import PushPull
from bps_rdma.tools.bench.plan import Case


def own_gpu() -> torch.device:
    """The GPU of this rank. Ranks share one where there are fewer of them on the host."""
    if not torch.cuda.is_available():
        raise InvalidArgumentError("--device cuda: torch finds no GPU on this machine", "leave out --device")
    return torch.device("cuda", bps_rdma.local_rank() % torch.cuda.device_count())


class PushPullOnGpu(PushPull):
    """See above."""

    def __init__(self, *, prepared: bool = False) -> None:
        super().__init__(prepared=prepared)
        self._gpu = own_gpu()
        self._bps = bps_rdma.torch

    def _place(self, case: Case) -> None:
        self._hosts = [_tensor(array) for array in self._arrays]
        self._arrays = [host.to(self._gpu, copy=True) for host in self._hosts]
        self._part_hosts: list[torch.Tensor] = []
        if case.op == "reduce_scatter":
            self._part_hosts = [_tensor(part) for part in self._operands]
            self._operands = [host.to(self._gpu, copy=True) for host in self._part_hosts]
        elif case.op == "all_gather":
            self._operands = [array[self._begin : self._end] for array in self._arrays]

    def prepare(self, round_: int) -> None:
        """Fills in this rank's values."""
        super().prepare(round_)
        for array, host in zip(self._arrays, self._hosts, strict=True):
            array.copy_(host)
        self._finish()

    def run(self) -> None:
        """Runs all calls, and waits until the GPU has their results."""
        super().run()
        self._finish()

    def check(self, round_: int) -> int:
        """Checks every element of every result."""
        for host, array in zip(self._hosts, self._arrays, strict=True):
            host.copy_(array)
        for host, part in zip(self._part_hosts, self._operands if self._part_hosts else [], strict=True):
            host.copy_(part)
        return super().check(round_)

    def _finish(self) -> None:
        if self._gpu.type == "cuda":
            torch.cuda.synchronize(self._gpu)


def _tensor(array: Any) -> torch.Tensor:
    return array if isinstance(array, torch.Tensor) else torch.from_numpy(array)
