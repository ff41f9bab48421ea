# SPDX-License-Identifier: Apache-2.0
"""What a job may not leave behind: processes, sockets and shared memory."""

from __future__ import annotations

import time
from pathlib import Path


def shared_memory_files() -> set[str]:
    """Without semaphores of multiprocessing, whose names are letters by chance."""
    names = {path.name for path in Path("/dev/shm").glob("*bps*")}
    return {f"/dev/shm/{name}" for name in names if "bps-vm." not in name and not name.startswith("sem.mp-")}


def leftovers(sessions: set[int]) -> list[str]:
    """Processes and sockets of the members, each of which led a session of its own."""
    deadline = time.monotonic() + 5
    while (found := _processes(sessions) + _sockets(sessions)) and time.monotonic() < deadline:
        time.sleep(0.02)  # a process that was killed takes a moment to vanish
    return found


def _processes(sessions: set[int]) -> list[str]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(after_name[3]) in sessions:
            found.append(f"process {stat.parent.name} (state {after_name[0]})")
    return found


def _sockets(pids: set[int]) -> list[str]:
    names = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "@bps-" in line]
    ours = {str(pid) for pid in pids}  # others, of other tests, may have any name
    return [f"socket {name}" for name in names if name.split("-")[1] in ours]
