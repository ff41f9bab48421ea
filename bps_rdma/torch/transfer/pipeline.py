# SPDX-License-Identifier: Apache-2.0
"""The copy pipeline of one device and group: down to pinned memory, through the core, and up again, chunk by chunk.

One thread copies chunks down and sends them, another one waits for them in the order in which they complete and copies
them up. Operations are served in the order of their calls, with one exception: one that cannot have another buffer is
overtaken by those that can, if the device has reached them. With memory of its own for a chunk (buffers.py) each then
progresses by itself, so ranks may start operations in different orders.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from bps_rdma import Handle
from bps_rdma.kept_errors import keeping
from bps_rdma.spans import Spans
from bps_rdma.torch.transfer.buffers import Buffer, Buffers
from bps_rdma.torch.transfer.device import Device
from bps_rdma.torch.transfer.operation import StagedOperation

_AHEAD = 2  # copies down that are in progress while an earlier chunk is sent
_SMALLEST_ROW = 1 << 16  # bytes; below, starting a copy costs more than the copy
_LOOK = 1e-3  # seconds between looks at whether the device has reached an operation that could overtake another one


class Cursor:
    """The progress of an operation through the pipeline."""

    def __init__(self, operation: StagedOperation, pieces: list[tuple[int, int]]) -> None:
        self.operation = operation
        self.pieces = pieces  # columns of each chunk
        self.next = 0  # the first chunk without a buffer
        self.buffers = 0  # that it holds
        self.completed = 0  # chunks that have been copied up, or are about to be
        self.reached = False  # the device has computed what is to be sent

    @property
    def complete(self) -> bool:
        """True if all chunks have had a buffer, or need none."""
        return self.operation.failed or self.next == len(self.pieces)


@dataclass(eq=False)
class Chunk:
    """One chunk in progress."""

    cursor: Cursor
    number: int
    columns: tuple[int, int]
    buffer: Buffer
    filled: Any = field(default=None)  # event: it has been copied down
    began: int = 0  # the copy, time.monotonic_ns()
    handle: Handle[Any] | None = None

    def row(self, number: int) -> torch.Tensor:
        """A row of the chunk, in pinned memory."""
        width = self.columns[1] - self.columns[0]
        return self.rows()[number * width : (number + 1) * width]

    def rows(self) -> torch.Tensor:
        """All rows of the chunk."""
        layout = self.cursor.operation.layout
        return self.buffer.memory[: layout.nbytes(self.columns)].view(layout.dtype)


class CopyPipeline:
    """Buffers, two streams and two threads.

    Args:
        device: where the tensors are.
        ranks: of the group; chunks of some operations have a row for each of them.
        chunk_bytes: largest chunk with one row; others are larger in large groups.
        buffers: shared buffers.
        spans: where copies are noted; the thread that copies up then waits for the end of each.
    """

    def __init__(self, device: Device, ranks: int, chunk_bytes: int, buffers: int, spans: Spans | None = None) -> None:
        self._device = device
        self._spans = spans if spans is not None and spans.is_on else None
        self.completed = 0  # chunks
        self._chunk_bytes = chunk_bytes
        self._largest = max(chunk_bytes, ranks * _SMALLEST_ROW)
        self._down, self._up = device.stream(), device.stream()
        self._changed = threading.Condition()  # guards the next three
        self._waiting: list[Cursor] = []  # with chunks that have no buffer yet, in the order of the calls
        self._buffers = Buffers(device, buffers, self._largest)
        self._sent: deque[Chunk] = deque()
        self._stopping = False
        self._all_sent = False  # the thread that copies down has ended
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # the thread that copies up has something new
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name=f"bps_rdma {name}", daemon=True)
            for name, work in (("down", self._send_all), ("up", self._receive_all))
        ]
        self._running = len(self._threads)
        for thread in self._threads:
            thread.start()

    def start(self, operation: StagedOperation) -> None:
        """Puts an operation behind those that have been started before. Does not block."""
        layout = operation.layout
        pieces = list(layout.cut(self._chunk_bytes if layout.rows == 1 else self._largest))
        if not pieces:
            operation.end()
            return
        for _, tensor in layout.sources:
            self._device.keep(tensor, self._down)
        for _, tensor in layout.targets:
            self._device.keep(tensor, self._up)
        with self._changed:
            self._waiting.append(Cursor(operation, pieces))
            self._changed.notify_all()

    def stop(self, seconds: float) -> None:
        """Ends the threads after the last operation, which is at once when the job has ended.

        Args:
            seconds: a thread that takes longer, because the device does, is left alone.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if threading.current_thread() in self._threads:
            return  # it has found the end of the job, and ends by itself
        for thread in self._threads:
            thread.join(seconds)

    def _run(self, work: Callable[[], None]) -> None:
        keeping.for_this_thread()
        self._device.use()
        work()
        with self._changed:
            self._running -= 1
            if self._running > 0:
                return
        self._buffers.close()
        os.close(self._wake)

    # ---- Down

    def _send_all(self) -> None:
        filled: deque[Chunk] = deque()  # copied down, or nearly, and not sent yet
        while True:
            with self._changed:
                chunk = self._next_chunk()
                if chunk is None and not filled:
                    if self._stopping and not self._waiting:
                        break
                    unreached = any(not cursor.reached for cursor in self._waiting[1:])
                    self._changed.wait(_LOOK if unreached else None)
                    continue
            if chunk is not None and self._fill(chunk):
                filled.append(chunk)
            if filled and (chunk is None or len(filled) >= _AHEAD):  # without a buffer: other ranks may wait for these
                self._send(filled.popleft())
            del chunk
        self._all_sent = True
        self._awake()

    def _next_chunk(self) -> Chunk | None:
        """The next chunk that can have a buffer, with it."""
        self._waiting = [cursor for cursor in self._waiting if not cursor.complete]
        names = set()
        for place, cursor in enumerate(self._waiting):
            operation = cursor.operation
            if operation.name in names:
                continue  # ranks match operations of one name by their order
            names.add(operation.name)
            # Nothing in the stream may stand behind a copy that the device has not reached: only the first may wait.
            if place > 0 and not cursor.reached:
                cursor.reached = self._device.happened(operation.ready)
                if not cursor.reached:
                    continue
            columns = cursor.pieces[cursor.next]
            try:
                buffer = self._buffers.take(operation.layout.nbytes(columns), must=cursor.buffers == 0)
            except Exception as error:
                operation.end(error)
                continue
            if buffer is not None:
                cursor.next += 1
                cursor.buffers += 1
                return Chunk(cursor, cursor.next - 1, columns, buffer)
        return None

    def _fill(self, chunk: Chunk) -> bool:
        """Starts the copies of a chunk to its buffer."""
        operation = chunk.cursor.operation
        try:
            if chunk.number == 0:
                self._device.order(self._down, operation.ready)
            if chunk.buffer.emptied is not None:
                self._device.order(self._down, chunk.buffer.emptied)
            begin, end = chunk.columns
            chunk.began = time.monotonic_ns()
            for row, tensor in operation.layout.sources:
                self._device.copy(chunk.row(row), tensor[begin:end], self._down)
            chunk.filled = self._device.record(self._down)
        except Exception as error:  # the device has failed
            operation.end(error)
            self._free(chunk)
            return False
        return True

    def _send(self, chunk: Chunk) -> None:
        """Starts the operation of a chunk once it has been copied down."""
        operation = chunk.cursor.operation
        try:
            self._device.wait(chunk.filled)
            if self._spans is not None:
                self._spans.add(f"copy to host: {operation.name} [{chunk.number}]", chunk.began)
            if not operation.failed:
                operation.check_view()
                chunk.handle = operation.send(chunk.rows(), chunk.number)
        except Exception as error:
            operation.end(error)
        if chunk.handle is None:
            self._free(chunk)
        else:
            with self._changed:
                self._sent.append(chunk)
            self._awake()

    def _free(self, chunk: Chunk) -> None:
        with self._changed:
            self._buffers.give_back(chunk.buffer)
            chunk.cursor.buffers -= 1
            self._changed.notify_all()

    # ---- Up

    def _awake(self) -> None:
        os.eventfd_write(self._wake, 1)

    def _receive_all(self) -> None:
        waiting = select.poll()
        waiting.register(self._wake, select.POLLIN)
        pending: dict[int, Chunk] = {}
        while pending or self._sent or not self._all_sent:
            for fd, _ in waiting.poll():
                if fd == self._wake:
                    os.eventfd_read(self._wake)
                else:
                    waiting.unregister(fd)
                    self._receive(pending.pop(fd))
            while self._sent:
                with self._changed:
                    chunk = self._sent.popleft()
                assert chunk.handle is not None
                if chunk.handle.done():
                    self._receive(chunk)
                else:
                    fd = chunk.handle.completion_fd()
                    pending[fd] = chunk
                    waiting.register(fd, select.POLLIN)
                del chunk

    def _receive(self, chunk: Chunk) -> None:
        """Takes the result of a chunk and starts its copies to the device."""
        cursor, operation = chunk.cursor, chunk.cursor.operation
        assert chunk.handle is not None
        try:
            chunk.handle.wait()
            began = time.monotonic_ns()
            if operation.receive(lambda: self._copy_up(chunk), lambda: self._note_emptied(chunk.buffer)):
                if self._spans is not None:
                    self._device.wait(chunk.buffer.emptied)
                    self._spans.add(f"copy to device: {operation.name} [{chunk.number}]", began)
                self.completed += 1
                cursor.completed += 1
                if cursor.completed == len(cursor.pieces):
                    operation.end()
        except Exception as error:
            operation.end(error)
        self._free(chunk)

    def _copy_up(self, chunk: Chunk) -> None:
        begin, end = chunk.columns
        for row, tensor in chunk.cursor.operation.layout.targets:
            self._device.copy(tensor[begin:end], chunk.row(row), self._up)

    def _note_emptied(self, buffer: Buffer) -> Any:
        buffer.emptied = self._device.record(self._up)
        return buffer.emptied
