# SPDX-License-Identifier: Apache-2.0
"""Notes for BPS_TRACE what a program does while its tensors travel: forward, backward, waiting, copies."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from bps_rdma import job
from bps_rdma.errors import BpsError


class Spans:
    """The spans of one job and view; see Job.part(). Without a trace nothing is noted.

    Attributes:
        is_on: this process is traced.
        step: the number of the step, set by code that knows it; spans belong to the step in which they end.
    """

    def __init__(self) -> None:
        self._process = job.current().process
        self.is_on: bool = self._process.is_traced
        self.step = 0

    def add(self, name: str, begin_ns: int, end_ns: int | None = None) -> None:
        """Notes what the program did.

        Args:
            name: of what it did.
            begin_ns: when it began, as time.monotonic_ns() gave it.
            end_ns: when it ended; None: now.
        """
        if self.is_on:
            with contextlib.suppress(BpsError):  # the job has just ended
                self._process.trace_span(name, self.step, begin_ns, end_ns or time.monotonic_ns())

    @contextlib.contextmanager
    def around(self, name: str) -> Iterator[None]:
        """Notes the time that the body takes."""
        if not self.is_on:
            yield
            return
        begin = time.monotonic_ns()
        try:
            yield
        finally:
            self.add(name, begin)


def spans() -> Spans:
    """The spans of the job that this process is in."""
    return job.current().part(Spans)
