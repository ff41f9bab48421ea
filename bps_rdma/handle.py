"""Handles: operations in progress."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from typing import Any

from bps_rdma.errors import DeadlineError, UnknownHandleError

# Arrays must outlive the operations on them, also when the caller forgets the handle. Newest last.
_in_flight: deque[Handle] = deque()
_GRACE_S = 10.0


class Handle:
    """One asynchronous operation. Take its result with `synchronize(handle)`, `handle.wait()` or `await handle`.

    A handle gives its result once; the array belongs to the operation until then.
    """

    __slots__ = ("__weakref__", "_keep", "_operation", "_result", "_taken")

    def __init__(self, operation: Any, result: Any, keep: object) -> None:
        self._operation = operation
        self._result = result
        self._keep: object = keep
        self._taken = False
        _in_flight.append(self)
        _release_finished()

    def done(self) -> bool:
        """Whether wait() would return (or raise) at once."""
        return bool(self._operation.done())

    def wait(self) -> Any:
        """Blocks until the operation is over, without holding the GIL, and returns its array.

        Raises:
            UnknownHandleError: the result has been taken before.
            PeerLostError, DeadlineError, MismatchError, ...: what became of the operation.
        """
        if self._taken:
            raise UnknownHandleError("the result of this handle has been taken before", "wait for a handle once")
        # The core ends every operation at its deadline; the grace is for the answer to "who is missing".
        if not self._operation.wait(self._operation.timeout_s + _GRACE_S):
            raise DeadlineError(f"{self._operation!r} is stuck", "report this as a bug")
        return self._take()

    def _take(self) -> Any:
        self._taken = True
        result, self._result = self._result, None
        if self._operation.finished():
            self._keep = None
        self._operation.rethrow()
        return result

    def __await__(self) -> Generator[Any, None, Any]:
        if not self._operation.done():
            import asyncio  # whoever awaits has it; for the others it would be most of this package's import

            loop = asyncio.get_running_loop()
            woken = loop.create_future()
            fd = self._operation.completion_fd()

            def wake() -> None:
                if not woken.done():
                    woken.set_result(None)

            loop.add_reader(fd, wake)
            try:
                yield from woken.__await__()
            finally:
                loop.remove_reader(fd)
        return self.wait()

    def __repr__(self) -> str:
        state = "taken" if self._taken else "done" if self.done() else "pending"
        return f"<Handle {self._operation!r} {state}>"


def _release_finished() -> None:
    # Take first, look then: what another thread does in between must not make us release its array.
    while True:
        try:
            oldest = _in_flight.popleft()
        except IndexError:
            return
        if not oldest._operation.finished():
            _in_flight.appendleft(oldest)
            return
        oldest._keep = None


def abandon_all() -> None:
    """The job is over: nothing can be written into the arrays any more."""
    _in_flight.clear()
