# SPDX-License-Identifier: Apache-2.0
"""Members that know the secret and lie: their own connection may suffer, and nobody else."""

import contextlib
import functools
import multiprocessing
import socket
import struct
import threading
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from typing import Any

import harness
import numpy as np
import pytest
from harness import await_mark, mark
from reference import wire
from reference.handshake import Credentials, shake_hands
from reference.wire import Messages, Seat

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


# ---- Data


def tensor_at_first_loop(prefix: str) -> tuple[str, int]:
    """A name whose first partition is summed at loop 0 of two, and its id."""
    return next((name, wire.tensor_id(name)) for i in range(100) if wire.loop_of(name := f"{prefix}{i}", 2) == 0)


SHORT = tensor_at_first_loop("short")


def pushes_after_the_liar(bps: Any) -> list[float]:
    """Rank 1 pushes once somebody has pushed less in its name."""
    name, _ = SHORT
    assert is_sum_right(bps, 1)
    stale = np.full(1000, 999, np.float32)  # what landing slots are left with
    for _ in range(20):
        bps.push_pull(stale, average=False, name=name)
    mark("ready")
    handle = bps.push_pull_async(np.ones(1000, np.float32), average=False, name=name) if bps.rank() == 0 else None
    mark("pushed")
    await_mark("lied")
    if handle is None:
        handle = bps.push_pull_async(np.ones(1000, np.float32), average=False, name=name)
    return sorted(set(handle.wait().tolist()))


@pytest.mark.parametrize("sent", [64, 0, 64 + 3996])
def test_a_push_that_is_shorter_than_its_header_says_is_refused(sent):
    """The rest of its slot holds what was summed before."""
    with harness.start(pushes_after_the_liar, env=wire.TWO_LOOPS | {"BPS_TRANSPORT": "tcp"}, **TWO_RANKS) as job:
        job.await_marks("pushed")
        seat = Seat.at(job.name, job.port, job.pid("server 0"), node=2)
        control = seat.control(local=False)
        data = seat.data(local=False)
        control.say(seat.attach(8192))
        slot = next(slot for slot in seat.credits(hear(control, wire.CREDITS)) if slot.capacity >= 4096)
        push = wire.Push(tensor=SHORT[1], length=4000, member=1, immediate=7, round=20)
        data.socket.sendall(wire.tcp_frame(slot, (push.encode() + bytes(4000))[:sent]))
        if sent >= 64:
            assert b"not as long as its header says" in hear(control, wire.PUSH_FAILED)
        job.set_mark("lied")
        assert job.results() == [[2.0], [2.0]]


# ---- Floods


def counts_rounds(bps: Any) -> int:
    """Sums until it has seen enough of them during a flood; the number of those that were right."""
    mark("ready")
    await_mark("flooded")
    return sum(is_sum_right(bps, value) for value in range(1, 301))


@contextlib.contextmanager
def flood(*sources: tuple[socket.socket, bytes]) -> Iterator[None]:
    """Sends the same bytes by each connection again and again, and reads what comes back. Within it that has begun."""
    context = multiprocessing.get_context("fork")
    begun = [context.Event() for _ in sources]
    calls = (functools.partial(repeat, *source, event) for source, event in zip(sources, begun, strict=True))
    with harness.beside(*calls):
        assert all(event.wait(60) for event in begun)
        yield


def repeat(connection: socket.socket, said: bytes, begun: Event) -> None:
    threading.Thread(target=lambda: list(iter(lambda: connection.recv(1 << 20), b"")), daemon=True).start()
    connection.sendall(said[:4096])
    begun.set()
    connection.sendall(said[4096:])
    while True:
        connection.sendall(said)


@pytest.mark.parametrize("what", ["cancel", "ping", "record"])
def test_a_member_that_floods_a_server_does_not_silence_it(what):
    """Its loop goes on with everybody else's work, within a short patience for heartbeats."""
    env = wire.TWO_LOOPS | {"BPS_HEARTBEAT_TIMEOUT": str(5 * harness.PATIENCE)}
    with harness.start(counts_rounds, env=env, **TWO_RANKS) as job:
        job.await_marks("ready")
        seat = Seat.at(job.name, job.port, job.pid("server 0"), node=2)
        control = seat.control(local=True)
        if what == "record":  # of which each byte comes by itself
            data = seat.data(local=True).socket
            with trickle(data):
                job.set_mark("flooded")
                assert job.results() == [300, 300]
            return
        partitions = [(1 << 24 | i, i) for i in range(2000)]
        message = seat.cancel(77, partitions) if what == "cancel" else seat.ping(1)
        with flood((control.session.socket, control.frame(message) * (1 if what == "cancel" else 4096))):
            job.set_mark("flooded")
            assert job.results() == [300, 300]


@contextlib.contextmanager
def trickle(connection: socket.socket) -> Iterator[None]:
    """Sends the first bytes of a record that withdraws a region, one in 0.4 s."""
    stop = threading.Event()

    def send() -> None:
        with contextlib.suppress(OSError):
            for byte in struct.pack("<I", 5) + bytes(40):
                connection.sendall(bytes([byte]))
                if stop.wait(0.4):
                    return

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_those_who_ask_do_not_silence_the_scheduler():
    """They know the secret, and are no members."""
    with harness.start(counts_rounds, env={"BPS_HEARTBEAT_TIMEOUT": str(5 * harness.PATIENCE)}, **TWO_RANKS) as job:
        job.await_marks("ready")
        askers = []
        for _ in range(3):
            session = shake_hands(wire.connect(job.port), Credentials.of(job.name, job.name))
            asker = Messages(session, signs=True)
            asks = [asker.frame(struct.pack("<BI?", wire.VAN_ASK, i + 1, True)) for i in range(100_000)]
            askers.append((session.socket, b"".join(asks)))
        with flood(*askers):
            job.set_mark("flooded")
            assert job.results() == [300, 300]
