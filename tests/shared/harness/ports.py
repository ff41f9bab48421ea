# SPDX-License-Identifier: Apache-2.0
"""Ports for the members of a job, which no other test of this machine takes meanwhile.

The kernel takes ports of outgoing connections from 32768 to 60999, and the product takes those that nobody names from
12000 to 32767. A test has its own from above these. Each process has a block of them for itself, by a lock on a file.
"""

import fcntl
import os
import socket
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

LOOPBACK = "127.0.0.1"
FIRST, LAST = 61000, 65535
BLOCK = 180  # a port that a job has used stays busy for a minute


@dataclass
class _Block:
    process: int  # that has it; a child has one of its own
    lock: int  # a descriptor, which stays open
    first: int
    given: int = 0

    def next(self, count: int) -> int:
        """The first of so many in a row; after the last one of the block comes the first one again."""
        if self.given % BLOCK + count > BLOCK:
            self.given += BLOCK - self.given % BLOCK
        port = self.first + self.given % BLOCK
        self.given += count
        return port


_block: _Block | None = None


def _own_block() -> _Block:
    global _block
    if _block is not None and _block.process == os.getpid():
        return _block
    folder = Path(tempfile.gettempdir(), f"bps_test_ports-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    for first in range(FIRST, LAST + 1 - BLOCK, BLOCK):
        lock = os.open(folder / str(first), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        _block = _Block(os.getpid(), lock, first)
        return _block
    raise RuntimeError(f"other processes have all blocks of ports in {folder}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A port nobody listens on, and nobody else is given."""
    return free_ports(1)


def free_ports(count: int) -> int:
    """The first of so many free ports in a row, at most BLOCK."""
    block = _own_block()
    for _ in range(60):
        for _ in range(BLOCK):
            first = block.next(count)
            if all(_is_free(port) for port in range(first, first + count)):
                return first
        time.sleep(1)
    raise RuntimeError(f"no {count} free ports in a row from {block.first} on")
