# SPDX-License-Identifier: Apache-2.0
"""Shows where the threads of this program are, for `bps why` and `bps dump`.

The usual way takes Python's lock and is safe. If nobody gets that lock, because some thread has called into a library
and does not let go of it, faulthandler shows the stacks without the lock: then no Python code runs, so no frame can
change meanwhile.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import signal
import sys
import threading
from types import FrameType

from bps_rdma import _core

_open: tuple[int, int, int] | None = None  # process, signal, file


def show() -> None:
    """Lets the native module ask for the stacks of this process: by text(), and by a free signal of its own."""
    global _open
    if _open is not None and _open[0] == os.getpid():
        return
    for number in range(signal.SIGRTMAX - 1, signal.SIGRTMIN, -1):
        if signal.getsignal(number) is signal.SIG_DFL:
            with contextlib.suppress(OSError):  # too many files are open: a job without stacks is better than none
                file = _fixed_file(_core.MOST_STACK_BYTES)
                faulthandler.register(number, file=file, all_threads=True)
                _open = (os.getpid(), number, file)
                _core.show_stacks_by(text, number, file)
            return


def _fixed_file(size: int) -> int:
    """A file in memory whose size nobody can change."""
    file = os.memfd_create("bps-stacks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, size)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return file


def hide() -> None:
    """Undoes show()."""
    global _open
    if _open is not None and _open[0] == os.getpid():
        _core.hide_stacks()
        faulthandler.unregister(_open[1])
        os.close(_open[2])
    _open = None


def text() -> str:
    """The stacks of all threads in faulthandler's form, newest calls first and the main thread last."""
    main = threading.main_thread().ident
    stacks = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda one: one[0] == main):
        if ident == threading.get_ident():
            continue
        lines = [f"Thread 0x{ident:016x} (most recent call first):"]
        place: FrameType | None = frame
        while place is not None:
            lines.append(f'  File "{place.f_code.co_filename}", line {place.f_lineno} in {place.f_code.co_name}')
            place = place.f_back
        stacks.append("\n".join(lines))
    return "\n\n".join(stacks) + "\n"
