# SPDX-License-Identifier: Apache-2.0
"""The processes of a job on one host, for a launcher on another.

It reads orders, a line of JSON each, from standard input, and answers on standard output (frames.py). When standard
input ends, it ends everything that it has started within ENDS_WITHIN_S, and itself. That covers whatever can happen to
the launcher: Ctrl-C, a closed terminal, a kill, a lost connection. A connection that is cut without a word is noticed
after SILENCE_S.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import select
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import bps_rdma
from bps_rdma.errors import BpsError
from bps_rdma.launch.environment import find_binary, outer_environment
from bps_rdma.launch.output import Output
from bps_rdma.launch.process import Child, Children
from bps_rdma.launch.remote import host
from bps_rdma.launch.remote.frames import MARK, Kind, event, frame
from bps_rdma.launch.run import looking_for_jobs

ENDS_WITHIN_S = 3.0
_GRACE_S = 1.5  # after SIGTERM, once the launcher is gone
SILENCE_S = 20.0
_LOOK_S = 0.05  # between two looks at children whose end the system does not tell
_CHUNK = 65536


class _Gone(Exception):  # noqa: N818  # no error of ours
    """The launcher is gone, or cannot be reached any more."""


class Channel:
    """Standard input and output, for this module alone: what else is printed goes to standard error."""

    def __init__(self) -> None:
        self.orders = os.dup(0)
        self._answers = os.dup(1)
        os.dup2(2, 1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.set_blocking(self.orders, False)
        os.set_blocking(self._answers, False)
        self._read = b""
        self._heard = time.monotonic()
        self.is_open = True

    def send(self, data: bytes) -> None:
        """Write; a launcher that does not read for a while is waited for."""
        block = memoryview(data)
        while block and self.is_open:
            try:
                block = block[os.write(self._answers, block) :]
            except BlockingIOError:
                select.select([self.orders], [self._answers], [], 1.0)
                self._fill()
                self._check_silence()
            except OSError:
                self._lose()

    def lines(self, timeout: float | None) -> list[bytes]:
        """The orders that have come. Raises _Gone at the end of standard input, and after a long silence."""
        if not self.is_open:
            raise _Gone
        if b"\n" not in self._read:
            select.select([self.orders], [], [], timeout)
            self._fill()
        *lines, self._read = self._read.split(b"\n")
        self._check_silence()
        return [line for line in lines if line]

    def _fill(self) -> None:
        with contextlib.suppress(BlockingIOError):
            more = os.read(self.orders, _CHUNK)
            if not more:
                self._lose()
            self._heard = time.monotonic()
            self._read += more

    def _check_silence(self) -> None:
        if time.monotonic() - self._heard > SILENCE_S:
            self._lose()

    def _lose(self) -> None:
        self.is_open = False
        raise _Gone


class Agent:
    """One agent, from its first word to its end."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._started: dict[int, Child] = {}  # by the launcher's numbers
        self._env: dict[str, str] = {}
        self._kill_at = float("inf")
        self._listener: host.Answering | None = None
        self._ports: range | None = None

    def serve(self) -> None:
        """Follow orders until standard input ends. Raises BpsError when the guard of the children does not start."""
        with contextlib.suppress(_Gone):
            self._channel.send(MARK + json.dumps({"version": bps_rdma.__version__}).encode() + b"\n")
            first = self._next_order()
            output = Output(self._write, bool(first["joined"]), bool(first["coloured"]))
            with Children(prefixed=bool(first["prefixed"]), output=output) as self._children:
                self._folder = Path(tempfile.mkdtemp(prefix="bps-run-"))
                self._children.remove_if_killed(str(self._folder))
                try:
                    self._follow(first)
                except _Gone:
                    for signum in (signal.SIGTERM, signal.SIGHUP):
                        signal.signal(signum, signal.SIG_IGN)
                    self._children.stop(signal.SIGTERM, _GRACE_S)
                finally:
                    if self._listener:
                        self._listener.close()
                    shutil.rmtree(self._folder, ignore_errors=True)

    def _follow(self, order: dict[str, Any]) -> None:
        self._obey(order)
        while True:
            by_looking = any(child.pidfd is None for child in self._children.running)
            wait = _LOOK_S if by_looking else min(max(self._kill_at - time.monotonic(), 0), 1.0)
            select.select([self._channel.orders, self._children.fileno()], [], [], wait)
            for line in self._channel.lines(0):
                self._obey(json.loads(line))
            if self._children.running:
                self._tell(self._children.wait(0.001))
            if time.monotonic() > self._kill_at:
                self._kill_at = float("inf")
                for child in self._children.running:
                    self._children.signal(child, signal.SIGKILL)

    def _next_order(self) -> dict[str, Any]:
        while not (lines := self._channel.lines(1.0)):
            pass
        assert len(lines) == 1  # the launcher waits for the answer
        return dict(json.loads(lines[0]))

    def _obey(self, order: dict[str, Any]) -> None:
        getattr(self, f"_do_{order['do']}")(order)

    # ---- Before the start

    def _do_ask(self, order: dict[str, Any]) -> None:
        self._ports = host.port_range(order["env"].get("BPS_PORTS", ""))
        path = order["env"].get("PATH") or os.environ.get("PATH", os.defpath)
        # As if the environment of this Python were active.
        self._env = outer_environment() | order["env"] | {"PATH": f"{Path(sys.executable).parent}:{path}"}
        found = host.problems(order["folder"], order["command"], self._env["PATH"], order["binaries"])
        answer: dict[str, Any] = {"port": 0, "ports": []}
        try:
            ports = host.free_ports(order["ports"], self._ports)
            self._listener = host.Answering(order["token"], self._ports)
            answer = {"port": self._listener.port, "ports": ports}
        except BpsError as error:
            found.append(error.message)
        self._answer(
            **answer, problems=found, folder=str(self._folder), python=platform.python_version(),
            path=os.getcwd(), addresses=[asdict(one) for one in host.addresses()],  # noqa: PTH109  # as text
        )  # fmt: skip

    def _do_reach(self, order: dict[str, Any]) -> None:
        self._answer(reached=host.reach(order["targets"]))

    def _do_job(self, order: dict[str, Any]) -> None:
        if self._listener:
            self._listener.close()
            self._listener = None
        file = os.open(self._folder / "secret", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(file, "w") as opened:
            opened.write(order["secret"])
        self._env["BPS_SECRET_FILE"] = str(self._folder / "secret")

    # ---- While it runs

    def _do_start(self, order: dict[str, Any]) -> None:
        command = order["command"]
        try:
            if order["is_binary"]:
                command = [find_binary(command[0]), *command[1:]]
            child = self._children.spawn(order["label"], command, self._env | order["env"])
        except BpsError as error:
            return self._event(failed=order["id"], message=error.message, hint=error.hint)
        self._started[order["id"]] = child
        return self._event(started=order["id"], pid=child.pid)

    def _do_signal(self, order: dict[str, Any]) -> None:
        self._children.pass_on([self._started[one] for one in order["ids"] if one in self._started], order["signum"])

    def _do_stop(self, order: dict[str, Any]) -> None:
        for child in self._children.running:
            self._children.signal(child, order["signum"])
        self._kill_at = time.monotonic() + order["grace"]

    def _do_end_late(self, order: dict[str, Any]) -> None:
        candidates = [self._started[one] for one in order["ids"] if one in self._started]
        late = self._children.end_late(candidates, looking_for_jobs)
        for child in late:
            text = f"{child.label} (pid {child.pid}) was started again too late: the job is over; it is ended\n"
            self._write(2, text.encode())
        self._tell(late)

    def _tell(self, ended: list[Child]) -> None:
        for child in ended:
            number = next(number for number, one in self._started.items() if one is child)
            self._event(ended=number, status=child.status)

    def _write(self, target: int, data: bytes) -> None:
        with contextlib.suppress(_Gone):  # noticed by whoever reads orders next
            for begin in range(0, len(data), 1 << 20):
                self._channel.send(frame(Kind.OUTPUT if target == 1 else Kind.ERRORS, data[begin : begin + (1 << 20)]))

    def _answer(self, **content: Any) -> None:
        self._channel.send(event({"answer": content}))

    def _event(self, **content: Any) -> None:
        self._channel.send(event(content))


def main() -> None:
    """What connection.py starts."""

    def ask_to_end(_: int, __: FrameType | None) -> None:
        raise _Gone

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher's affair, where a terminal sends it to all
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, ask_to_end)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        Agent(Channel()).serve()
    except (BpsError, OSError) as error:
        print(f"bps agent: {error}", file=sys.stderr)
        sys.exit(1)
