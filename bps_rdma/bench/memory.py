"""How much memory a bench takes, and how much there is."""

from __future__ import annotations

from pathlib import Path

# Servers' accumulators, and what libraries and the checks take besides the tensors.
_EXTRA = 1.25
_PROCESS_BYTES = 200 << 20  # an interpreter with numpy and torch


def needed(round_bytes: int, before: int, world: int, contenders: int) -> int:
    """Bytes that a case takes on this machine, about.

    Args:
        round_bytes: of all tensors of a round on one rank, which each contender has for itself.
        before: the same for the case before, which is let go only when the next one has its tensors.
        world: number of ranks.
        contenders: how many libraries are measured.
    """
    return int(world * (contenders * (round_bytes + before) * _EXTRA + _PROCESS_BYTES))


def available() -> int:
    """Bytes that may still be used, by the machine's account and by that of this process's control group."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            free = min(free, max(int(Path(limit).read_text()) - int(Path(used).read_text()), 0))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return free
