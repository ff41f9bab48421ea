# SPDX-License-Identifier: Apache-2.0
"""A caller is interrupted while another thread takes its operation into the next view: its array is its own again."""

import signal
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import harness
import numpy as np
import pytest
from bodies.failover import COUNT, env
from harness import await_mark, mark


class SignalError(Exception):
    """What a signal handler raises."""


def one(bps: Any, array: np.ndarray[Any, Any]) -> None:
    bps.push_pull_inplace(array, name="x", average=False)


def several(bps: Any, array: np.ndarray[Any, Any]) -> None:
    bps.push_pull_many({"x": array}, "many", average=False, inplace=True)


CALLS: dict[str, Callable[[Any, Any], None]] = {"one": one, "several": several}
BEFORE, AFTER = "bps_rdma.views._next_view", "bps_rdma.failover.plan"  # this rank has told the others what it has


def interrupted(bps: Any, name: str, place: str) -> tuple[list[str], float]:
    """Rank 0 gets SignalError in its first thread, and then uses its array, while a second one goes into the next view.

    Returns:
        The names of what the threads raised, and the sum of the second one.
    """
    array, other = (np.full(COUNT, value + bps.rank(), np.float32) for value in (1, 5))
    CALLS[name](bps, array.copy())
    bps.push_pull_inplace(other.copy(), name="other", average=False)
    mark("summed")
    await_mark("stopped")
    raised = ["", ""]

    def work(number: int, call: Callable[[], None]) -> None:
        try:
            call()
        except (bps.BpsError, SignalError) as error:
            raised[number] = f"{type(error).__name__}: {error}"

    second = threading.Thread(
        target=work, args=(1, lambda: bps.push_pull_inplace(other, name="other", average=False)), daemon=True
    )
    if bps.rank() != 0:
        second.start()
        work(0, lambda: CALLS[name](bps, array))
        second.join()
        return raised, float(other[0])

    from bps_rdma import failover, presence, views

    owner, function = (views, "_next_view") if place == BEFORE else (failover, "plan")
    begin, step = presence.begin_change, getattr(owner, function)
    is_there, goes_on = threading.Event(), threading.Event()

    def begin_change(**how: Any) -> Any:
        if threading.current_thread() is second:
            return begin(**how)
        assert is_there.wait(harness.PATIENCE * 20)
        raise SignalError

    def slow(*what: Any) -> Any:
        is_there.set()
        assert goes_on.wait(harness.PATIENCE * 20)
        return step(*what)

    with mock.patch.object(presence, "begin_change", begin_change), mock.patch.object(owner, function, slow):
        second.start()
        work(0, lambda: CALLS[name](bps, array))
        array[:] = -7
        goes_on.set()
        second.join()
    assert (array == -7).all(), array
    if place == AFTER:
        with pytest.raises(bps.NotInitializedError, match="left the job: a thread was interrupted"):
            bps.rank()
    return raised, float(other[0])


@pytest.mark.parametrize("place", [BEFORE, AFTER])
@pytest.mark.parametrize("name", CALLS)
def test_who_is_interrupted_has_its_array_back(name: str, place: str) -> None:
    with harness.start(interrupted, name, place, workers=2, servers=2, env=env("tcp")) as job:
        job.await_marks("summed")
        job.kill("server 1", signal.SIGSTOP)
        job.set_mark("stopped")
        (own, total), (others, their_total) = job.values()
    assert own[0].startswith("SignalError")
    if place == BEFORE:  # the operation of the other thread goes on
        assert others[0].startswith("PeerLostError")
        assert "its caller was interrupted" in others[0]
        assert (own[1], others[1], total, their_total) == ("", "", 11, 11)
    else:  # the other rank counts on bytes that this one has no more
        assert "a thread was interrupted that waited" in own[1]
        assert others[0]
