# SPDX-License-Identifier: Apache-2.0
"""Children that a rank forks."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

import harness

LIMIT_S = 10 * harness.PATIENCE


def status_of(pid: int) -> int:
    """Of a child, which gets a limited time to end."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -999


def in_child(body: Callable[[], object]) -> int:
    """Calls the body in a forked child, which then ends as any program does."""
    pid = os.fork()
    if pid == 0:
        body()
        sys.exit(0)
    return status_of(pid)
