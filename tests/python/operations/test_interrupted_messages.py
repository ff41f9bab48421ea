# SPDX-License-Identifier: Apache-2.0
"""Messages whose caller is interrupted, at every point at which Python lets signal handlers run.

Whatever has become of such a message: those behind it come, in their order and unmixed, and the memory is the caller's.
"""

import contextlib
import functools
import gc
import os
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import harness
import numpy as np
import pytest
from harness import await_mark, mark
from interrupts import interrupted

from bps_rdma.handle import PythonHandle, _outcomes
from bps_rdma.operations.begun import give_up
from bps_rdma.operations.messages import Message
from bps_rdma.operations.progress import Progress

pytestmark = pytest.mark.timeout(400)
ENV = {"BPS_TIMEOUT": str(20 * harness.PATIENCE)}
SIZES = [3, 5000]  # elements: in the notice, and as a broadcast
PATIENCE_S = 2 * harness.PATIENCE
LAST = 1000.0
# A landing takes the first and a third of the others, which the seed chooses.
SEED = int(os.environ.get("BPS_TEST_SEED", "1"))
POINTS = range(1000) if os.environ.get("BPS_TEST_ALL") else (0, *range(SEED % 3 or 3, 1000, 3))


def unless_interrupted(bps: Any, call: Callable[[], Any]) -> bool:
    """Whether the call succeeds; its other end may have been interrupted."""
    try:
        call()
    except bps.PeerLostError as error:
        if "interrupted" not in str(error):
            raise
        return False
    return True


def all_received(bps: Any, count: int, receive: Callable[[Any], Any]) -> list[float]:
    """What comes until the last one of this turn."""
    found: list[float] = []
    for _ in range(4):
        array = np.full(count, -1.0)
        if unless_interrupted(bps, lambda: receive(array)):  # noqa: B023  called at once
            assert np.all(array == array[0]), "two messages are mixed"
            found.append(array[0])
            if array[0] == LAST:
                return found
    raise AssertionError(f"the last one has not come: {found}")


def at_each_point(bps: Any, of_first: Callable[[int], bool], of_second: Callable[[int], Any], least: int = 10) -> None:
    """Calls both on their ranks until the first one says that it was not interrupted any more."""
    for point in POINTS:
        goes_on = of_first(point) if bps.rank() == 0 else bool(of_second(point))
        if not bps.broadcast(np.array([goes_on]), "goes on")[0]:
            assert point >= least
            return
    raise AssertionError("the call was interrupted at all points")


def started(start: Callable[[], Any], point: int) -> bool:
    """Whether the call that starts something was interrupted. It is waited for only where that gives a handle."""
    handles: list[Any] = []
    goes_on = interrupted(point, lambda: handles.append(start()))
    for handle in handles:
        handle.wait()
    return goes_on


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("way", ["recv", "recv_any", "recv_async"])
@harness.on_ranks(workers=2, env=ENV)
def test_who_receives_is_interrupted(bps: Any, way: str, count: int) -> None:
    """Where it only starts, nobody has the handle, and so the memory is the caller's again at once."""

    def receive(array: Any) -> Any:
        return bps.recv_any(array) if way == "recv_any" else bps.recv(array, src=1)

    def receives(point: int) -> bool:
        given_up = np.full(count, -1.0)
        if way == "recv_async":
            goes_on = started(lambda: bps.recv_async(given_up, src=1), point)
        else:
            goes_on = interrupted(point, lambda: receive(given_up))
        kept = given_up.copy()
        found = all_received(bps, count, receive)
        assert np.array_equal(given_up, kept), f"the memory was not the caller's again, at point {point}"
        assert found in ([LAST], [1.0, LAST]), (point, found)
        if way == "recv_any":
            assert found == [1.0, LAST] or np.all(kept == 1), f"the message was lost at point {point}"
        return goes_on

    def sends(_: int) -> None:
        for value in (1.0, LAST):
            unless_interrupted(bps, lambda: bps.send(np.full(count, value), dst=0))  # noqa: B023  called at once

    at_each_point(bps, receives, sends)


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("way", ["send", "send_async"])
@harness.on_ranks(workers=2, env=ENV)
def test_who_sends_is_interrupted(bps: Any, way: str, count: int) -> None:
    def sends(point: int) -> bool:
        given_up = np.full(count, 1.0)
        if way == "send_async":
            goes_on = started(lambda: bps.send_async(given_up, dst=1), point)
        else:
            goes_on = interrupted(point, lambda: bps.send(given_up, dst=1))
        given_up.fill(-7)
        bps.send(np.full(count, LAST), dst=1)
        return goes_on

    def receives(_: int) -> None:
        found = all_received(bps, count, lambda array: bps.recv(array, src=0))
        assert found in ([LAST], [1.0, LAST]), found

    at_each_point(bps, sends, receives)


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("way", ["all_to_all", "all_to_all_async"])
@harness.on_ranks(workers=2, env=ENV)
def test_who_exchanges_is_interrupted(bps: Any, way: str, count: int) -> None:
    def exchange(value: float, out: Any) -> Any:
        return bps.all_to_all(np.full(2 * count, value), out=out)

    def interrupted_exchange(point: int) -> bool:
        given_up = np.full(2 * count, -1.0)
        if way == "all_to_all":
            goes_on = interrupted(point, lambda: exchange(1.0, given_up))
        else:
            goes_on = started(lambda: bps.all_to_all_async(np.full(2 * count, 1.0), out=given_up), point)
        kept = given_up.copy()
        found = exchange(LAST, np.empty(2 * count))
        assert np.all(found[:count] == LAST)
        assert np.array_equal(given_up, kept), f"the memory was not the caller's again, at point {point}"
        return goes_on

    def exchanges(_: int) -> None:
        while True:
            out = np.full(2 * count, -1.0)
            if unless_interrupted(bps, lambda: exchange(5.0, out)):  # noqa: B023  called at once
                assert np.all(out[count:] == 5)
                assert np.all(out[:count] == out[0])
                if out[0] == LAST:
                    return

    at_each_point(bps, interrupted_exchange, exchanges)


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("way", ["recv_async", "all_to_all_async", "all_gather_async", "push_pull_many_async"])
@harness.on_ranks(workers=2, env=ENV)
def test_who_waits_for_a_handle_is_interrupted(bps: Any, way: str, count: int) -> None:
    """It is waited for once more, and gives its message."""

    def start(value: float) -> tuple[Any, Any]:
        array = np.full(2 * count, -1.0)
        if way == "all_to_all_async":
            return array, bps.all_to_all_async(np.full(2 * count, value), out=array)
        if way == "all_gather_async":
            own = np.full(count + 1 if bps.rank() == 1 else count - 1, value)
            return array, bps.all_gather_async(own, "parts", uneven=True, out=array)
        if way == "push_pull_many_async":
            array.fill(value if bps.rank() == 1 else 0)
            return array, bps.push_pull_many_async(np.split(array, 2), inplace=True, average=False)
        if bps.rank() == 0:
            return array, bps.recv_async(array, src=1)
        array.fill(value)
        return array, bps.send_async(array, dst=0)

    def waits(point: int) -> bool:
        with mock.patch.object(Progress, "add"):  # its thread would make the steps
            array, handle = start(float(point))
        goes_on = interrupted(point, handle.wait)
        if goes_on:
            handle.wait()
        assert np.all(array[count:] == point + 0.5)
        return goes_on

    def comes(point: int) -> None:
        start(point + 0.5)[1].wait()

    at_each_point(bps, waits, comes)


@harness.on_ranks(workers=2, env=ENV)
def test_who_waits_for_a_message_that_fails_is_interrupted(bps: Any) -> None:
    """The error comes when it is waited for once more, and no success without a message."""

    def waits(point: int) -> bool:
        await_mark(f"gave up {point}", 1)
        handle = bps.recv_async(np.full(5000, -1.0), src=1)
        error = functools.partial(pytest.raises, bps.PeerLostError, match="interrupted")

        def wait() -> None:
            with error():
                handle.wait()

        goes_on = interrupted(point, wait)
        with error():
            handle.wait()
        return goes_on

    def fails(point: int) -> None:
        handle = bps.send_async(np.ones(5000), dst=0)
        handle.give_up()  # its notice comes all the same
        mark(f"gave up {point}")
        with pytest.raises(bps.PeerLostError):
            handle.wait()

    at_each_point(bps, waits, fails)


FAIL: dict[str, Callable[..., Any]] = {
    "push_pull_async": lambda bps, array, name: bps.push_pull_async(array, name),
    "prepare": lambda bps, array, name: bps.prepare("push_pull", array, name=name).start(),
    "push_pull_many_async": lambda bps, array, name: bps.push_pull_many_async({name: array}),
    "all_gather_async": lambda bps, array, name: bps.all_gather_async(array, name, uneven=True),
}


@pytest.mark.parametrize("kind", FAIL)
@harness.on_ranks(workers=2, env=ENV)
def test_who_waits_for_a_collective_that_fails_is_interrupted(bps: Any, kind: str) -> None:
    """The error comes when it is waited for once more."""

    def waits(point: int) -> bool:
        await_mark(f"gave up {point}", 1)
        handle = FAIL[kind](bps, np.ones(5000), f"fails {point}")
        error = functools.partial(pytest.raises, bps.PeerLostError, match="interrupted")

        def wait() -> None:
            with error():
                handle.wait()

        goes_on = interrupted(point, wait)
        if goes_on:
            with error():
                handle.wait()
        return goes_on

    def fails(point: int) -> None:
        start = FAIL["push_pull_async" if kind == "prepare" else kind]  # what is prepared cannot be given up
        give_up([start(bps, np.ones(5000), f"fails {point}")])
        mark(f"gave up {point}")

    at_each_point(bps, waits, fails, least=1)


@pytest.mark.parametrize("fails", [True, False])
@harness.on_ranks(workers=2, env=ENV)
def test_who_waits_for_several_handles_is_interrupted(bps: Any, fails: bool) -> None:
    """The next wait gives all that they have given before, the error of one of them included."""

    def waits(point: int) -> bool:
        if fails:
            await_mark(f"gave up {point}", 1)
        handles = start(point)
        found = list[Any]()

        def wait() -> None:
            with pytest.raises(bps.PeerLostError, match="first") if fails else contextlib.nullcontext():
                found[:] = bps.wait(handles)

        goes_on = interrupted(point, wait)
        if goes_on:
            wait()
        assert [array[0] for array in found] == ([] if fails else [2, 2])
        with pytest.raises(bps.UnknownHandleError):
            bps.wait(handles)
        return goes_on

    def comes(point: int) -> None:
        handles = start(point)
        if fails:
            give_up(handles[:1])
            mark(f"gave up {point}")
        bps.wait(handles[fails:])

    def start(point: int) -> list[Any]:
        return [bps.push_pull_async(np.ones(5000), f"{name} {point}", average=False) for name in ("first", "last")]

    at_each_point(bps, waits, comes)


class Begun:
    """Something that is not over before it is given up."""

    is_over = False

    def done(self) -> bool:
        return self.is_over

    def give_up(self) -> None:
        self.is_over = True


def test_what_is_raised_before_anything_is_given_up() -> None:
    begun = [Begun() for _ in range(3)]
    together = mock.patch("bps_rdma.operations.begun._give_up_together", side_effect=TimeoutError)
    with together, pytest.raises(TimeoutError):
        give_up(list[Any](begun))
    assert all(one.is_over for one in begun)


def test_many_are_given_up_by_few_threads() -> None:
    begun, threads = [Begun() for _ in range(1000)], set[threading.Thread]()

    def give_up_one(one: Begun) -> None:
        threads.add(threading.current_thread())
        one.give_up()

    core = mock.Mock(Handle=Begun, give_up=give_up_one)
    with mock.patch("bps_rdma.operations.begun._core", core):
        give_up(list[Any](begun))
        for thread in threads - {threading.current_thread()}:
            thread.join()
    assert all(one.is_over for one in begun)
    assert len(threads) <= 65


class Raises(PythonHandle[None]):
    """Raises at once what a signal handler may raise while somebody waits."""

    def __init__(self, error: type[BaseException]) -> None:
        self._error = error

    def wait(self) -> None:
        raise self._error

    def done(self) -> bool:
        return True

    def blocker(self) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
@harness.on_ranks(workers=2, env=ENV)
def test_what_a_signal_handler_raises_is_no_result(bps: Any, error: type[BaseException]) -> None:
    """What wait() had been given is kept for the next one, as long as there is the handle."""
    if bps.rank() == 1:
        await_mark("over", 0)
        return
    pending = [bps.push_pull_async(np.ones(5000), name) for name in ("first", "last")]
    give_up(list(pending))
    with pytest.raises(error):
        bps.wait([*pending, Raises(error)])
    with pytest.raises(bps.PeerLostError):
        bps.wait(pending[:1])
    pending.clear()
    gc.collect()
    assert not _outcomes
    mark("over")


@pytest.mark.parametrize("count", SIZES)
@harness.on_ranks(workers=3, env=ENV)
def test_who_gives_up_is_interrupted_again(bps: Any, count: int) -> None:
    """That may take a while, and a user presses Ctrl-C once more: then all messages are given up nevertheless."""
    if bps.rank() != 0:
        await_mark("gave up", 0)
        for _ in range(2):
            unless_interrupted(bps, lambda: bps.all_to_all(np.full(3 * count, 5.0)))
        bps.barrier()
        return
    given_up, interrupts = np.full(3 * count, -1.0), []
    give_up = Message.give_up

    def give_up_and_be_interrupted(message: Message) -> None:
        give_up(message)
        if not interrupts:
            interrupts.append(message)
            raise KeyboardInterrupt

    with (
        mock.patch.object(Message, "wait", side_effect=KeyboardInterrupt),
        mock.patch.object(Message, "give_up", give_up_and_be_interrupted),
        pytest.raises(KeyboardInterrupt),
    ):
        bps.all_to_all(np.ones(3 * count), out=given_up)
    mark("gave up")
    kept = given_up.copy()
    unless_interrupted(bps, lambda: bps.all_to_all(np.ones(3 * count)))
    bps.barrier()
    assert np.array_equal(given_up, kept), "the memory was not the caller's again"


COLLECTIVES: dict[str, Callable[..., Any]] = {
    "push_pull_inplace": lambda call, array, **how: call(array, **how),
    "broadcast": lambda call, array, **how: call(array, root=1, **how),
    "all_gather": lambda call, array, **how: call(np.ones(len(array) // 2), out=array, **how),
    "reduce_scatter": lambda call, array, **how: call(np.ones(2 * len(array)), out=array, **how),
    "push_pull_many": lambda call, array, **how: call(np.split(array, 2), inplace=True, **how),
}


LONG = [pytest.param(kind, marks=pytest.mark.long) for kind in COLLECTIVES if "push_pull" not in kind]


@pytest.mark.parametrize("kind", ["push_pull_inplace", "push_pull_many", *LONG])
@harness.on_ranks(workers=2, env=ENV)
def test_who_takes_part_in_a_collective_is_interrupted(bps: Any, kind: str) -> None:
    """The other rank comes afterwards. So the last points are those before this one waits for it."""

    def takes_part(point: int) -> bool:
        given_up, deadline = np.full(5000, 3.0), time.monotonic() + PATIENCE_S
        start = functools.partial(COLLECTIVES[kind], getattr(bps, kind), given_up)
        with contextlib.suppress(bps.DeadlineError):
            interrupted(point, lambda: start(name=f"given up {point}", timeout=PATIENCE_S))
        goes_on = point < 30 or time.monotonic() < deadline  # those before it waits are more than 30
        kept = given_up.copy()
        bps.barrier()
        bps.barrier()
        assert np.array_equal(given_up, kept), f"the memory was not the caller's again, at point {point}"
        return goes_on

    def comes(point: int) -> None:
        bps.barrier()
        start = functools.partial(COLLECTIVES[kind], getattr(bps, kind))
        with contextlib.suppress(bps.PeerLostError, bps.DeadlineError):
            start(np.full(5000, 5.0), name=f"given up {point}", timeout=0.1)
        bps.barrier()

    at_each_point(bps, takes_part, comes)


STARTS: dict[str, Callable[..., Any]] = {
    "push_pull_async_inplace": lambda bps, array, **how: bps.push_pull_async_inplace(array, **how),
    "push_pull_many_async": lambda bps, array, **how: bps.push_pull_many_async(np.split(array, 2), inplace=True, **how),
    "all_gather_async": lambda bps, array, **how: bps.all_gather_async(
        np.ones(len(array) // 4 if bps.rank() else 3 * len(array) // 4), uneven=True, out=array, **how
    ),
}


@pytest.mark.parametrize("kind", STARTS)
@harness.on_ranks(workers=2, env=ENV)
def test_who_starts_a_collective_is_interrupted(bps: Any, kind: str) -> None:
    """Nobody has the handle, so nobody knows when the memory would be the caller's again: it is so at once."""

    def starts(point: int) -> bool:
        given_up, handles = np.full(5000, 3.0), []
        goes_on = interrupted(point, lambda: handles.append(STARTS[kind](bps, given_up, name=f"given up {point}")))
        give_up(handles)
        kept = given_up.copy()
        bps.barrier()
        bps.barrier()
        assert np.array_equal(given_up, kept), f"the memory was not the caller's again, at point {point}"
        return goes_on

    def comes(point: int) -> None:
        bps.barrier()
        with contextlib.suppress(bps.PeerLostError, bps.DeadlineError):
            STARTS[kind](bps, np.full(5000, 5.0), name=f"given up {point}", timeout=0.1).wait()
        bps.barrier()

    at_each_point(bps, starts, comes)


@harness.on_ranks(workers=2, env=ENV, interrupts=True)
def test_many_sums_are_given_up(bps: Any) -> None:
    arrays = [np.full(5000, float(number)) for number in range(3)]
    if bps.rank() == 0:
        harness.is_interrupted(lambda: bps.push_pull_many(arrays, "many", inplace=True))
        bps.barrier()
        bps.barrier()
        assert all(np.all(array == number) for number, array in enumerate(arrays)), "the arrays are the caller's again"
    else:
        bps.barrier()
        with contextlib.suppress(bps.PeerLostError, bps.DeadlineError):
            bps.push_pull_many([array + 10 for array in arrays], "many", timeout=0.3)
        bps.barrier()
