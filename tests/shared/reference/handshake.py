# SPDX-License-Identifier: Apache-2.0
"""The handshake of sockets, made a second time from its description in csrc/transport/handshake.h.

For peers that tests make up: without the secret, with it, of an earlier run, or members that claim what is not theirs.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
from dataclasses import dataclass

MAGIC, VERSION = 0x52535042, 21
HELLO, CHALLENGE, WELCOME, REFUSAL = 1, 2, 3, 4
VAN, CONTROL, DATA = 0, 1, 2  # planes
REFUSED_JOB, REFUSED_SECRET = 2, 3


@dataclass(frozen=True)
class Credentials:
    """What the members of a job share."""

    job: bytes
    key: bytes

    @staticmethod
    def of(name: str, secret: str) -> Credentials:
        """Those of the job `name`, for connections to its scheduler."""
        key = hmac.digest(secret.encode(), b"job" + name.encode(), "sha256")
        return Credentials(hashlib.sha256(name.encode()).digest()[:16], key)

    def within(self, view: bytes) -> Credentials:
        """For connections between members, in the view that the scheduler told."""
        return Credentials(hmac.digest(self.key, b"view" + self.job + view, "sha256")[:16], self.key)


class RefusedError(Exception):
    """The server refused the connection; `reason` is its number, None where it gave none."""

    def __init__(self, reason: int | None) -> None:
        super().__init__(f"refused: {reason}")
        self.reason = reason


@dataclass(frozen=True)
class Session:
    """A connection whose handshake has succeeded."""

    socket: socket.socket
    key: bytes
    view: bytes


def shake_hands(
    connection: socket.socket, credentials: Credentials, plane: int = VAN, node: int = 0, client_loop: int = 0,
    server_loop: int = 0,
) -> Session:  # fmt: skip
    """Plays the client, with the only path to that loop. Raises RefusedError."""
    hello = struct.pack("<IHBBIHHHH", MAGIC, VERSION, HELLO, plane, node, client_loop, server_loop, 0, 0)
    hello += credentials.job + os.urandom(16)
    connection.sendall(hello)
    _expect(connection, CHALLENGE)
    rest = _receive(connection, 16 + 12 + 32)
    said = hello + rest[:28]
    if not hmac.compare_digest(rest[28:], hmac.digest(credentials.key, b"server" + said, "sha256")):
        raise RefusedError(REFUSED_SECRET)
    connection.sendall(hmac.digest(credentials.key, b"client" + said, "sha256"))
    _expect(connection, WELCOME)
    return Session(connection, hmac.digest(credentials.key, b"session" + said, "sha256"), rest[16:28])


def _expect(connection: socket.socket, kind: int) -> None:
    magic, version, got, detail = struct.unpack("<IHBB", _receive(connection, 8))
    assert (magic, version) == (MAGIC, VERSION), (magic, version)
    if got == REFUSAL:
        raise RefusedError(detail)
    assert got == kind, got


def _receive(connection: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size:
        try:
            more = connection.recv(size - len(got))
        except ConnectionResetError:
            more = b""
        if not more:
            raise RefusedError(None)
        got += more
    return got
