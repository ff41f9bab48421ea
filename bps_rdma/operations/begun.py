# SPDX-License-Identifier: Apache-2.0
"""What a call has begun, to be given up where the call raises: nobody has a handle of it then.

A signal handler may raise an exception anywhere in a call, also when all has begun and the handle is on its way to the
caller. What went on then would write to memory that the caller takes for its own.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from bps_rdma import _core
from bps_rdma.errors import BpsError

P = ParamSpec("P")
R = TypeVar("R")


class _OfThread(threading.local):
    """What the outermost call of this thread that has to return a handle has begun; None: there is no such call."""

    begun: list[Any] | None = None


of_thread = _OfThread()


def whole(call: Callable[P, R]) -> Callable[P, R]:
    """Makes a call that returns a handle either return it or leave nothing that goes on."""

    @functools.wraps(call)
    def start(*args: P.args, **keywords: P.kwargs) -> R:
        if of_thread.begun is not None:  # within another such call
            return call(*args, **keywords)
        begun: list[Any] = []
        try:
            of_thread.begun = begun
            handle = call(*args, **keywords)
        except BaseException:
            of_thread.begun = None
            give_up(begun)
            raise
        of_thread.begun = None
        return handle

    return start


def start_all(
    starts: Sequence[Callable[[], Any]],
    begun: list[Any],
    has_begun: Callable[[Any], bool] = lambda _: True,
    *,
    has_to: bool = False,
) -> None:
    """Starts all of them, or none, where the call is interrupted or one of them is refused.

    Ranks match operations of one name by their order. If this rank left out some of those that others start together,
    its next call would be taken for this one, in silence. So once one has begun, the others begin as well, and what was
    raised comes afterwards. The caller then gives up all that has begun.

    Args:
        starts: each of them begins one operation, in one step, or raises an error.
        begun: gets what they begin.
        has_begun: whether one of the list has.
        has_to: other ranks begin them in any case.
    """
    before = len(begun)
    try:
        for start in starts:
            start()
    except BaseException:
        others = _Others(starts, begun, before, has_begun)
        if has_to or others.place() > 0:
            others.start()
        raise


class _Others:
    """What start_all() has still to start when it is left by an exception. Its arguments, and what had begun before."""

    def __init__(
        self, starts: Sequence[Callable[[], Any]], begun: list[Any], before: int, has_begun: Callable[[Any], bool]
    ) -> None:
        self._starts = starts
        self._begun = begun
        self._before = before
        self._has_begun = has_begun
        self._left_out: list[int] = []

    def place(self) -> int:
        """The number of the next one."""
        return sum(map(self._has_begun, self._begun[self._before :])) + len(self._left_out)

    def start(self, failed: int = -1) -> None:
        """Starts them, whatever is raised; the one at the place `failed` has raised something already."""
        try:
            while (now := self.place()) < len(self._starts):
                if now == failed:
                    self._left_out.append(now)
                    continue
                try:
                    self._starts[now]()
                except BaseException:  # each is tried twice, as a signal handler may have raised it
                    failed = now
        except BaseException:
            self.start(failed)


def give_up(begun: list[Any], together: bool = True) -> None:
    """Gives up what has begun: all of it, also where a signal handler raises something meanwhile.

    That may take a while, and who has pressed Ctrl-C once may press it again.

    Args:
        begun: handles; this empties the list.
        together: those of the core may end at the same time.
    """
    one: Any = None
    try:
        if together:
            _give_up_together(begun)
        while begun:
            one = begun[-1]
            give_up_one(one)
            begun.pop()
    except BpsError:
        if begun and begun[-1] is one:
            begun.pop()
        give_up(begun, together=False)
        raise
    except BaseException:
        give_up(begun, together=False)
        raise


_AT_ONCE = 64  # threads: a model may have thousands of parameters


def _give_up_together(begun: list[Any]) -> None:
    """Lets operations of the core end at the same time: loops look only four times a second for those given up."""
    left = deque(one for one in begun if isinstance(one, _core.Handle) and not one.done())

    def give_up_some() -> None:
        with contextlib.suppress(IndexError):
            while True:
                _core.give_up(left.popleft())

    with contextlib.suppress(RuntimeError):  # without threads they end one after the other
        for _ in range(min(len(left) - 1, _AT_ONCE)):
            threading.Thread(target=give_up_some, daemon=True).start()


def give_up_one(handle: Any) -> None:
    """Ends what any handle stands for, with an error unless it is complete. Its memory is the caller's then."""
    if isinstance(handle, _core.Handle):
        _core.give_up(handle)
    else:
        handle.give_up()
