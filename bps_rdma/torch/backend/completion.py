# SPDX-License-Identifier: Apache-2.0
"""The thread that completes futures of works. It starts when a future is first needed, and ends with the job."""

from __future__ import annotations

import contextlib
import os
import threading
import traceback
from collections import deque
from typing import Any, Protocol

from bps_rdma.blockers import Blocker, Blockers
from bps_rdma.torch.backend.call_order import order


class Pending(Protocol):
    """The work that a future waits for.

    Attributes:
        number: of its call, in the order of all.
    """

    number: int

    def blocker(self) -> Blocker | None:
        """One of its operations that is not over; None when all are."""


class Completer:
    """Completes futures once the operations they wait for are over; callbacks of futures run in its threads.

    One thread waits for operations at any time, and lets another one do so while it runs callbacks: they may wait for
    futures themselves, as quantising communication hooks do. There are as many threads as callbacks that wait, and one.
    """

    def __init__(self) -> None:
        self._wake, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._waiting: Blockers[tuple[Any, Pending]] = Blockers(self._wake)
        self._ready: deque[tuple[Any, Pending]] = deque()  # those that can be completed
        self._fresh: deque[tuple[Any, Pending]] = deque()  # any thread appends, the one that waits takes
        self._stopping = False
        self._turn = threading.Lock()  # for what is above
        self._counting = threading.Lock()  # for what is below
        self._threads: set[threading.Thread] = set()
        self._busy = 0  # threads that run callbacks
        self._add_thread()

    def add(self, future: Any, work: Pending) -> None:
        """Sets the future once the work is over."""
        self._fresh.append((future, work))
        self._notify()

    def close(self) -> None:
        """Ends the threads, once all works are over: every operation has a deadline."""
        self._stopping = True
        self._notify()
        while (other := self._any_other()) is not None:
            other.join()

    def _any_other(self) -> threading.Thread | None:
        """A thread that has not ended; not this one: a callback may leave the job."""
        with self._counting:  # or one that is added now may not have begun
            return next(iter(self._threads - {threading.current_thread()}), None)

    def _notify(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it will be read
            os.write(self._waker, b"+")

    def _add_thread(self) -> None:
        thread = threading.Thread(target=self._run, name="bps_rdma futures", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _run(self) -> None:
        while True:
            with self._turn:
                found = self._next()
            if found is None:
                return self._leave()
            with self._counting:
                self._busy += 1
                if self._busy == len(self._threads):
                    self._add_thread()
            future, work = found
            _complete(future, work.number)
            del found, future, work  # nobody is to keep its tensors
            with self._counting:
                self._busy -= 1

    def _leave(self) -> None:
        with self._counting:
            self._threads.remove(threading.current_thread())
            if not self._threads:
                self._waiting.close()
                os.close(self._wake)
                os.close(self._waker)

    def _next(self) -> tuple[Any, Pending] | None:
        """Waits for a future that can be completed; None: there will be no more."""
        while not self._ready:
            if self._stopping and not (self._waiting or self._fresh):
                return None
            entries = self._waiting.wait()
            self._read()
            entries += [self._fresh.popleft() for _ in range(len(self._fresh))]
            for future, work in entries:
                blocker = work.blocker()
                if blocker is None:
                    self._ready.append((future, work))
                else:
                    self._waiting.add(blocker, (future, work))
        return self._ready.popleft()

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)


def _complete(future: Any, number: int) -> None:
    try:
        with order.in_callback_of(number):
            future.set_result(None)  # runs the callbacks, here
    except Exception:
        traceback.print_exc()  # one callback has failed; the other futures need this thread
