# SPDX-License-Identifier: Apache-2.0
"""The launcher's end of the connection to one agent."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bps_rdma.errors import BpsError
from bps_rdma.launch.remote import host as this_host
from bps_rdma.launch.remote.frames import Frames, Kind

# `python -m` would import the package from the current folder. In a checkout that one has no native part.
_AGENT = "import sys; sys.path = [p for p in sys.path if p]; from bps_rdma.launch.remote.agent import main; main()"
_CHUNK = 65536
# A local agent gets these variables of the caller, as a login on another host has them.
_LOGIN = ("HOME", "USER", "LOGNAME", "SHELL", "PATH", "LANG", "LC_ALL", "TZ", "TMPDIR", "XDG_RUNTIME_DIR")
# ssh asks nothing, takes no terminal, and notices within four seconds that a host is gone.
_SSH_OPTIONS = (
    "-T", "-x", "-oBatchMode=yes", "-oConnectTimeout=15", "-oServerAliveInterval=1", "-oServerAliveCountMax=3",
)  # fmt: skip


def words_for(rsh: Sequence[str], host: str, python: str) -> list[str]:
    """The command that starts the agent on a host; neither the secret nor a variable of the job is in it."""
    options = _SSH_OPTIONS if Path(rsh[0]).name == "ssh" else ()
    return [*rsh, *options, host, f"exec {shlex.quote(python)} -c {shlex.quote(_AGENT)}"]


class Connection:
    """An agent, by the process that leads to it.

    Threading: beat() may be called by another thread than the rest.

    Attributes:
        host: its host, as the user has named it.
        frames: what it has said.
        lost: why it cannot be reached any more; None while it can.
        errors_ended: whether its standard error is at its end.
    """

    def __init__(self, host: str, rsh: Sequence[str]) -> None:
        """Start the agent. Raises BpsError when the program that leads to its host cannot be started."""
        self.host = host
        self.frames = Frames()
        self.lost: str | None = None
        self.errors_ended = False
        self.is_local = this_host.is_here(host)
        self._unsent = b""
        self._is_open = True  # its standard input
        self._errors = b""
        self._last_error = ""
        self._lock = threading.Lock()
        words = [sys.executable, "-c", _AGENT] if self.is_local else words_for(rsh, host, sys.executable)
        env = {name: os.environ[name] for name in _LOGIN if name in os.environ} if self.is_local else None
        try:
            self._process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env,
                start_new_session=True, bufsize=0,  # out of reach of the terminal's Ctrl-C
            )  # fmt: skip
        except OSError as error:
            raise BpsError(
                f"cannot start {words[0]!r}: {os.strerror(error.errno or errno.ENOENT)}",
                "install ssh, or name another program with --rsh or BPS_RSH",
            ) from None
        assert self._process.stdin
        assert self._process.stdout
        assert self._process.stderr
        self._stdin = self._process.stdin.fileno()
        self.output, self.errors = self._process.stdout.fileno(), self._process.stderr.fileno()
        for descriptor in (self._stdin, self.output, self.errors):
            os.set_blocking(descriptor, False)

    # ---- To the agent

    @property
    def has_unsent(self) -> bool:
        """Returns whether flush() has something to do."""
        return bool(self._unsent)

    def send(self, order: dict[str, Any]) -> None:
        """Send an order, now or by flush()."""
        with self._lock:
            self._unsent += json.dumps(order).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what could not be sent before."""
        with self._lock, contextlib.suppress(BlockingIOError):
            while self._unsent and self._is_open:
                try:
                    self._unsent = self._unsent[os.write(self._stdin, self._unsent) :]
                except BrokenPipeError:  # its output says why
                    self._unsent = b""

    def beat(self) -> None:
        """Tell the agent that the launcher lives."""
        with self._lock, contextlib.suppress(OSError):
            if not self._unsent and self._is_open:
                os.write(self._stdin, b"\n")

    # ---- From the agent

    def read(self) -> list[tuple[Kind, bytes]]:
        """The frames that have come. Sets `lost` at the end of the agent's output."""
        found: list[tuple[Kind, bytes]] = []
        try:
            while data := os.read(self.output, _CHUNK):
                found += self.frames.feed(data)
        except BlockingIOError:
            return found
        except (OSError, ValueError) as error:
            return self._note_loss(str(error), found)
        return self._note_loss("", found)

    def read_errors(self) -> str:
        """Whole lines that ssh, or the agent, has printed on standard error; before the agent's first word none."""
        with contextlib.suppress(OSError):
            while data := os.read(self.errors, _CHUNK):
                self._errors += data
            self.errors_ended = True
        if self.frames.first is None:
            return ""
        text, dash, rest = self._errors.rpartition(b"\n")
        self._errors = rest
        lines = (text + dash).decode(errors="replace")
        self._last_error = next((line for line in reversed(lines.splitlines()) if line.strip()), self._last_error)
        return lines

    def end(self, within: float) -> None:
        """Close the agent's standard input, and wait for its end; the connection is cut when that takes too long."""
        self.close_input()
        try:
            self._process.wait(within)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def close_input(self) -> None:
        """Ask the agent to end everything, and itself."""
        with self._lock, contextlib.suppress(OSError):
            assert self._process.stdin
            self._process.stdin.close()
            self._unsent = b""
            self._is_open = False

    def _note_loss(self, error: str, found: list[tuple[Kind, bytes]]) -> list[tuple[Kind, bytes]]:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        before = self.read_errors() + self._errors.decode(errors="replace")
        lines = [line.strip() for line in before.splitlines() if line.strip()]
        status = self._process.poll()
        said = lines[-1] if lines else error or self._last_error or f"the connection ended with status {status}"
        if self.frames.first is not None or (status == 255 and not self.is_local):  # ssh's own
            self.lost = f"{self.host} is lost: {said}" if self.frames.first else f"no way to {self.host}: {said}"
        else:
            self.lost = f"no bps on {self.host}: {said}"
        return found
