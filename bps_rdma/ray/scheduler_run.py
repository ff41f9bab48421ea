# SPDX-License-Identifier: Apache-2.0
"""Runs `bps-scheduler` so that another one, in another actor, can take its place.

The next one has to know which run of the job it may take over. A scheduler keeps that in a file (BPS_SCHEDULER_STATE),
which would stay behind on the node when the actor is killed. Ray's key-value store therefore keeps its text while the
job runs, and the file exists only while a scheduler starts. The text is no secret.
"""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from ray.experimental import internal_kv

from bps_rdma.launch.environment import find_binary

_LOOK_S = 0.01
_STARTS_S = 30.0
_PREDECESSOR_ENDS_S = 5.0  # the raylet kills it when it has noticed the end of its actor


def start_scheduler() -> subprocess.Popen[bytes]:
    """Start the scheduler that this process's environment describes, in the place of an earlier one, if any."""
    command = [find_binary("bps-scheduler")]
    if "BPS_MIN_WORKERS" not in os.environ:  # the job ends with its scheduler
        return subprocess.Popen(command, stdin=subprocess.DEVNULL)
    key = _key(os.environ["BPS_JOB_ID"])
    with tempfile.TemporaryDirectory(prefix="bps-ray-") as folder:
        file = Path(folder, "scheduler")
        known = internal_kv._internal_kv_get(key)
        if known is not None:
            file.write_bytes(known)
            deadline = time.monotonic() + _PREDECESSOR_ENDS_S
            while _listens() and time.monotonic() < deadline:
                time.sleep(_LOOK_S)
        environment = os.environ | {"BPS_SCHEDULER_STATE": str(file)}
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)
        deadline = time.monotonic() + _STARTS_S
        # It reads or makes the file before. One that never listens is found by those who wait for the job to start.
        while child.poll() is None and not _listens() and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        if known is None and file.exists():
            internal_kv._internal_kv_put(key, file.read_bytes(), overwrite=True)
    return child


def forget_scheduler(job: str) -> None:
    """Of a job that has ended."""
    internal_kv._internal_kv_del(_key(job))


def _listens() -> bool:
    """A connection that says nothing is closed, and costs the scheduler nothing."""
    try:
        socket.create_connection((os.environ["BPS_ROOT_URI"], int(os.environ["BPS_ROOT_PORT"])), 1.0).close()
    except OSError:
        return False
    return True


def _key(job: str) -> bytes:
    return f"bps_rdma/scheduler/{job}".encode()
