# SPDX-License-Identifier: Apache-2.0
"""The processes of this user on this machine that take part in a job, found and asked by their local sockets.

csrc/node/inspection.h describes the sockets. A process of another user could take such a name, so a client checks who
listens, as the process checks who connects.
"""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LISTENS = 0x10000  # __SO_ACCEPTCON in /proc/net/unix
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


@dataclass(frozen=True)
class LocalProcess:
    """A process of a job on this machine.

    Attributes:
        pid: in its namespace of process ids; other containers have others.
        address: of its socket.
        is_ours: whether its namespace is ours, where `pid` means that process.
    """

    pid: int
    address: bytes
    is_ours: bool


def find() -> list[LocalProcess]:
    """Those of this user."""
    name = re.compile(rf"@bps_rdma-{os.geteuid()}-(\d+)-(\d+)-\d+$")
    ours = Path("/proc/self/ns/pid").stat().st_ino
    found = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        match = name.match(fields[-1])
        if match and int(fields[3], 16) & _LISTENS:
            # One that changes to another view has two for a moment; the newer one comes later in the list.
            address = b"\0" + fields[-1][1:].encode()
            found[match[1], match[2]] = LocalProcess(int(match[1]), address, int(match[2]) == ours)
    return list(found.values())


def ask(process: LocalProcess, request: str, timeout: float) -> dict[str, Any] | None:
    """The reply to "report", "report stacks", "job" or "job stacks"; None if there is none within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    text = bytearray()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout)
            connection.connect(process.address)
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            if _CREDENTIALS.unpack(peer)[1] != os.geteuid():
                return None
            connection.sendall(request.encode() + b"\n")
            while True:
                connection.settimeout(max(deadline - time.monotonic(), 0.001))
                piece = connection.recv(1 << 16)
                if not piece:
                    break
                text += piece
        reply = json.loads(text)
    except (OSError, ValueError):
        return None
    return reply if isinstance(reply, dict) else None


def pids_of(processes: Iterable[LocalProcess]) -> dict[int, LocalProcess]:
    """Those whose number is a process of this namespace, by it."""
    return {process.pid: process for process in processes if process.is_ours}


def state_of(pid: int) -> str:
    """The kernel's letter for what a process of this machine does ("T": stopped), or "" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
