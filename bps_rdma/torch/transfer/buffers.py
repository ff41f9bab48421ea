# SPDX-License-Identifier: Apache-2.0
"""Pinned memory of a copy pipeline: a fixed number of shared buffers, and one buffer of its own for an operation.

An operation that has no chunk in progress always gets a buffer: when all shared ones are taken it gets an extra one, of
its own size, which is kept and used again. So no operation waits for another one's chunks, in whatever order ranks
start them: with shared buffers alone, a rank that fills them with A while another fills them with B would wait for
each other until the deadline. Memory is bounded by the shared buffers and one chunk of each operation in progress.
"""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from bps_rdma.errors import TransportError
from bps_rdma.torch.transfer.device import Device, mapped

_SMALLEST = 4096  # bytes, a page: below, extra buffers of all sizes are alike


@dataclass(eq=False)
class Buffer:
    """Pinned memory of one chunk."""

    memory: torch.Tensor  # bytes
    shared: bool
    emptied: Any = None  # event: its last chunk has been copied to the device


class Buffers:
    """The buffers of one pipeline. Not thread-safe: the pipeline calls it under its lock.

    Args:
        device: whose copy engines use the memory.
        count: shared buffers.
        nbytes: of a shared buffer; no chunk is larger.
    """

    def __init__(self, device: Device, count: int, nbytes: int) -> None:
        self._device = device
        self._all: list[Buffer] = []
        # Used in turn: the copy up from the buffer that has been free the longest is the most likely to be over.
        self._shared = deque(self._make(nbytes, shared=True) for _ in range(count))
        self._extra: list[Buffer] = []  # free ones, the smallest first

    def take(self, nbytes: int, must: bool) -> Buffer | None:
        """A free buffer for `nbytes`.

        Args:
            nbytes: at most the size of a shared buffer.
            must: the operation has no chunk in progress, so makes an extra buffer if there is none.

        Raises:
            TransportError: memory is short, or cannot be pinned.
        """
        if self._shared:
            return self._shared.popleft()
        if not must:
            return None
        for place, buffer in enumerate(self._extra):
            if buffer.memory.nbytes >= nbytes:
                return self._extra.pop(place)
        return self._make(max(1 << (nbytes - 1).bit_length(), _SMALLEST), shared=False)

    def give_back(self, buffer: Buffer) -> None:
        """Gives a buffer back whose chunk is over."""
        (self._shared if buffer.shared else self._extra).append(buffer)
        if not buffer.shared:
            self._extra.sort(key=lambda extra: extra.memory.nbytes)

    def close(self) -> None:
        """Undoes the pinning."""
        while self._all:
            with contextlib.suppress(TransportError):  # after an error of the device all its calls fail
                self._device.unpin(self._all.pop().memory)

    def _make(self, nbytes: int, *, shared: bool) -> Buffer:
        buffer = Buffer(mapped(nbytes, torch.uint8), shared)
        self._device.pin(buffer.memory)
        self._all.append(buffer)
        return buffer
