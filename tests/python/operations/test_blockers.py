# SPDX-License-Identifier: Apache-2.0
"""Threads that go on with operations: their descriptors stay open, whatever other threads drop meanwhile."""

import gc
import os
import threading
from typing import Any

import harness
import pytest

from bps_rdma.blockers import Blockers
from bps_rdma.handle import PythonHandle
from bps_rdma.operations.progress import Progress


class Step:
    """Owns a descriptor, as an operation of the core does."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0)

    def __del__(self) -> None:
        os.close(self.fd)

    def completion_fd(self) -> int:
        return self.fd


class Several(PythonHandle[None]):
    """An operation of several steps, of which another thread drops each one as soon as it is known."""

    def __init__(self) -> None:
        self.asked = threading.Semaphore(0)

    def wait(self) -> None:
        pass

    def done(self) -> bool:
        self.asked.release()
        return False

    def blocker(self) -> Step:
        return Step()

    def completion_fd(self) -> int:
        return self.blocker().completion_fd()


@harness.on_ranks(workers=1)
def test_a_thread_survives_that_others_drop_what_it_waits_for(bps: Any) -> None:
    progress = Progress()
    for _ in range(3):  # once it asks about the next one, it has survived the closed descriptor of the one before
        one = Several()
        progress.add(one)
        assert one.asked.acquire(timeout=60)
    progress.close()


@pytest.fixture
def wake():
    fd = os.eventfd(0)
    yield fd
    os.close(fd)


def test_all_that_wait_for_one_descriptor_are_found(wake):
    blockers: Blockers[str] = Blockers(wake)
    step = Step()
    blockers.add(step, "one")
    blockers.add(step, "other")
    os.eventfd_write(step.fd, 1)
    assert blockers.wait() == ["one", "other"]
    assert not blockers
    blockers.close()


def test_a_number_that_is_used_again_is_another_descriptor(wake):
    blockers: Blockers[str] = Blockers(wake)
    for name in ("one", "other"):
        blockers.add(Step(), name)  # which nobody else keeps
        gc.collect()
    os.eventfd_write(wake, 1)
    assert blockers.wait() == []
    assert bool(blockers)
    blockers.close()
    assert not blockers
