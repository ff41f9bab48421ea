# SPDX-License-Identifier: Apache-2.0
"""Handles of operations of several steps. The thread that waits for one, or looks at it, makes the next step."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from bps_rdma.handle import PythonHandle
from bps_rdma.job import raised
from bps_rdma.kept_errors import keeping

new_lock: Callable[[], Any] = type(threading.RLock())  # which is not a function of Python, as RLock is


class StepwiseHandle(PythonHandle[Any]):
    """Such an operation in progress.

    Args:
        result: what wait() returns.
    """

    def __init__(self, result: Any = None) -> None:
        self._result = result
        self._error: BaseException | None = None
        self._over = False
        self._turn = new_lock()  # several threads may wait

    @abstractmethod
    def _advance(self, *, waits: bool) -> bool:
        """Makes the steps that can be made by now, or all of them, and returns whether that was the last. In turn."""

    def wait(self) -> Any:
        """Blocks until the operation is over, and returns its array. Raises what became of it."""
        with self._turn:
            if not self._over:
                with keeping:
                    self._advance(waits=True)
        if self._error is not None:
            raise raised(self._error)
        return self._result

    def done(self) -> bool:
        """Returns whether wait() would return or raise at once."""
        return self._over or self._in_turn(self._advance, waits=False)

    def _in_turn(self, step: Callable[..., bool], *, waits: bool) -> bool:
        if not self._turn.acquire(blocking=waits):
            return False  # another thread is at it
        try:
            with keeping:
                return self._over or step(waits=waits)
        finally:
            self._turn.release()
