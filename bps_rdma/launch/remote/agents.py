# SPDX-License-Identifier: Apache-2.0
"""All agents of a job: they are started at once, asked at once, and whatever is wrong with any host is told at once."""

from __future__ import annotations

import contextlib
import json
import selectors
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import bps_rdma
from bps_rdma.errors import BpsError
from bps_rdma.launch.output import write_all
from bps_rdma.launch.remote.agent import ENDS_WITHIN_S, SILENCE_S
from bps_rdma.launch.remote.connection import Connection
from bps_rdma.launch.remote.frames import Kind
from bps_rdma.terminal import showing_progress

ANSWER_S = 60.0
"""How long a host may take to start its agent, and an agent to answer."""
_BEAT_S = SILENCE_S / 10

Event = tuple[str, dict[str, Any]]
"""A host, and what it tells: what an agent sends, or {"lost": why}."""


class Agents:
    """The agents; use as `with Agents(hosts, rsh) as agents:`. They have ended after the block."""

    def __init__(self, hosts: Sequence[str], rsh: Sequence[str]) -> None:
        """Start one on each host. Raises BpsError when `rsh` cannot be started."""
        self._selector = selectors.DefaultSelector()
        self._early: list[Event] = []
        self._over = threading.Event()
        self.connections: dict[str, Connection] = {}
        try:
            for host in hosts:
                self._add(Connection(host, rsh))
        except BaseException:
            self._end()
            raise
        # A thread of its own: the launcher waits where nobody reads its output, and the agents must not end for that.
        self._beats = threading.Thread(target=self._beat, daemon=True)
        self._beats.start()

    def _add(self, connection: Connection) -> None:
        self.connections[connection.host] = connection
        self._selector.register(connection.output, selectors.EVENT_READ, connection.host)
        self._selector.register(connection.errors, selectors.EVENT_READ, connection.host)

    def __enter__(self) -> Agents:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        """End all agents, and pass on what they say until then."""
        self._over.set()
        for connection in self.connections.values():
            connection.close_input()
        deadline = time.monotonic() + ENDS_WITHIN_S
        while self.present and (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(OSError):  # the terminal, or whoever reads our output, is gone
                self.poll(left)
        for connection in self.connections.values():
            connection.end(0.5)
        self._selector.close()

    @property
    def present(self) -> list[Connection]:
        """Those that can be reached."""
        return [one for one in self.connections.values() if one.lost is None]

    def wake_by(self, descriptor: int) -> None:
        """Let poll() return when a descriptor becomes readable; its caller reads it."""
        self._selector.register(descriptor, selectors.EVENT_READ, None)

    def poll(self, timeout: float | None = None) -> list[Event]:
        """Pass output on, and return what has been told meanwhile; waits up to `timeout` seconds for the first."""
        if self._early:
            found, self._early = self._early, []
            return found
        for connection in self.present:
            connection.flush()
        if any(one.has_unsent for one in self.present):
            timeout = 0.05 if timeout is None else min(timeout, 0.05)
        found = []
        for key, _ in self._selector.select(timeout):
            if key.data is None:
                continue
            connection = self.connections[key.data]
            if key.fd == connection.errors:
                self._pass_errors_on(connection)
                continue
            for kind, content in connection.read():
                if kind is Kind.EVENT:
                    found.append((connection.host, json.loads(content)))
                else:
                    write_all(1 if kind is Kind.OUTPUT else 2, content)
            if connection.lost is not None:
                self._selector.unregister(connection.output)
                self._pass_errors_on(connection)
                with contextlib.suppress(KeyError):
                    self._selector.unregister(connection.errors)
                found.append((connection.host, {"lost": connection.lost}))
        return found

    def _pass_errors_on(self, connection: Connection) -> None:
        for line in connection.read_errors().splitlines():
            print(f"{connection.host}: {line}", file=sys.stderr, flush=True)
        if connection.errors_ended:
            with contextlib.suppress(KeyError):
                self._selector.unregister(connection.errors)

    def greet(self) -> dict[str, str]:
        """Wait for the first word of each; returns what is wrong with those that do not fit."""
        self._await("waiting for", lambda one: one.frames.first is not None, "does not answer")
        found = {one.host: one.lost for one in self.connections.values() if one.lost is not None}
        for one in self.present:
            assert one.frames.first is not None
            version = one.frames.first.get("version")
            if version != bps_rdma.__version__:
                found[one.host] = f"{one.host} has bps_rdma {version}, this host {bps_rdma.__version__}"
        return found

    def ask(self, what: str, orders: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Give each host its order, and return their answers. Raises BpsError when one is lost before it answers."""
        answers: dict[str, dict[str, Any]] = {}
        for host, order in orders.items():
            self.connections[host].send(order)

        def has_answered(one: Connection) -> bool:
            return one.host in answers or one.host not in orders

        def take(event: Event) -> None:
            host, content = event
            if "answer" in content:
                answers[host] = content["answer"]

        self._await(what, has_answered, "has not answered", take)
        if lost := [one.lost for host, one in self.connections.items() if host in orders and one.lost is not None]:
            raise BpsError("; ".join(lost), "look at that host")
        return {host: answers[host] for host in orders}

    def _await(
        self,
        what: str,
        is_done: Callable[[Connection], bool],
        why_not: str,
        take: Callable[[Event], None] | None = None,
    ) -> None:
        begin = time.monotonic()
        with showing_progress() as show:
            while waiting := [one for one in self.present if not is_done(one)]:
                names = ", ".join(one.host for one in waiting[:8]) + (", ..." if len(waiting) > 8 else "")
                if time.monotonic() - begin > ANSWER_S:
                    for one in waiting:
                        one.lost = f"{one.host} {why_not} within {ANSWER_S:g} s"
                    return
                show(f"{what} {names}")
                for event in self.poll(0.5):
                    if take is not None and "lost" not in event[1]:
                        take(event)

    def _beat(self) -> None:
        while not self._over.wait(_BEAT_S):
            for connection in list(self.connections.values()):
                connection.beat()
