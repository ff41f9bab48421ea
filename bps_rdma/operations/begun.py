# SPDX-License-Identifier: Apache-2.0
"""What a call has begun, to be given up where the call raises: nobody has a handle of it then.

A signal handler may raise an exception anywhere in a call, also when all has begun and the handle is on its way to the
caller. What went on then would write to memory that the caller takes for its own.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from bps_rdma import _core

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


def give_up(begun: list[Any]) -> None:
    """Gives up what has begun: all of it, also where a signal handler raises something meanwhile.

    That may take a while, and who has pressed Ctrl-C once may press it again.
    """
    try:
        _give_up_together(begun)
        while begun:
            give_up_one(begun[-1])
            begun.pop()
    except Exception:
        begun.pop()
        give_up(begun)
        raise
    except BaseException:
        give_up(begun)
        raise


def _give_up_together(begun: list[Any]) -> None:
    """Lets operations of the core end at the same time: loops look only four times a second for those given up."""
    left = [one for one in begun if isinstance(one, _core.Handle) and not one.done()]
    with contextlib.suppress(RuntimeError):  # without threads they end one after the other
        for handle in left[1:]:
            threading.Thread(target=_core.give_up, args=(handle,), daemon=True).start()


def give_up_one(handle: Any) -> None:
    """Ends what any handle stands for, with an error unless it is complete. Its memory is the caller's then."""
    if isinstance(handle, _core.Handle):
        _core.give_up(handle)
    else:
        handle.give_up()
