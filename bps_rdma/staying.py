# SPDX-License-Identifier: Apache-2.0
"""Processes that have left their job, and whose servers and scheduler go on for those that have not."""

from __future__ import annotations

import os
import threading
from multiprocessing import util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bps_rdma import _core

_staying: dict[_core.Process, threading.Thread] = {}
# The processes of the parent that this one was forked from. They are kept, so that they are never destroyed.
_of_parent: list[_core.Process] = []


def stay(process: _core.Process, patience: float, with_it: object) -> None:
    """Lets a process that has called depart() stay until all others have left.

    Args:
        process: of this interpreter.
        patience: seconds that it stays at the end of this interpreter.
        with_it: is kept as long.
    """
    thread = threading.Thread(target=_stay, args=(process, with_it), name="bps_rdma stays", daemon=True)
    _staying[process] = thread
    thread.start()  # it lets go of `with_it` at its end
    # This works as atexit does, and also in processes that torch.multiprocessing.spawn() starts.
    util.Finalize(None, _end, args=(process, patience), exitpriority=0)


def _stay(process: _core.Process, with_it: object) -> None:
    process.stay()
    _staying.pop(process, None)


def _end(process: _core.Process, patience: float) -> None:
    if (thread := _staying.get(process)) is None:
        return
    try:
        thread.join(patience)
    finally:  # also at Ctrl-C
        process.end_stay()
        thread.join()


def _after_fork_in_child() -> None:
    _of_parent.extend(_staying)
    _staying.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
