# SPDX-License-Identifier: Apache-2.0
"""The launcher's side of the ranks' sockets: sends requests, gathers answers, and finds the cause of a failure."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import time
from typing import Any

from bps_rdma.errors import BpsError, DeadlineError, InvalidArgumentError, PeerLostError
from bps_rdma.launch.process import Child, Children

# When a rank fails, the others learn of it within 2 s. One second more lets the answer with the cause arrive.
_SYMPTOM_SECONDS = 3.0


class Rank:
    """One rank's process and the socket to it."""

    def __init__(self, child: Child, channel: socket.socket) -> None:
        self.child = child
        self.channel = channel
        self._received = b""

    def receive(self) -> dict[str, Any] | None:
        """The next answer, or None while it is incomplete. Raises EOFError when the rank has ended."""
        try:
            chunk = self.channel.recv(1 << 16)
        except ConnectionResetError:
            chunk = b""
        if not chunk:
            raise EOFError
        self._received += chunk
        if not self._received.endswith(b"\n"):  # a rank sends nothing until the next request
            return None
        line, self._received = self._received, b""
        answer: dict[str, Any] = json.loads(line)
        return answer


class Ranks:
    """All ranks of a benchmark."""

    def __init__(self, children: Children, timeout: float) -> None:
        """`timeout`: seconds that one answer may take."""
        self._children = children
        self._timeout = timeout
        self._ranks: list[Rank] = []

    def add(self, child: Child, channel: socket.socket) -> None:
        """Take over the socket to the next rank."""
        self._ranks.append(Rank(child, channel))

    def request(self, **request: Any) -> list[dict[str, Any]]:
        """Send `request` to all and return all answers, in rank order; see gather()."""
        line = json.dumps(request).encode() + b"\n"
        for rank in self._ranks:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # gather() reports the reason
                rank.channel.sendall(line)
        return self.gather()

    def gather(self) -> list[dict[str, Any]]:
        """One answer of each rank, in rank order.

        Raises:
            BpsError: a rank answered with an error, or ended; with the most likely cause.
            DeadlineError: a rank did not answer in time.
        """
        answers: dict[int, dict[str, Any]] = {}
        failures: list[BpsError] = []
        deadline = time.monotonic() + self._timeout
        with selectors.DefaultSelector() as selector:
            for index, rank in enumerate(self._ranks):
                selector.register(rank.channel, selectors.EVENT_READ, index)
            while selector.get_map() and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    index = key.data
                    try:
                        answer = self._ranks[index].receive()
                    except EOFError:
                        answer = self._end_of(index)
                    if answer is None:
                        continue
                    selector.unregister(key.fileobj)
                    answers[index] = answer
                    if "error" in answer:
                        failures.append(_as_error(index, answer))
                        deadline = min(deadline, time.monotonic() + _SYMPTOM_SECONDS)
        if failures:
            raise min(failures, key=lambda failure: isinstance(failure, PeerLostError))
        if missing := [index for index in range(len(self._ranks)) if index not in answers]:
            raise DeadlineError(
                f"ranks {missing} did not answer within {self._timeout:.0f} s", "see their output above"
            )
        return [answers[index] for index in range(len(self._ranks))]

    def _end_of(self, index: int) -> dict[str, Any]:
        child = self._ranks[index].child
        deadline = time.monotonic() + 1.0
        while child.status is None and (left := deadline - time.monotonic()) > 0:
            self._children.wait(left)
        what = child.describe_end() if child.status is not None else f"{child.label} closed its channel"
        return {"error": what, "hint": "see its output above", "kind": "ended"}


def _as_error(index: int, answer: dict[str, Any]) -> BpsError:
    # The other ranks report a lost peer, which is an effect. Its type keeps it apart from causes.
    kinds: dict[str, type[BpsError]] = {one.__name__: one for one in (PeerLostError, InvalidArgumentError)}
    cls = kinds.get(answer["kind"], BpsError)
    message = answer["error"] if answer["kind"] == "ended" else f"rank {index}: {answer['error']}"
    return cls(message, answer["hint"])
