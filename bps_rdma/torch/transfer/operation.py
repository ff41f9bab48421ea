# SPDX-License-Identifier: Apache-2.0
"""One staged collective: how it is cut into chunks, and its handle."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bps_rdma import Handle
from bps_rdma.blockers import Blocker
from bps_rdma.errors import DeadlineError, RoundAbortedError
from bps_rdma.handle import PythonHandle
from bps_rdma.job import current, raised
from bps_rdma.torch.transfer.device import Device

_GRACE = 10.0  # seconds; the core's own deadline names the missing ranks, and comes first


@dataclass(frozen=True)
class Layout:
    """The tensor to transfer as rows of equal length: a chunk is the same columns of all of them, row by row.

    Attributes:
        rows: 1, or one for each rank of the group.
        columns: elements of a row.
        sources: (row, flat tensor on the device) to be copied down.
        targets: (row, flat tensor on the device) to be copied up.
        dtype: of all of them.
    """

    rows: int
    columns: int
    sources: Sequence[tuple[int, torch.Tensor]]
    targets: Sequence[tuple[int, torch.Tensor]]
    dtype: torch.dtype

    def cut(self, chunk_bytes: int) -> Iterator[tuple[int, int]]:
        """(first column, column after the last) of each chunk of at most `chunk_bytes`."""
        width = max(chunk_bytes // (self.rows * self.dtype.itemsize), 1)
        for begin in range(0, self.columns, width):
            yield begin, min(begin + width, self.columns)

    def nbytes(self, columns: tuple[int, int]) -> int:
        """Bytes of a chunk."""
        return self.rows * (columns[1] - columns[0]) * self.dtype.itemsize


class StagedOperation(PythonHandle[torch.Tensor]):
    """A handle that several threads may wait for, repeatedly.

    Args:
        device: where the tensors are.
        layout: what is transferred.
        send: starts the operation of one chunk: (rows of the chunk in pinned memory, its number) -> handle.
        name: the same on all ranks; operations of one name keep their order.
        result: what wait() returns.
        patience: seconds in which at least one chunk of the pipeline must complete.
        progress: number of chunks that have completed in the pipeline.
    """

    def __init__(
        self,
        device: Device,
        layout: Layout,
        send: Callable[[torch.Tensor, int], Handle[Any]],
        name: str,
        result: torch.Tensor,
        patience: float,
        progress: Callable[[], int],
    ) -> None:
        self.device = device
        self.layout = layout
        self.send = send
        self.name = name
        self._epoch = current().epoch
        self.ready = device.record(device.current())
        self._copied: Any = None  # event: what has been received is on the device again
        self._result = result
        self.patience = patience + _GRACE
        self.progress = progress
        self._changed = threading.Condition()
        self._over = False
        self._error: Exception | None = None
        self._fd: int | None = None

    # ---- For the caller

    def wait(self) -> torch.Tensor:
        """Blocks until the copy of the result to the device has been started, and returns the tensor.

        Work that the calling thread's stream is given from then on waits for that copy. After an error, too, it finds a
        tensor that does not change any more: chunks that arrive later are dropped.

        Raises:
            DeadlineError, PeerLostError, ...: the error of the first chunk that failed.
        """
        while not self._over:
            before = self.progress()
            with self._changed:
                over = self._changed.wait_for(lambda: self._over, self.patience)
            if not over and self.progress() == before:
                problem = f"{self.name}: none of the chunks in progress on this device completed within"
                hint = "the device has not reached this operation yet: check what it computes before it"
                self.end(DeadlineError(f"{problem} {self.patience:g} s", hint))
        self.follow()
        if self._error is not None:
            raise raised(self._error)
        return self._result

    def follow(self) -> None:
        """Makes the calling thread's stream wait for the copies to the device."""
        if self._copied is not None:
            self.device.order(self.device.current(), self._copied)

    @property
    def place(self) -> torch.device:
        """The device of the result, in torch's terms."""
        return self._result.device

    def done(self) -> bool:
        """Returns whether wait() would return or raise at once."""
        return self._over

    def blocker(self) -> Blocker:
        """The operation itself, of which threads move the parts."""
        return self

    def completion_fd(self) -> int:
        """A descriptor that is readable once wait() would not block."""
        with self._changed:
            if self._fd is None:
                self._fd = os.eventfd(int(self._over), os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            return self._fd

    def __del__(self) -> None:
        if getattr(self, "_fd", None) is not None:
            os.close(self._fd)  # type: ignore[arg-type]

    # ---- For the pipeline

    @property
    def failed(self) -> bool:
        """Returns whether its remaining chunks need not be sent."""
        return self._error is not None

    def check_view(self) -> None:
        """Raises RoundAbortedError if the view has ended in which this operation began."""
        if current().epoch != self._epoch:
            raise RoundAbortedError(f"{self.name}: the view has ended in which this began", "repeat the step")

    def receive(self, copy: Callable[[], None], record: Callable[[], Any]) -> bool:
        """Starts the copies of a chunk to the device, unless the operation has failed: its tensor then stays as it is.

        Args:
            copy: starts them.
            record: returns an event that happens after those that were started, also if `copy` raises an error.
        """
        with self._changed:
            if not self._over:
                try:
                    copy()
                finally:
                    self._copied = record()
            return not self._over

    def end(self, error: Exception | None = None) -> None:
        """Ends the operation; only the first call counts."""
        with self._changed:
            if self._over:
                return
            self._error, self._over = error, True
            if self._fd is not None:
                os.eventfd_write(self._fd, 1)
            self._changed.notify_all()
