# SPDX-License-Identifier: Apache-2.0
"""Members that know the secret and lie: their own connection may suffer, and nobody else."""

from __future__ import annotations

from typing import Any

import harness
import numpy as np
from harness import await_mark, mark
from reference import wire
from reference.wire import Seat

TWO_RANKS = {"workers": 2, "servers": 1}


def sums_before_and_after(bps: Any) -> list[bool]:
    """Whether the sums of this rank are right, before somebody lies and after."""
    right = [is_sum_right(bps, 1)]
    mark("ready")
    await_mark("lied")
    return [*right, is_sum_right(bps, 2)]


def is_sum_right(bps: Any, value: float) -> bool:
    found = bps.push_pull(np.full(50_000, value, np.float32), average=False, name="x")
    return bool((found == bps.size() * value).all())


def hear(messages: wire.Messages, kind: int) -> bytes:
    """The next message of this kind."""
    while True:
        message = messages.hear()
        if message[4] == kind:
            return message


# ---- Control messages


def test_who_shares_memory_is_granted_no_slots():
    """The server has registered none with that transport."""
    with harness.start(sums_before_and_after, env=wire.TWO_LOOPS, **TWO_RANKS) as job:
        job.await_marks("ready")
        seat = Seat.at(job.name, job.port, job.pid("server 0"), node=2)
        control = seat.control(local=True)
        control.say(seat.attach(needs_slots=True), seat.ping(5))
        assert hear(control, wire.ECHO)
        job.set_mark("lied")
        assert job.results() == [[True, True], [True, True]]
        assert "asks for landing slots" in job.log("server 0")


def test_connections_of_one_loop_come_by_one_transport():
    """Each transport takes connections for its own."""
    with harness.start(sums_before_and_after, env=wire.TWO_LOOPS, **TWO_RANKS) as job:
        job.await_marks("ready")
        seat = Seat.at(job.name, job.port, job.pid("server 0"), node=2)
        control = seat.control(local=False)
        control.say(seat.attach(), seat.ping(5))
        assert hear(control, wire.ECHO)
        assert wire.is_closed(seat.data(local=True).socket)
        job.set_mark("lied")
        assert job.results() == [[True, True], [True, True]]
