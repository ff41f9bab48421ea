# SPDX-License-Identifier: Apache-2.0
"""Ends operations in which GPUs of a host wait in vain: NCCL does not notice that a rank is lost, and has no deadline.

(Torch's watchdog has one for it, at which it ends the process.)
"""

from __future__ import annotations

import threading
import time

import numpy as np

import bps_rdma
from bps_rdma.agreement import new_group
from bps_rdma.errors import DeadlineError
from bps_rdma.kept_errors import keeping
from bps_rdma.operations import OperationOptions, start
from bps_rdma.torch.transfer.operation import StagedOperation

_LOOK_S = 1.0


class HostWatch:
    """A thread that looks after one operation at a time, now and then.

    Args:
        name: of what it does for that.
    """

    def __init__(self, name: str) -> None:
        self._alone = OperationOptions(name=name, group=new_group([bps_rdma.rank()], name))
        self._changed = threading.Condition()  # guards the next two
        self._operation: StagedOperation | None = None
        self._stopping = False
        threading.Thread(target=self._run, name="bps_rdma watch", daemon=True).start()

    def turn_to(self, operation: StagedOperation | None) -> None:
        """From now on it looks after this operation; None: after none."""
        with self._changed:
            self._operation = operation
            self._changed.notify_all()

    def stop(self) -> None:
        """Ends the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def _run(self) -> None:
        keeping.for_this_thread()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._operation is not None)
                operation = self._operation
            if self._stopping or operation is None:
                return
            begin, before = time.monotonic(), operation.progress()
            while not self._is_over(operation):
                if operation.progress() != before:
                    begin, before = time.monotonic(), operation.progress()
                self._look(operation, time.monotonic() - begin)
            del operation

    def _is_over(self, operation: StagedOperation) -> bool:
        """Waits for it, but not for long."""
        with self._changed:
            return self._changed.wait_for(lambda: self._stopping or self._operation is not operation, _LOOK_S)

    def _look(self, operation: StagedOperation, seconds: float) -> None:
        """Ends an operation that has made no progress for so long, or if a rank is lost."""
        try:
            number = np.zeros(1, np.uint8)
            start.reduce(number, number, self._alone).wait()  # fails in a job that has lost a rank
            if seconds > operation.patience:
                raise DeadlineError(
                    f"{operation.name}: the GPUs of this host did not end it within {operation.patience:g} s",
                    "check what each rank of this host computes before it",
                )
        except Exception as error:
            operation.end(error)
