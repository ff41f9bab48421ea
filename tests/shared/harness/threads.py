# SPDX-License-Identifier: Apache-2.0
"""What the threads of a process do, by what the kernel tells of them."""

from __future__ import annotations

from pathlib import Path

_CLOCK_NANOSLEEP = {"x86_64": "230", "aarch64": "115"}


def is_blocked(pid: int) -> bool:
    """Whether the main thread of a process waits for something, such as a lock or a message, and does not just sleep.

    A test asks this after a rank has told by mark() that it is about to call something, and so knows that the call waits.
    """
    thread = Path(f"/proc/{pid}/task/{pid}")
    state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
    call = (thread / "syscall").read_text().split()[0]  # "running", where it is not within a system call
    return state == "S" and call not in {*_CLOCK_NANOSLEEP.values(), "running"}
