# SPDX-License-Identifier: Apache-2.0
"""Messages behind others that nobody has waited for, and messages whose wait is interrupted."""

import asyncio
import os
import signal
from typing import Any

import harness
import numpy as np
import pytest
from harness import await_mark, mark

ENV = {"BPS_TIMEOUT": str(20 * harness.PATIENCE)}


async def awaited(handle: Any) -> Any:
    return await handle


def polled(handle: Any) -> Any:
    harness.eventually(handle.done, what="a handle is done")
    return handle.wait()


WAYS: dict[str, Any] = {
    "wait": lambda handle: handle.wait(),
    "await": lambda handle: asyncio.run(awaited(handle)),
    "done": polled,
}


class Interrupts:
    """SIGINT raises KeyboardInterrupt while a handle is waited for, and is ignored otherwise."""

    def __init__(self) -> None:
        self.caught = 0
        self._waits = False
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, *_: object) -> None:
        if self._waits:
            self._waits = False
            raise KeyboardInterrupt

    def wait(self, handle: Any) -> Any:
        """Waits as often as it takes."""
        while True:
            try:
                self._waits = True
                result = handle.wait()
                self._waits = False
            except KeyboardInterrupt:
                self.caught += 1
                if self.caught == 1:
                    mark("caught")
            else:
                return result


def interrupt_until_caught(pid: int) -> None:
    """One signal may come before the wait, on a busy machine each of 200."""

    def caught() -> bool:
        os.kill(pid, signal.SIGINT)
        return harness.is_marked("caught", 0)

    harness.eventually(caught, what="a wait is interrupted")


@pytest.mark.parametrize("count", [3, 5000])
@harness.on_ranks(workers=2, env=ENV)
def test_a_lane_goes_on_after_interrupts(bps: Any, count: int) -> None:
    """Each of them comes shortly before the message, often in the moment in which its notice has come."""
    interrupts = Interrupts()
    if bps.rank() == 0:
        bps.send(np.array([os.getpid()]), "pid", dst=1)
        for number in range(200):
            handle = bps.recv_async(np.full(count, -1.0), "w", src=1)
            bps.send(np.zeros(1), "ready", dst=1)
            assert np.all(interrupts.wait(handle) == number)
        assert interrupts.caught > 0
    else:
        pid = int(bps.recv(np.empty(1, int), "pid", src=0)[0])
        for number in range(200):
            bps.recv(np.zeros(1), "ready", src=0)
            os.kill(pid, signal.SIGINT)
            if number == 0:
                interrupt_until_caught(pid)
            bps.send(np.full(count, float(number)), "w", dst=0)
    bps.barrier()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [3, 5000])
@harness.on_ranks(workers=2, env=ENV)
def test_each_message_has_its_own_deadline(bps: Any, count: int, way: str) -> None:
    if bps.rank() == 0:
        first = bps.recv_async(np.empty(count), src=1)
        second = bps.recv_async(np.empty(count), src=1, timeout=0.3)
        with pytest.raises(bps.DeadlineError):
            WAYS[way](second)
        mark("gave up")
        assert np.all(first.wait() == 1), "its own deadline is a later one"
        assert np.all(bps.recv(np.empty(count), src=1) == 3)
    else:
        await_mark("gave up", 0)
        bps.send(np.full(count, 1.0), dst=0)
        with pytest.raises(bps.DeadlineError):
            bps.send(np.full(count, 2.0), dst=0)
        bps.send(np.full(count, 3.0), dst=0)


def waits_for_the_second_one(bps: Any, way: str) -> None:
    """The other rank starts it only when it has been told that the first one does not fit."""
    if bps.rank() == 0:
        first, second = bps.recv_async(np.empty(6000), src=1), bps.recv_async(np.empty(3), src=1)
        mark("waiting")
        assert np.all(WAYS[way](second) == 2)
        with pytest.raises(bps.MismatchError):
            first.wait()
    else:
        await_mark("go on")
        with pytest.raises(bps.MismatchError):
            bps.send(np.full(5000, 1.0), dst=0)
        bps.send(np.full(3, 2.0), dst=0)


@pytest.mark.parametrize("way", WAYS)
def test_who_waits_for_one_message_refuses_one_before_it(way):
    with harness.start(waits_for_the_second_one, way, workers=2, env=ENV) as job:
        job.await_marks("waiting", [0])
        if way != "done":  # which never sleeps for long
            job.await_call("rank 0")
        job.set_mark("go on")
        job.results()


@harness.on_ranks(workers=2, env=ENV, interrupts=True)
def test_nothing_is_written_after_an_interrupt(bps: Any) -> None:
    if bps.rank() == 0:
        first, given_up = bps.recv_async(np.empty(3), src=1), np.full(3, -1.0)
        harness.is_interrupted(lambda: bps.recv(given_up, src=1))
        assert np.all(first.wait() == 1)
        assert np.all(bps.recv(np.empty(3), src=1) == 3)
        assert np.all(given_up == -1), "the memory is the caller's again"
    else:
        await_mark("interrupted", 0)
        for number in (1.0, 2.0, 3.0):
            bps.send(np.full(3, number), dst=0)
