# SPDX-License-Identifier: Apache-2.0
"""Interrupts calls at chosen points, of those at which Python lets signal handlers run in bps_rdma."""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
import types
from collections.abc import Callable
from typing import Any

_HANDLERS_RUN_AFTER = ("CALL", "JUMP_BACKWARD", "RESUME")  # opcodes of CPython 3.11; those of others are like them


@functools.cache
def _caught_by(code: types.CodeType, offset: int) -> int | None:
    """Where Python goes on when the instruction at this offset raises something; None: nowhere in this function."""
    entries: list[Any] = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]
    return next((entry.target for entry in entries if entry.start <= offset < entry.end), None)


class _Interrupt:
    """Raises KeyboardInterrupt in the calling thread at one of the points where signal handlers run in bps_rdma.

    Args:
        point: its number, from 0 on.
    """

    def __init__(self, point: int) -> None:
        self.came = False
        self._left = point
        self._before: dict[types.FrameType, int] = {}  # the offset of what each has executed last

    def __enter__(self) -> _Interrupt:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        self._before.clear()

    def _trace(self, frame: types.FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if "bps_rdma" not in frame.f_globals.get("__name__", "") or frame.f_code.co_name == "__del__":
            return None  # what is raised in a __del__() is ignored
        frame.f_trace_opcodes = True
        if event == "exception":
            self._before.pop(frame, None)  # Python looks for signals after a call that returns, and not if it raises
        elif event == "opcode":
            before, self._before[frame] = self._before.get(frame), frame.f_lasti
            if before is not None and self._is_point(frame.f_code, before, frame.f_lasti):
                self._left -= 1
                if self._left < 0:
                    self.came = True
                    raise KeyboardInterrupt
        return self._trace

    @staticmethod
    def _is_point(code: types.CodeType, before: int, now: int) -> bool:
        # What a handler raises after a call comes from that call. What is raised here comes from the next instruction:
        # `with lock: return f()` would not give the lock back.
        is_one = dis.opname[code.co_code[before]].startswith(_HANDLERS_RUN_AFTER)
        return is_one and _caught_by(code, before) == _caught_by(code, now)


def interrupted(point: int, call: Callable[[], Any]) -> bool:
    """Whether the call has that many points, and so was interrupted."""
    interrupt = _Interrupt(point)
    with contextlib.suppress(KeyboardInterrupt), interrupt:
        call()
    return interrupt.came
