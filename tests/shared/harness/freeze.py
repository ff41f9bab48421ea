# SPDX-License-Identifier: Apache-2.0
"""Stops one thread of another process for a while, as a debugger does. (A signal would stop all of them.)"""

import contextlib
import ctypes
import os
import time
from collections.abc import Iterator
from pathlib import Path

_PTRACE_SEIZE, _PTRACE_INTERRUPT, _PTRACE_DETACH = 0x4206, 0x4207, 17
_WALL = 0x40000000


def thread_of(pid: int, name: str) -> int:
    """The id of the thread of a process that has this name."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            if (task / "comm").read_text().strip() == name:
                return int(task.name)
    raise LookupError(f"process {pid} has no thread {name!r}")


def freeze(thread: int, seconds: float) -> None:
    """Returns when the thread runs again. OSError: it cannot be traced, or is gone."""
    with frozen(thread):
        time.sleep(seconds)


@contextlib.contextmanager
def frozen(thread: int) -> Iterator[None]:
    """Stops it until the block ends. Only for a block that stays on this thread."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long

    def ptrace(request: int) -> None:
        if libc.ptrace(request, thread, None, None) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))

    ptrace(_PTRACE_SEIZE)
    ptrace(_PTRACE_INTERRUPT)
    os.waitpid(thread, _WALL)
    try:
        yield
    finally:
        ptrace(_PTRACE_DETACH)
