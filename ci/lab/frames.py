# SPDX-License-Identifier: Apache-2.0
"""What the agent in a host and its callers say to each other: one connection per process.

A frame is a kind (one byte), a length (four bytes) and that many bytes. The first one is an order. Then come, from the
caller, input and signals; from the agent, output and, last of all, the exit status.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from enum import Enum

PORT = 7000


class Kind(Enum):
    """What a frame holds."""

    ORDER = b"r"  # JSON: argv, env, cwd; size, rows and columns of a terminal, or null for pipes
    INPUT = b"i"  # empty: the end of it
    SIGNAL = b"s"  # its number, for the process and its children
    OUTPUT = b"o"
    ERROR = b"e"
    STATUS = b"x"  # Popen's returncode


class Frames:
    """A connection; any thread may send."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._stream = connection.makefile("rb")
        self._lock = threading.Lock()

    def send(self, kind: Kind, content: bytes = b"") -> None:
        """Raise OSError when the other side is gone."""
        with self._lock:
            self._connection.sendall(kind.value + struct.pack("!I", len(content)) + content)

    def receive(self) -> tuple[Kind, bytes] | None:
        """Wait for the next frame; None: the other side is gone."""
        try:
            head = self._stream.read(5)
            if len(head) < 5:
                return None
            size = struct.unpack("!I", head[1:])[0]
            content = self._stream.read(size)
        except OSError:
            return None
        return (Kind(head[:1]), content) if len(content) == size else None

    def close(self) -> None:
        """End the connection, and a receive() of another thread."""
        with contextlib.suppress(OSError):  # it is over already
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
