# SPDX-License-Identifier: Apache-2.0
"""The memory that a benchmark needs, and the memory that is available."""

from __future__ import annotations

from pathlib import Path

# The servers' accumulators, the libraries and the checks need memory, too.
_EXTRA = 1.25
_PROCESS_BYTES = 200 << 20  # an interpreter with numpy and torch


def needed(round_bytes: int, before: int, world: int, libraries: int) -> int:
    """About how many bytes a case needs on this machine.

    Args:
        round_bytes: of all tensors of a round on one rank; each library has its own.
        before: the same for the previous case, whose tensors are freed after those of this one are allocated.
        world: number of ranks.
        libraries: how many libraries are measured.
    """
    return int(world * (libraries * (round_bytes + before) * _EXTRA + _PROCESS_BYTES))


def available() -> int:
    """Bytes that are available on this machine and in this process's control group."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            free = min(free, max(int(Path(limit).read_text()) - int(Path(used).read_text()), 0))
        except (OSError, ValueError):  # there is no such group, or no limit
            continue
    return free
