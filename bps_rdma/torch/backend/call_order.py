# SPDX-License-Identifier: Apache-2.0
"""The order in which this process calls collectives: ranks must share it, and callbacks run beside the script.

A callback of a future runs when its work is over, and when that is differs between ranks. A collective that it calls
may come before one of the script on one rank, and after it on another. If both have tensors of one size, each rank
would get the other's sum. So it is refused where anything was called since the collective whose future it follows.
"""

import contextlib
import threading
from collections.abc import Iterator

from bps_rdma.errors import InvalidArgumentError


class CallOrder:
    """Counts the calls of all groups."""

    def __init__(self) -> None:
        self._counting = threading.Lock()
        self._calls = 0
        self._of_thread = _OfThread()

    @property
    def number(self) -> int:
        """That of the last call of this thread."""
        return self._of_thread.number

    @property
    def is_in_callback(self) -> bool:
        """Whether this thread runs a callback of a future, instead of the script."""
        return self._of_thread.after is not None

    def begin(self) -> None:
        """A collective is about to start.

        Raises:
            InvalidArgumentError: a callback calls it, and others were called since that callback's collective.
        """
        own = self._of_thread
        with self._counting:
            self._calls += 1
            own.number = self._calls
        if own.after is not None:
            if own.number != own.after + 1:
                raise _beside_others()
            own.after = own.number

    def check(self) -> None:
        """It has started. Raises InvalidArgumentError if a callback called it, and another one was called meanwhile."""
        if self._of_thread.after is not None and self._calls != self._of_thread.number:
            raise _beside_others()

    @contextlib.contextmanager
    def in_callback_of(self, number: int) -> Iterator[None]:
        """Runs callbacks of the future of this call."""
        self._of_thread.after = number
        try:
            yield
        finally:
            self._of_thread.after = None


class _OfThread(threading.local):
    number = 0
    after: int | None = None  # in a callback: the last call that the ranks have in the same order


def _beside_others() -> InvalidArgumentError:
    return InvalidArgumentError(
        "a callback of a future calls a collective beside others, which ranks may call in other orders",
        "wait() for the future in the communication hook before it returns it, as around torch's PowerSGD and "
        "quantization hooks where there are several buckets",
    )


order = CallOrder()
