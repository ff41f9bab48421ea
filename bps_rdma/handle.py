# SPDX-License-Identifier: Apache-2.0
"""Handles of operations in progress: waiting for them, and awaiting them, for which alone asyncio is imported."""

from __future__ import annotations

import os
import types
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from functools import partial
from itertools import starmap
from typing import Any, Generic, TypeVar

from bps_rdma import _core
from bps_rdma._core import Handle, PreparedOperation
from bps_rdma.blockers import Blocker
from bps_rdma.errors import BpsError, UnknownHandleError
from bps_rdma.kept_errors import keeping, runs_handlers
from bps_rdma.presence import raised

T = TypeVar("T")  # what wait() returns

__all__ = ["Handle", "PreparedOperation", "PythonHandle", "awaiting"]


class PythonHandle(ABC, Generic[T]):
    """A handle of an operation that consists of several of the core's; it is used like the core's own Handle."""

    taken = False  # unlike that one, it can be waited for again

    @abstractmethod
    def wait(self) -> T:
        """Blocks until the operation is over, and returns its array."""

    @abstractmethod
    def done(self) -> bool:
        """Returns whether wait() would return or raise at once."""

    @abstractmethod
    def blocker(self) -> Blocker:
        """What has to end before done() can change. It must be kept as long as its descriptor is used."""

    def completion_fd(self) -> int:
        """A file descriptor that becomes readable once done() may have changed."""
        return self.blocker().completion_fd()

    def __await__(self) -> Generator[Any, None, T]:
        """Waits in the running event loop."""
        return awaiting(self)


def awaiting(handle: Handle[T] | PreparedOperation[T] | PythonHandle[T]) -> Generator[Any, None, T]:
    """Implements `await handle`: waits in the running event loop, then takes the result."""
    while not handle.done():  # one that consists of several has several blockers, one after the other
        yield from _readable(blocker_of(handle))
    return handle.wait()


def blocker_of(handle: Handle[Any] | PreparedOperation[Any] | PythonHandle[Any]) -> Blocker:
    """What has to end before done() of any handle can change."""
    return handle.blocker() if isinstance(handle, PythonHandle) else handle


def _readable(blocker: Blocker) -> Generator[Any, None, None]:
    """Waits in the running event loop until the blocker's descriptor is readable."""
    import asyncio  # a caller that awaits has it; for all others it would be most of this package's import time

    loop = asyncio.get_running_loop()
    own = os.dup(
        blocker.completion_fd()
    )  # the loop keeps one reader per descriptor, and another task may await the same handle
    woken = loop.create_future()

    def wake() -> None:
        if not woken.done():
            woken.set_result(None)

    try:
        loop.add_reader(own, wake)
        yield from woken.__await__()
    finally:
        loop.remove_reader(own)
        os.close(own)


_core.register_awaiting(awaiting)
for _kind in (Handle, PreparedOperation):  # to be written as Handle[numpy.ndarray]; the core's classes know no types
    setattr(_kind, "__class_getitem__", classmethod(types.GenericAlias))  # noqa: B010  # unknown to type checkers


AnyHandle = Handle[T] | PreparedOperation[T] | PythonHandle[T]


def poll(pending: AnyHandle[Any]) -> bool:
    """Returns whether the operation is over, with a result or with an error. It does not block.

    Raises:
        UnknownHandleError: not a handle, or its result has been taken.
    """
    return _checked(pending).done()


def synchronize(pending: AnyHandle[T]) -> T:
    """Waits for the operation and returns its array.

    Raises:
        UnknownHandleError: not a handle, or its result has been taken.
        PeerLostError, DeadlineError, MismatchError, ...: what became of the operation.
    """
    return _wait_of(pending)()


def wait(pending: Iterable[AnyHandle[T]]) -> list[T]:
    """Waits for several operations and returns their arrays, in order. Raises the first error after all are over.

    Ctrl-C may come when some are over. They are then given once more to this function, or to synchronize().
    """
    if not isinstance(pending, Iterable):
        raise UnknownHandleError(f"{pending!r} is not a list of handles", "pass a list, or one handle to synchronize()")
    handles: list[AnyHandle[T]] = []
    outcomes: list[Any] = []  # arrays and errors
    failed: BpsError | None = None
    try:
        with keeping:  # of further errors the caller learns nothing
            for one in pending:
                handles.append(one)
                try:
                    outcomes.extend(starmap(_wait_of(one), ((),)))  # one step, in which no signal handler runs
                except BpsError as error:
                    outcomes.append(error)
        failed = next((each for each in outcomes if isinstance(each, BpsError)), None)
        if failed is not None:
            raise raised(failed)
        return outcomes
    except BaseException as error:
        for one, outcome in zip(handles, outcomes, strict=False) if error is not failed else ():
            if isinstance(one, _GIVE_ONCE):
                # Frames in a traceback would keep the handle.
                _outcomes[one] = outcome.with_traceback(None) if isinstance(outcome, BpsError) else outcome
        raise


_GIVE_ONCE = (Handle, PreparedOperation)
# What the last wait() gave to nobody, because it was interrupted.
_outcomes: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _wait_of(pending: AnyHandle[T]) -> Callable[[], T]:
    """What waits for the operation, once."""
    _checked(pending)
    return partial(_give, _outcomes.pop(pending)) if pending.taken else pending.wait


def _give(outcome: Any) -> Any:
    if isinstance(outcome, BpsError):
        raise raised(outcome)
    return outcome


def wait_each(waits: Iterable[Callable[[], T]], most: type[Exception] = Exception) -> list[T]:
    """Calls each of them and returns what they returned. Raises the first error after all are over.

    Args:
        waits: they wait.
        most: an error of this class comes before all others.
    """
    results: list[T] = []
    error: Exception | None = None
    with keeping:  # of further errors the caller learns nothing
        for wait_one in waits:
            try:
                results.append(wait_one())
            except Exception as caught:
                if not isinstance(caught, BpsError) and runs_handlers():
                    raise
                if error is None or (isinstance(caught, most) and not isinstance(error, most)):
                    error = caught
    if error is not None:
        try:
            raise raised(error)
        finally:
            del error  # its traceback keeps this frame, and what the script had in those that called it
    return results


def _checked(pending: AnyHandle[T]) -> AnyHandle[T]:
    if not isinstance(pending, (Handle, PreparedOperation, PythonHandle)):
        raise UnknownHandleError(f"{pending!r} is not a handle", "pass what push_pull_async() returned")
    if pending.taken and pending not in _outcomes:
        raise UnknownHandleError("the result of this handle has been taken before", "wait for a handle once")
    return pending
