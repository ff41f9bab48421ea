# SPDX-License-Identifier: Apache-2.0
"""Copies the output of children line by line, with the name of the child before each line."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

_COLOURS = (36, 33, 32, 35, 34, 31)  # ANSI cyan, yellow, green, magenta, blue, red
_CHUNK = 65536
_LONGEST_LINE = 1 << 20


def line_prefix(label: str, index: int, *, coloured: bool) -> bytes:
    """`[label] `, in the colour of this index if `coloured`."""
    text = f"[{label}] "
    return (f"\x1b[{_COLOURS[index % len(_COLOURS)]}m{text}\x1b[0m" if coloured else text).encode()


def write_all(target: int, data: bytes) -> None:
    """Write to a descriptor, which may take a part at a time."""
    block = memoryview(data)
    while block:
        block = block[os.write(target, block) :]


@dataclass(frozen=True)
class Output:
    """Where the lines of children go, instead of to the output of this process.

    Attributes:
        write: takes 1 for standard output or 2 for standard error, and whole lines.
        joined: both go to one place, where their order counts.
        coloured: prefixes have colours.
    """

    write: Callable[[int, bytes], None]
    joined: bool = False
    coloured: bool = False


class LineCopier:
    """Copies one pipe to one descriptor, 1 or 2, in whole lines, so that lines of different children never mix.

    Owns `source`, makes it non-blocking, and closes it at its end. Without a prefix it changes
    nothing, and what a carriage return ends counts as a line, too: a bar of progress is seen while it grows.
    """

    def __init__(
        self, source: int, target: int, prefix: bytes, write: Callable[[int, bytes], None] = write_all
    ) -> None:
        os.set_blocking(source, False)
        self.source = source
        self._target = target
        self._prefix = prefix
        self._write_to = write
        self._rest = b""

    def copy(self) -> bool:
        """Copy what is available; returns False at the end of the pipe."""
        try:
            while chunk := os.read(self.source, _CHUNK):
                self._take(self._rest + chunk)
        except BlockingIOError:
            return True
        self.close()
        return False

    def close(self) -> None:
        """Write an unfinished last line, and close the pipe."""
        if self._rest:
            self._write(self._prefix + self._rest + (b"\n" if self._prefix else b""))
            self._rest = b""
        if self.source >= 0:
            os.close(self.source)
            self.source = -1

    def _take(self, data: bytes) -> None:
        if self._prefix:
            *lines, self._rest = data.split(b"\n")
            self._write(b"".join(self._prefix + line + b"\n" for line in lines))
            return
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if end == 0 and len(data) > _LONGEST_LINE:
            end = len(data)
        self._rest = data[end:]
        self._write(data[:end])

    def _write(self, data: bytes) -> None:
        if data:
            self._write_to(self._target, data)
