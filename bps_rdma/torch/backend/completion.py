# SPDX-License-Identifier: Apache-2.0
"""The thread that completes futures of works. It starts when a future is first needed, and ends with the job."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import traceback
from collections import deque
from typing import Any, Protocol


class Pending(Protocol):
    """What a future waits for."""

    def next_fd(self) -> int:
        """Readable when another of its operations is over; -1 when all are."""


class Completer:
    """Completes futures once the operations they wait for are over; callbacks of futures run in its thread."""

    def __init__(self) -> None:
        self._wake, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._fresh: deque[tuple[Any, Pending]] = deque()  # any thread appends, the completer's takes
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="bps_rdma futures", daemon=True)
        self._thread.start()

    def add(self, future: Any, work: Pending) -> None:
        """Sets the future once the work is over."""
        self._fresh.append((future, work))
        self._notify()

    def close(self) -> None:
        """Ends the thread, once all works are over: every operation has a deadline."""
        self._stopping = True
        self._notify()
        if self._thread is not threading.current_thread():  # a callback may leave the job
            self._thread.join()

    def _notify(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it will be read
            os.write(self._waker, b"+")

    def _run(self) -> None:
        waiting = select.poll()
        waiting.register(self._wake, select.POLLIN)
        pending: dict[int, tuple[Any, Pending]] = {}
        while pending or self._fresh or not self._stopping:
            for fd, _ in waiting.poll():
                if fd == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake, 4096)
                    entries = [self._fresh.popleft() for _ in range(len(self._fresh))]
                else:
                    waiting.unregister(fd)
                    entries = [pending.pop(fd)]
                for future, work in entries:
                    following = work.next_fd()
                    if following == -1:
                        _complete(future)
                    else:
                        waiting.register(following, select.POLLIN)
                        pending[following] = (future, work)
        os.close(self._wake)
        os.close(self._waker)


def _complete(future: Any) -> None:
    try:
        future.set_result(None)  # runs the callbacks, here
    except Exception:
        traceback.print_exc()  # of one callback; the other futures need this thread
