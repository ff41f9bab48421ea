# SPDX-License-Identifier: Apache-2.0
"""Operations that no caller waits for. A process finishes them before it leaves: the other ranks need its part."""

from __future__ import annotations

import contextlib
import weakref
from typing import Protocol

from bps_rdma import _core
from bps_rdma.errors import BpsError


class Late(Protocol):
    """An object that waits for its operations later than its callers expect."""

    def synchronize(self) -> None:
        """Waits for them now."""


class Unfinished:
    """The late objects of a job that are still alive; handles that were dropped are known to the core."""

    outlives_view = True

    def __init__(self) -> None:
        self.late: weakref.WeakSet[Late] = weakref.WeakSet()
        self._is_given_up = False

    def give_up(self) -> None:
        """This process ends with an exception: finish() has no effect any more."""
        self._is_given_up = True

    def finish(self, timeout: float) -> None:
        """Waits for everything that is unfinished; for what was dropped, `timeout` seconds at most."""
        if self._is_given_up or not timeout:
            return
        for each in list(self.late):
            with contextlib.suppress(BpsError):  # a rank that was lost keeps nobody from leaving
                each.synchronize()
        _core.finish_orphans(timeout)
