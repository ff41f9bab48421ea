"""The way of a group's chunks: down to pinned memory, over the wire, up again; a thread for each direction."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import torch

from bps_rdma import Handle
from bps_rdma.errors import TransportError
from bps_rdma.torch.staging.device import Device
from bps_rdma.torch.staging.operation import StagedOperation
from bps_rdma.torch.units import shared_tensor

_AHEAD = 2  # copies down that are under way while an earlier one is sent
_SMALLEST_ROW = 1 << 16  # bytes; below, starting a copy costs more than the copy


@dataclass(eq=False)
class Slot:
    """Pinned memory of one chunk."""

    memory: torch.Tensor  # bytes
    emptied: Any = None  # event: its last chunk has been copied up


@dataclass
class Chunk:
    """One chunk on its way."""

    operation: StagedOperation
    number: int
    columns: tuple[int, int]
    slot: Slot
    last: bool
    filled: Any = field(default=None)  # event: it has been copied down
    handle: Handle | None = None

    def row(self, number: int) -> torch.Tensor:
        """A row of the chunk, in pinned memory."""
        width = self.columns[1] - self.columns[0]
        return self.rows()[number * width : (number + 1) * width]

    def rows(self) -> torch.Tensor:
        """All rows of the chunk."""
        layout = self.operation.layout
        count = layout.rows * (self.columns[1] - self.columns[0])
        return self.slot.memory[: count * layout.dtype.itemsize].view(layout.dtype)


class Lane:
    """Slots, two streams and two threads.

    Args:
        device: where tensors are.
        ranks: of the group; chunks have a row for each of them.
        chunk_bytes: largest chunk of an all_reduce; the others' are larger in large groups.
        slots: chunks on their way at a time.
    """

    def __init__(self, device: Device, ranks: int, chunk_bytes: int, slots: int) -> None:
        self._device = device
        self.through = 0  # chunks that have come back
        self._chunk_bytes = chunk_bytes
        self._slot_bytes = max(chunk_bytes, ranks * _SMALLEST_ROW)
        self._down, self._up = device.stream(), device.stream()
        self._waiting: SimpleQueue[StagedOperation | None] = SimpleQueue()
        self._sent: SimpleQueue[Chunk | None] = SimpleQueue()
        self._free: SimpleQueue[Slot] = SimpleQueue()
        self._filled: deque[Chunk] = deque()  # copied down, or nearly, and not sent yet
        self._slots = [Slot(shared_tensor(self._slot_bytes, torch.uint8)) for _ in range(slots)]
        for slot in self._slots:
            device.pin(slot.memory)
            self._free.put(slot)
        self._threads = [
            threading.Thread(target=work, name=f"bps_rdma {name}", daemon=True)
            for name, work in (("down", self._send_all), ("up", self._receive_all))
        ]
        for thread in self._threads:
            thread.start()

    def start(self, operation: StagedOperation) -> None:
        """Puts an operation behind those that have been started before. Does not wait for anything."""
        for _, tensor in operation.layout.sources:
            self._device.keep(tensor, self._down)
        for _, tensor in operation.layout.targets:
            self._device.keep(tensor, self._up)
        self._waiting.put(operation)

    def stop(self, seconds: float) -> None:
        """Ends the threads once all is over, which is at once when the job has ended; waits for that long at most."""
        self._waiting.put(None)
        for thread in self._threads:
            thread.join(seconds)
        if not any(thread.is_alive() for thread in self._threads):
            for slot in self._slots:
                with contextlib.suppress(TransportError):  # after an error of the device all its calls fail
                    self._device.unpin(slot.memory)

    # ---- Down

    def _send_all(self) -> None:
        self._device.use()
        while (operation := self._waiting.get()) is not None:
            try:
                self._send(operation)
            except Exception as error:  # of the device
                operation.end(error=error)
                self._push_filled()
            del operation
        self._sent.put(None)

    def _send(self, operation: StagedOperation) -> None:
        self._device.order(self._down, operation.ready)
        layout = operation.layout
        pieces = list(layout.cut(self._chunk_bytes if layout.rows == 1 else self._slot_bytes))
        if not pieces:
            operation.end()
        for number, columns in enumerate(pieces):
            if operation.failed:
                break
            chunk = Chunk(operation, number, columns, self._free_slot(), last=number == len(pieces) - 1)
            try:
                self._fill(chunk)
            except Exception:
                self._free.put(chunk.slot)
                raise
            self._filled.append(chunk)
            if len(self._filled) >= _AHEAD:
                self._push(self._filled.popleft())
        self._push_filled()

    def _free_slot(self) -> Slot:
        try:
            return self._free.get_nowait()
        except Empty:
            self._push_filled()  # other ranks may wait for these
            return self._free.get()  # comes back when a chunk does, or its deadline has come

    def _fill(self, chunk: Chunk) -> None:
        if chunk.slot.emptied is not None:
            self._device.order(self._down, chunk.slot.emptied)
        begin, end = chunk.columns
        for row, tensor in chunk.operation.layout.sources:
            self._device.copy(chunk.row(row), tensor[begin:end], self._down)
        chunk.filled = self._device.record(self._down)

    def _push_filled(self) -> None:
        while self._filled:
            self._push(self._filled.popleft())

    def _push(self, chunk: Chunk) -> None:
        operation = chunk.operation
        try:
            self._device.wait(chunk.filled)
            if not operation.failed:
                chunk.handle = operation.send(chunk.rows(), chunk.number)
        except Exception as error:
            operation.end(error=error)
        if chunk.handle is None:
            self._free.put(chunk.slot)
        else:
            self._sent.put(chunk)

    # ---- Up

    def _receive_all(self) -> None:
        self._device.use()
        while (chunk := self._sent.get()) is not None:
            try:
                self._receive(chunk)
            except Exception as error:
                chunk.operation.end(error=error)
            self._free.put(chunk.slot)
            del chunk

    def _receive(self, chunk: Chunk) -> None:
        assert chunk.handle is not None
        chunk.handle.wait()
        begin, end = chunk.columns
        for row, tensor in chunk.operation.layout.targets:
            self._device.copy(tensor[begin:end], chunk.row(row), self._up)
        chunk.slot.emptied = self._device.record(self._up)
        self.through += 1
        if chunk.last:
            chunk.operation.end(copied=chunk.slot.emptied)
