# SPDX-License-Identifier: Apache-2.0
"""Runs a command that ends with the process that has started it, whatever ends that, and that leaves nothing behind.

    supervise.py COMMAND [ARGUMENT...]

Its standard input is a pipe that the starter holds open and never writes to. When that is closed, the command is
interrupted, then terminated, then killed. Once the command has ended, all processes that it has left are killed: also
those with a session of their own, because this process becomes the parent of each whose own parent has ended.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
GRACE_S = 10.0  # the command gets this long after each signal
STEP_S = 0.01


def follow_starter(command: int) -> None:
    """Ends the command when the starter has closed the pipe."""
    os.read(0, 1)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):  # it has just been reaped
            os.killpg(command, signum)
        time.sleep(GRACE_S)


def await_end(command: int) -> None:
    """Returns when the command has ended. It is not reaped yet, so that no other process can get its number."""
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)).si_pid != command:
        os.waitpid(ended.si_pid, 0)


def descendants() -> set[int]:
    """The processes below this one."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = {os.getpid()}
    while new := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= new
    return found - {os.getpid()}


def end_others(command: int) -> None:
    """Kills all descendants but the command. One that cannot be killed, such as another user's, is told."""
    until = time.monotonic() + GRACE_S
    while left := descendants() - {command}:
        if time.monotonic() > until:
            print(f"warning: processes {sorted(left)} do not end", file=sys.stderr)
            return
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(STEP_S)


def main() -> int:
    """Returns the status of the command, or 128 and the signal that has ended it, like a shell."""
    if ctypes.CDLL(None, use_errno=True).prctl(SUBREAPER, 1) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    process = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=follow_starter, args=(process.pid,), daemon=True).start()
    await_end(process.pid)
    end_others(process.pid)
    status = process.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
