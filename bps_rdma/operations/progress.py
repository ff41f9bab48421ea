# SPDX-License-Identifier: Apache-2.0
"""A thread that goes on with operations of several steps while nobody waits for them.

It starts when the first of them does. Without it a rank that waits for something else would hold up the others.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from typing import Protocol

from bps_rdma.blockers import Blocker, Blockers
from bps_rdma.kept_errors import keeping


class Ongoing(Protocol):
    """What has further steps: a handle, or a part of one that nobody waits for."""

    def done(self) -> bool:
        """Makes the steps that can be made by now, and returns whether none is left."""

    def blocker(self) -> Blocker:
        """What has to end before done() can change. It must be kept as long as its descriptor is used."""


class Progress:
    """The operations of a job that have further steps; a part of the job."""

    def __init__(self) -> None:
        self._fresh: deque[Ongoing] = deque()  # any thread appends, the thread takes
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="bps_rdma steps", daemon=True)
        self._thread.start()

    def add(self, ongoing: Ongoing) -> None:
        """Goes on with it whenever it can, until no step is left."""
        self._fresh.append(ongoing)
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Ends the thread. The operations are over, or those who wait for them go on by themselves."""
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        if self._thread is not threading.current_thread():
            self._thread.join()
            os.close(self._wake)

    def _run(self) -> None:
        keeping.for_this_thread()
        waiting: Blockers[Ongoing] = Blockers(self._wake)
        while not self._stopping:
            ready = waiting.wait()
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            ready += [self._fresh.popleft() for _ in range(len(self._fresh))]
            for ongoing in ready:
                if not ongoing.done():
                    waiting.add(ongoing.blocker(), ongoing)
        waiting.close()
