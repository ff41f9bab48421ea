# SPDX-License-Identifier: Apache-2.0
"""Runs `bps-scheduler` so that another one, in another actor, can take its place.

The next one has to know which run of the job it may take over. A scheduler keeps that in a file (BPS_SCHEDULER_STATE),
which would stay behind on the node when the actor is killed. The driver therefore keeps its text, with which it also
ends, and the file exists only while a scheduler starts. The text is no secret.
"""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from bps_rdma import files
from bps_rdma.launch.environment import find_binary

_LOOK_S = 0.01
_STARTS_S = 30.0
_PREDECESSOR_ENDS_S = 5.0  # the raylet kills it when it has noticed the end of its actor


def start_scheduler(known: bytes | None) -> tuple[subprocess.Popen[bytes], bytes | None]:
    """Start the scheduler that this process's environment describes.

    Args:
        known: the text of the scheduler in whose place it starts; None: it is the first of its job.

    Returns:
        The process, and the text for the next one: None if the job ends with its scheduler, or this one did not start.
    """
    command = [find_binary("bps-scheduler")]
    if "BPS_MIN_WORKERS" not in os.environ:  # the job ends with its scheduler
        return subprocess.Popen(command, stdin=subprocess.DEVNULL), None
    with tempfile.TemporaryDirectory(prefix="bps-ray-") as folder:
        file = Path(folder, "scheduler")
        if known is not None:
            with files.replacing(file, 0o600) as out:
                out.write(known)
            deadline = time.monotonic() + _PREDECESSOR_ENDS_S
            while _listens() and time.monotonic() < deadline:
                time.sleep(_LOOK_S)
        environment = os.environ | {"BPS_SCHEDULER_STATE": str(file)}
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)
        deadline = time.monotonic() + _STARTS_S
        # It reads or makes the file before. One that never listens is found by those who wait for the job to start.
        while child.poll() is None and not _listens() and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        return child, known if known is not None else file.read_bytes() if file.exists() else None


def _listens() -> bool:
    """A connection that says nothing is closed, and costs the scheduler nothing."""
    try:
        socket.create_connection((os.environ["BPS_ROOT_URI"], int(os.environ["BPS_ROOT_PORT"])), 1.0).close()
    except OSError:
        return False
    return True
