# SPDX-License-Identifier: Apache-2.0
"""Interrupts calls at chosen points, of those at which Python lets signal handlers run in bps_rdma."""

from __future__ import annotations

import contextlib
import dis
import sys
import types
from collections.abc import Callable
from typing import Any

_HANDLERS_RUN_AFTER = ("CALL", "JUMP_BACKWARD", "RESUME")  # opcodes of CPython 3.11; those of others are like them


class _Interrupt:
    """Raises KeyboardInterrupt in the calling thread at one of the points where signal handlers run in bps_rdma.

    Args:
        point: its number, from 0 on.
    """

    def __init__(self, point: int) -> None:
        self.came = False
        self._left = point
        self._before: dict[types.FrameType, str] = {}

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
            before = self._before.get(frame, "")
            self._before[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if before.startswith(_HANDLERS_RUN_AFTER):
                self._left -= 1
                if self._left < 0:
                    self.came = True
                    raise KeyboardInterrupt
        return self._trace


def interrupted(point: int, call: Callable[[], Any]) -> bool:
    """Whether the call has that many points, and so was interrupted."""
    interrupt = _Interrupt(point)
    with contextlib.suppress(KeyboardInterrupt), interrupt:
        call()
    return interrupt.came
