# SPDX-License-Identifier: Apache-2.0
"""Operations that no caller waits for. A process finishes them before it leaves: the other ranks need its part."""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from typing import Protocol

from bps_rdma import _core
from bps_rdma.errors import BpsError


class Late(Protocol):
    """It has updates to make for which it has not waited yet."""

    def synchronize(self) -> None:
        """Waits, and makes them."""


class Unfinished:
    """The late objects of a job that are still alive; the core knows the handles that were dropped."""

    outlives_view = True

    def __init__(self) -> None:
        self._late: weakref.WeakKeyDictionary[Late, int] = weakref.WeakKeyDictionary()  # and the thread that uses each
        self._lock = threading.Lock()
        self._is_given_up = False

    def add(self, late: Late) -> None:
        """This one has updates to make, in this thread."""
        with self._lock:
            self._late[late] = threading.get_ident()

    def give_up(self) -> None:
        """This process ends with an exception: nothing is finished any more."""
        self._is_given_up = True

    def finish_late(self) -> None:
        """Makes updates, unless an exception is the cause of leaving; not those of other threads that still run."""
        if self._is_given_up or _leaves_by_exception():
            return
        others = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
        with self._lock:
            found = [late for late, user in self._late.items() if user not in others]
        for each in found:
            try:
                each.synchronize()
            except BpsError as error:  # keeps nobody from leaving
                warnings.warn(f"the last updates were not made: {error}", RuntimeWarning, stacklevel=2)

    def finish_dropped(self, timeout: float) -> None:
        """Waits for what was dropped, `timeout` seconds at most, unless an exception is the cause of leaving."""
        waits = threading.current_thread() is threading.main_thread()  # another one may free this one by leaving
        if waits and _knows_dropped and not self._is_given_up and not _leaves_by_exception():
            _core.finish_orphans(timeout)


def _leaves_by_exception() -> bool:
    return sys.exc_info()[0] not in (None, SystemExit)


_knows_dropped = True


def disown_dropped() -> None:
    """This process was forked from a member of a job: what it would wait for are operations of that one as well."""
    global _knows_dropped
    _knows_dropped = False
