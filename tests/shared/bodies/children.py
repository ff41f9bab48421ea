# SPDX-License-Identifier: Apache-2.0
"""Children that a rank forks."""

import os
import signal
import sys
from collections.abc import Callable

import harness


def status_of(pid: int) -> int:
    """Of a child, which gets a limited time to end."""
    ended: list[int] = []

    def has_ended() -> bool:
        found, status = os.waitpid(pid, os.WNOHANG)
        ended.extend([os.waitstatus_to_exitcode(status)] if found else [])
        return bool(found)

    try:
        harness.eventually(has_ended, what="the end of the child")
    except harness.WaitedInVainError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    return ended[0]


def in_child(body: Callable[[], object]) -> int:
    """Calls the body in a forked child, which then ends as any program does."""
    pid = os.fork()
    if pid == 0:
        body()
        sys.exit(0)
    return status_of(pid)
