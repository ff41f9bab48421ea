# SPDX-License-Identifier: Apache-2.0
"""The processes of this user on this machine that take part in a job, found and asked by their local sockets.

csrc/node/inspection.h describes the sockets. A process of another user can have names of that form, so a client checks
who listens, as the process checks who connects.
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
_MOMENT_S = 1.0
_QUEUE_S = 0.005  # between two looks at a queue that is full


@dataclass(frozen=True)
class LocalProcess:
    """A process of a job on this machine.

    Attributes:
        pid: in its namespace of process ids; other containers have others.
        addresses: of its socket, the newest first: one that changes to another view has two for a moment, and other
            users may have some of the same form.
        is_ours: whether its namespace is ours, where `pid` means that process.
    """

    pid: int
    addresses: tuple[bytes, ...]
    is_ours: bool

    @property
    def state(self) -> str:
        """The kernel's letter for what it does, or "" where its number does not mean it here."""
        return state_of(self.pid) if self.is_ours else ""


def find() -> list[LocalProcess]:
    """Those of this user; in other namespaces of process ids perhaps also names that another user has made up."""
    name = re.compile(rf"@bps_rdma-{os.geteuid()}-(\d+)-(\d+)-(\d+)-[0-9a-f]+$")
    ours = Path("/proc/self/ns/pid").stat().st_ino
    found: dict[tuple[int, int], list[tuple[int, bytes]]] = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        match = name.match(fields[-1])
        if match and int(fields[3], 16) & _LISTENS:
            pid, space, number = (int(group) for group in match.groups())
            if space != ours or _is_of_this_user(pid):
                found.setdefault((pid, space), []).append((number, b"\0" + fields[-1][1:].encode()))
    return [
        LocalProcess(pid, tuple(address for _, address in sorted(names, reverse=True)), space == ours)
        for (pid, space), names in found.items()
    ]


def _is_of_this_user(pid: int) -> bool:
    """Root has the folders of processes that may not be looked into."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid in (os.geteuid(), 0)
    except OSError:
        return False


def ask(process: LocalProcess, request: str, timeout: float) -> dict[str, Any] | None:
    """The reply to "report", "report stacks", "job" or "job stacks"; None if there is none within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    text = bytearray()
    try:
        with _connect(process, deadline) as connection:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
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


def is_listening(process: LocalProcess) -> bool:
    """Returns whether it listens: another user may have made up the name."""
    try:
        _connect(process, time.monotonic() + _MOMENT_S).close()
    except OSError:
        return False
    return True


def _connect(process: LocalProcess, deadline: float) -> socket.socket:
    """With the first of its addresses where this user listens and has room; the others are not waited for."""
    left = list(process.addresses)
    while left:
        for address in tuple(left):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.setblocking(False)
                connection.connect(address)
                if _peer_of(connection) == os.geteuid():
                    return connection
                left.remove(address)
            except BlockingIOError:  # its queue is full
                pass
            except OSError:
                left.remove(address)
            connection.close()
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(_QUEUE_S)
    raise ConnectionRefusedError


def _peer_of(connection: socket.socket) -> int:
    """The user whose process listens."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(peer)[1])


def pids_of(processes: Iterable[LocalProcess]) -> dict[int, LocalProcess]:
    """Those whose number is a process of this namespace, by it."""
    return {process.pid: process for process in processes if process.is_ours}


def state_of(pid: int) -> str:
    """The kernel's letter for what a process of this machine does ("T": stopped), or "" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
