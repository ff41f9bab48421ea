# SPDX-License-Identifier: Apache-2.0
"""A signal handler raises an ordinary exception while a handle of several steps is waited for, as a time limit does.

It is for the caller, at once, and is no result: the operation goes on, and the handle gives its result later.
"""

import signal
from collections.abc import Callable
from typing import Any

import harness
import numpy as np
import pytest
from harness import await_mark, mark

Started = tuple[Any, Callable[[], Any]]  # a handle, and what has to be true once it has been waited for


class LimitError(Exception):
    """What the handler raises."""


def raise_limit(*_: object) -> None:
    raise LimitError


def wait_within(handle: Any, seconds: float) -> None:
    """Waits until the handler raises something."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    handle.wait()


def message(bps: Any, count: int, value: float) -> Started:
    if bps.rank() == 1:
        return bps.send_async(np.full(count, value), dst=0), lambda: True
    array = np.full(count, -1.0)
    return bps.recv_async(array, src=1), lambda: np.all(array == value)


def exchange(bps: Any, count: int, value: float) -> Started:
    array = np.empty(2 * count)
    given = np.full(2 * count, value + bps.rank())
    return bps.all_to_all_async(given, out=array), lambda: np.array_equal(array, np.repeat([value, value + 1], count))


def sums(bps: Any, count: int, value: float) -> Started:
    arrays = [np.full(count, value + number) for number in range(3)]
    handle = bps.push_pull_many_async(arrays, "many", inplace=True, average=False)
    return handle, lambda: all(np.all(array == 2 * (value + number)) for number, array in enumerate(arrays))


def gather(bps: Any, count: int, value: float) -> Started:
    array = np.empty(3 * count)
    handle = bps.all_gather_async(np.full(count * (1 + bps.rank()), value + bps.rank()), "u", uneven=True, out=array)
    return handle, lambda: np.array_equal(array, np.repeat([value, value + 1], [count, 2 * count]))


@pytest.mark.parametrize("count", [3, 5000])
@pytest.mark.parametrize("start", [message, exchange, sums, gather])
@harness.on_ranks(workers=2, env={"BPS_TIMEOUT": str(20 * harness.PATIENCE)})
def test_what_a_signal_handler_raises_is_no_result(bps: Any, start: Any, count: int) -> None:
    signal.signal(signal.SIGALRM, raise_limit)
    for value in (10.0, 20.0, 30.0):
        if bps.rank() == 1:
            await_mark(f"interrupted {value}", 0)
        handle, is_right = start(bps, count, value)
        if bps.rank() == 0:
            with pytest.raises(LimitError):
                wait_within(handle, 0.1)
            assert not handle.done()
            mark(f"interrupted {value}")
        handle.wait()
        assert is_right(), value
        other, is_right = exchange(bps, count, value + 1)
        other.wait()
        assert is_right(), "memory of the first one was used for another"
