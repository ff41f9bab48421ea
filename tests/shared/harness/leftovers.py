# SPDX-License-Identifier: Apache-2.0
"""What a job may not leave behind: processes, sockets and shared memory."""

import contextlib
from pathlib import Path

from .waiting import WaitedInVainError, eventually


def shared_memory_files() -> set[str]:
    """Without semaphores of multiprocessing, whose names are letters by chance."""
    names = {path.name for path in Path("/dev/shm").glob("*bps*")}
    return {f"/dev/shm/{name}" for name in names if "bps-vm." not in name and not name.startswith("sem.mp-")}


def leftovers(sessions: set[int], within: float = 5) -> list[str]:
    """Processes and sockets of the members, each of which led a session of its own.

    A process that was killed takes a moment to vanish: what is there is told when so many seconds are over.
    """
    with contextlib.suppress(WaitedInVainError):
        eventually(lambda: not (_processes(sessions) or _sockets(sessions)), within)
    return _processes(sessions) + _sockets(sessions)


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
