"""Staged operations as a work of torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from bps_rdma.torch.backend.work import BpsWork
from bps_rdma.torch.staging.operation import StagedOperation


class StagedWork(BpsWork):
    """As BpsWork; every wait() also orders the stream of the thread that calls it, as works of NCCL do."""

    def __init__(self, kind: str, operations: Sequence[StagedOperation], tensors: list[torch.Tensor]) -> None:
        """Arguments: what to wait for, and the results."""
        handles: list[Any] = list(operations)
        super().__init__(kind, handles, (), tensors, tensors)
        self._staged = operations

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Blocks until all results are on their way to the device; the stream goes on when they are there."""
        super().wait(timeout)
        for operation in self._staged:
            operation.follow()
        return True
