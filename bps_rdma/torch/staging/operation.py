"""One collective that is staged: how it is cut into chunks, and what becomes of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bps_rdma import Handle
from bps_rdma.errors import DeadlineError
from bps_rdma.torch.staging.device import Device

_GRACE = 10.0  # seconds; the core's own deadline knows who is missing, and comes first


@dataclass(frozen=True)
class Layout:
    """What travels, as rows of equal length: a chunk is the same columns of all of them, row by row.

    Attributes:
        rows: 1 for an all-reduce; else a row for each rank of the group.
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
        """(first column, column after the last) of each chunk."""
        width = max(chunk_bytes // (self.rows * self.dtype.itemsize), 1)
        for begin in range(0, self.columns, width):
            yield begin, min(begin + width, self.columns)


class StagedOperation:
    """A handle, as the core's: wait(), done(), completion_fd(). wait() may be called by several threads, repeatedly.

    Args:
        device: where the tensors are.
        layout: what travels.
        send: starts push/pull of one chunk: (rows of the chunk in pinned memory, its number) -> handle.
        name: for messages.
        result: what wait() gives.
        patience: seconds in which at least one chunk of the lane must get through; BPS_TIMEOUT.
        progress: chunks that have got through the lane, this operation's and those before it.
    """

    taken = False  # unlike the core's, it can be waited for again

    def __init__(
        self,
        device: Device,
        layout: Layout,
        send: Callable[[torch.Tensor, int], Handle],
        name: str,
        result: torch.Tensor,
        patience: float,
        progress: Callable[[], int],
    ) -> None:
        self.device = device
        self.layout = layout
        self.send = send
        self.ready = device.record(device.current())
        self.copied: Any = None  # event: all of it is on the device again
        self._name = name
        self._result = result
        self._patience = patience + _GRACE
        self._progress = progress
        self._changed = threading.Condition()
        self._over = False
        self._error: Exception | None = None
        self._fd: int | None = None

    # ---- For the caller

    def wait(self) -> torch.Tensor:
        """Blocks until the result is on its way to the device; the calling thread's stream goes on when it is there.

        Raises:
            DeadlineError, PeerLostError, ...: what became of it.
        """
        with self._changed:
            while not self._over:
                before = self._progress()
                over = self._changed.wait_for(lambda: self._over, self._patience)
                if not over and self._progress() == before:
                    raise DeadlineError(
                        f"{self._name}: no chunk of it, or of what was called before it, got through within "
                        f"{self._patience:g} s",
                        "the device has not come as far as this operation: look at what it computes before",
                    )
        if self._error is not None:
            raise self._error
        self.follow()
        return self._result

    def follow(self) -> None:
        """Makes the calling thread's stream go on after the result has arrived."""
        if self.copied is not None:
            self.device.order(self.device.current(), self.copied)

    def done(self) -> bool:
        """Whether wait() would return, or raise, at once."""
        return self._over

    def completion_fd(self) -> int:
        """Readable once wait() would not block."""
        with self._changed:
            if self._fd is None:
                self._fd = os.eventfd(int(self._over), os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            return self._fd

    def __del__(self) -> None:
        if getattr(self, "_fd", None) is not None:
            os.close(self._fd)  # type: ignore[arg-type]

    # ---- For the lane

    @property
    def failed(self) -> bool:
        """Whether the rest need not be sent."""
        return self._error is not None

    def end(self, copied: Any = None, error: Exception | None = None) -> None:
        """Nothing more will come; the first call counts."""
        with self._changed:
            if self._over:
                return
            self.copied, self._error, self._over = copied, error, True
            if self._fd is not None:
                os.eventfd_write(self._fd, 1)
            self._changed.notify_all()
