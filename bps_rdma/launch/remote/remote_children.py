# SPDX-License-Identifier: Apache-2.0
"""The processes of a job on several hosts, as launch/run.py takes those of one: Children, by way of agents."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from bps_rdma.errors import BpsError
from bps_rdma.launch.process import Child
from bps_rdma.launch.remote.agents import Agents, Event
from bps_rdma.launch.remote.plan import Plan

_BINARIES = ("bps-server", "bps-scheduler")
_LATE_S = 1.0  # for news of processes that were killed


@dataclass(eq=False)
class RemoteChild(Child):
    """A process on `host`; `number` is the one by which its agent knows it."""

    host: str = ""
    number: int = 0
    is_lost: bool = False  # with its host

    def describe_end(self) -> str:
        """As of a child on this host."""
        return f"{self.label} (pid {self.pid}) was lost with its host" if self.is_lost else super().describe_end()


class RemoteChildren:
    """Starts each process of `plan` on its host. Threading: of the main thread, except pass_on() in signal handlers."""

    def __init__(self, agents: Agents, plan: Plan) -> None:
        self._agents = agents
        self._plan = plan
        self._numbers = itertools.count()
        self._all: dict[int, RemoteChild] = {}
        self._lost_hosts: set[str] = set()
        self._ended: list[Child] = []
        self._signals: list[tuple[Sequence[Child], int]] = []
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        agents.wake_by(self._woken)

    @property
    def running(self) -> list[Child]:
        """Those whose end has not been told."""
        return [child for child in self._all.values() if child.status is None]

    def spawn(self, label: str, command: Sequence[str], env: Mapping[str, str]) -> Child:
        """Start `command` on the host that the plan has for `label`; `env` is added to what the agent has.

        That it cannot be started, wait() raises.
        """
        host = self._plan.places[label]
        child = RemoteChild(f"{label} on {host}", 0, host=host, number=next(self._numbers))
        self._all[child.number] = child
        if host in self._lost_hosts:
            self._lose(child)
        else:
            self._agents.connections[host].send(
                {
                    "do": "start", "id": child.number, "label": label, "command": list(command), "env": dict(env),
                    "is_binary": command[0] in _BINARIES,
                }
            )  # fmt: skip
        return child

    def has_place(self, label: str) -> bool:
        """Returns whether a lost process can be started again: on its host, or else on one with a free slot."""
        return self._plan.move(label, self._lost_hosts)

    def wait(self, timeout: float | None = None) -> list[Child]:
        """Processes that ended since the last call; waits up to `timeout` seconds (None: no limit) for the first.

        Raises:
            BpsError: a process cannot be started.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._ended and self.running:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left < 0:
                break
            for event in self._agents.poll(left):
                self._take(event)
            self._send_signals()
        ended, self._ended = self._ended, []
        return ended

    def pass_on(self, to: Sequence[Child], signum: int) -> None:
        """Send a signal to those of `to` that run. A signal handler may call this: the next poll() does it."""
        self._signals.append((to, signum))
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake, b"!")

    def end_late(self, candidates: Sequence[Child], looking: Callable[[], set[int]]) -> list[Child]:
        """Have the agents end those that look for a job that is over; they tell of it themselves."""
        del looking  # on this host, which need not be one of the job
        for host, ids in self._by_host(candidates).items():
            self._agents.connections[host].send({"do": "end_late", "ids": ids})
        return []

    def stop(self, signum: int = signal.SIGTERM, grace: float = 3.0) -> None:
        """Send `signum` to all, and SIGKILL to those left after `grace` seconds or at a second Ctrl-C."""
        with contextlib.suppress(KeyboardInterrupt):
            self._stop(signum, grace)
        self._stop(signal.SIGKILL, 0)
        for child in self.running:
            assert isinstance(child, RemoteChild)
            self._lose(child)
        self._ended.clear()

    def _stop(self, signum: int, grace: float) -> None:
        if not self.running:
            return
        for connection in self._agents.present:
            connection.send({"do": "stop", "signum": int(signum), "grace": grace})
        deadline = time.monotonic() + grace + _LATE_S
        while self.running and (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(BpsError, OSError):  # the terminal may be gone
                self.wait(left)

    def _send_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 4096)
        while self._signals:
            to, signum = self._signals.pop(0)
            for host, ids in self._by_host(to).items():
                self._agents.connections[host].send({"do": "signal", "ids": ids, "signum": signum})

    def _by_host(self, children: Iterable[Child]) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for child in children:
            if isinstance(child, RemoteChild) and child.status is None:
                found.setdefault(child.host, []).append(child.number)
        return found

    def _take(self, event: Event) -> None:
        host, content = event
        if "lost" in content:
            self._lost_hosts.add(host)
            print(content["lost"], file=sys.stderr, flush=True)
            for child in self._all.values():
                if child.host == host and child.status is None:
                    self._lose(child)
        elif "started" in content:
            self._all[content["started"]].pid = content["pid"]
        elif "ended" in content:
            ended = self._all[content["ended"]]
            ended.status = content["status"]
            self._ended.append(ended)
        elif "failed" in content:
            failed = self._all[content["failed"]]
            failed.status = 1
            raise BpsError(f"{failed.label}: {content['message']}", content["hint"])

    def _lose(self, child: RemoteChild) -> None:
        child.is_lost = True
        child.status = -signal.SIGKILL
        self._ended.append(child)
