# SPDX-License-Identifier: Apache-2.0
"""A process on a host of the lab, as its caller sees it."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from .frames import PORT, Frames, Kind

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BASE_ENV = {"PATH": PATH, "HOME": "/root", "LC_ALL": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}


def connect(address: str, argv: Sequence[str], env: Mapping[str, str], size: tuple[int, int] | None = None) -> Frames:
    """Start a process on the host with this management address; `size`: in a terminal of so many rows and columns.

    Raises OSError when the host does not answer.
    """
    connection = socket.create_connection((address, PORT), timeout=10)
    connection.settimeout(None)
    frames = Frames(connection)
    order = {"argv": list(argv), "env": BASE_ENV | dict(env), "cwd": "/", "size": size}
    frames.send(Kind.ORDER, json.dumps(order).encode())
    return frames


class Process:
    """Collects the lines of standard output and error with the moments (time.monotonic()) at which they came.

    `status` is Popen's returncode, and None while the process runs, or when its host died.
    """

    def __init__(self, address: str, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self.status: int | None = None
        self.ended: float | None = None  # the moment; also when its host died
        self.lines: list[tuple[float, str]] = []
        self._changed = threading.Condition()
        self._frames = connect(address, argv, env)
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()

    def _receive(self) -> None:
        rest = {Kind.OUTPUT: b"", Kind.ERROR: b""}
        while frame := self._frames.receive():
            kind, content = frame
            with self._changed:
                if kind is Kind.STATUS:
                    self.status = int(content)
                    break
                *lines, rest[kind] = (rest[kind] + content).split(b"\n")
                self.lines += [(time.monotonic(), line.decode(errors="replace")) for line in lines]
                self._changed.notify_all()
        with self._changed:
            self.lines += [(time.monotonic(), line.decode(errors="replace")) for line in rest.values() if line]
            self.ended = time.monotonic()
            self._changed.notify_all()

    def wait(self, timeout: float) -> int | None:
        """Wait for the end; returns `status`."""
        self._thread.join(timeout)
        return self.status

    def await_line(self, matches: Callable[[str], bool], timeout: float) -> str | None:
        """The first line that matches, or None when the process ends without it, or `timeout` seconds pass."""
        deadline = time.monotonic() + timeout
        seen = 0
        with self._changed:
            while True:
                for _, line in self.lines[seen:]:
                    if matches(line):
                        return line
                seen = len(self.lines)
                left = deadline - time.monotonic()
                if self.ended is not None or left <= 0:
                    return None
                self._changed.wait(left)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the process and its children."""
        with contextlib.suppress(OSError):  # it has ended
            self._frames.send(Kind.SIGNAL, str(int(number)).encode())

    def abandon(self) -> None:
        """End it whether its host answers or not."""
        self._frames.close()

    def text(self) -> str:
        """All that it has written."""
        with self._changed:
            return "\n".join(line for _, line in self.lines)
