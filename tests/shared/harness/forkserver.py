# SPDX-License-Identifier: Apache-2.0
"""The process that ranks are forked from, by multiprocessing's forkserver, so that a rank is up in milliseconds."""

import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from .waiting import WaitedInVainError, eventually

CONTEXT = multiprocessing.get_context("forkserver")
PRELOAD = ["numpy", "pytest", "hypothesis", "bps_rdma", "harness"]  # what ranks find imported


def start_forkserver() -> None:
    """Starts the process that ranks are forked from, unless it runs, so that it really has imported what they need.

    It does not get our import path (before Python 3.14), and looks in the current folder first: in a checkout that is a
    bps_rdma without its native part. It skips what it cannot import, and every rank then imports it for itself.
    """
    here, path = Path.cwd(), os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path if entry)
    os.chdir(tempfile.gettempdir())
    CONTEXT.set_forkserver_preload(PRELOAD)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        os.chdir(here)
        del os.environ["PYTHONPATH"]
        if path is not None:
            os.environ["PYTHONPATH"] = path


def end_forkserver() -> None:
    """Ends that process and waits for it, so that its time and that of all ranks count as time of this process."""
    server: Any = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
    if server._forkserver_pid is None:
        return
    os.close(server._forkserver_alive_fd)
    try:
        eventually(lambda: os.waitpid(server._forkserver_pid, os.WNOHANG)[0], within=2, what="its end")
    except WaitedInVainError:  # a process may have kept the other end of its pipe
        os.kill(server._forkserver_pid, signal.SIGKILL)
        os.waitpid(server._forkserver_pid, 0)
    server._forkserver_pid = server._forkserver_alive_fd = None
