# SPDX-License-Identifier: Apache-2.0
"""What an agent says on its standard output: one line of JSON, by which it is known, then frames.

The launcher writes lines of JSON to the agent's standard input. An empty line says that the launcher still lives.
"""

from __future__ import annotations

import json
import struct
from enum import Enum
from typing import Any

MARK = b"bps-agent "
"""Begins the first line. What the shell of a host prints before it is no part of it."""
_HEADER = struct.Struct(">cI")
_LONGEST = 1 << 26


class Kind(Enum):
    """What a frame holds: output of a child, or an answer or event in JSON."""

    OUTPUT = b"O"
    ERRORS = b"E"
    EVENT = b"J"


def frame(kind: Kind, content: bytes) -> bytes:
    """One frame."""
    return _HEADER.pack(kind.value, len(content)) + content


def event(content: dict[str, Any]) -> bytes:
    """A frame with an event."""
    return frame(Kind.EVENT, json.dumps(content).encode())


class Frames:
    """Takes the bytes of an agent apart.

    Attributes:
        before: what came before the first line of the agent.
        first: what that line says; None while it has not come.
    """

    def __init__(self) -> None:
        self.before = b""
        self.first: dict[str, Any] | None = None
        self._rest = b""

    def feed(self, data: bytes) -> list[tuple[Kind, bytes]]:
        """The frames that are complete now. Raises ValueError for bytes that no agent sends."""
        self._rest += data
        if self.first is None:
            begin = self._rest.find(MARK)
            end = self._rest.find(b"\n", begin) if begin >= 0 else -1
            if end < 0:
                return []
            self.before = self._rest[:begin]
            self.first = json.loads(self._rest[begin + len(MARK) : end])
            self._rest = self._rest[end + 1 :]
        found = []
        while len(self._rest) >= _HEADER.size:
            kind, size = _HEADER.unpack_from(self._rest)
            if size > _LONGEST:
                raise ValueError(f"a frame of {size} bytes")
            if len(self._rest) < _HEADER.size + size:
                break
            found.append((Kind(kind), self._rest[_HEADER.size : _HEADER.size + size]))
            self._rest = self._rest[_HEADER.size + size :]
        return found
