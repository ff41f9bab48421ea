# SPDX-License-Identifier: Apache-2.0
"""Several receivers of one rank: in threads, in a line, interrupted, dropped, and of messages that fail."""

import contextlib
import gc
import os
import resource
import signal
import threading
import weakref
from typing import Any
from unittest import mock

import harness
import numpy as np
import pytest
from harness import await_mark, in_threads, mark
from interrupts import interrupted

from bps_rdma.operations import point_to_point
from bps_rdma.operations.lanes import lanes_of, part_of
from bps_rdma.operations.messages import How, Message
from bps_rdma.operations.point_to_point import Subject
from bps_rdma.operations.receivers import ReceiveFromAny

ENV = {"BPS_TIMEOUT": str(60 * harness.PATIENCE)}  # those of thousands of receivers begin together
SIZES = pytest.mark.parametrize("count", [3, 5000])  # elements: in the notice, and as a broadcast


def recv_any_async(array: Any) -> ReceiveFromAny:
    """What the torch backend starts for irecv() from any rank."""
    return point_to_point.receive_from_any(part_of(array, True), Subject(), How())


@SIZES
@harness.on_ranks(workers=3, env=ENV)
def test_threads_that_receive_from_any_get_each_message_once(bps: Any, count: int) -> None:
    messages, threads = 200, 4
    if bps.rank() != 0:
        for number in range(messages):
            bps.send(np.full(count, float(number)), dst=0)
        bps.barrier()
        return
    found: list[tuple[int, int]] = []

    def receive() -> None:
        for _ in range(2 * messages // threads):
            array = np.full(count, -1.0)
            src = bps.recv_any(array)
            assert np.all(array == array[0])
            found.append((src, int(array[0])))

    in_threads(*[receive] * threads)
    assert sorted(found) == [(src, number) for src in (1, 2) for number in range(messages)]
    bps.barrier()


@SIZES
@harness.on_ranks(workers=2, env=ENV)
def test_a_message_that_is_given_back_wakes_the_next_one(bps: Any, count: int) -> None:
    """The next receiver waits for the message behind it by then."""
    if bps.rank() == 1:
        bps.send(np.zeros(count), dst=0)  # makes the lane
        await_mark("both wait", 0)
        bps.send(np.ones(count), dst=0)
        await_mark("over", 0)
        return
    bps.recv_any(np.zeros(count))
    main, interruptions = threading.get_ident(), []
    array = np.zeros(count)
    second = threading.Thread(target=lambda: bps.recv_any(array))
    deliver = ReceiveFromAny._deliver

    def interrupted_once(receiver: ReceiveFromAny, message: Any) -> None:
        if threading.get_ident() == main and not interruptions:
            interruptions.append(message)
            harness.eventually(lambda: harness.is_blocked(second.native_id or 0), what="the second one waits again")
            raise KeyboardInterrupt
        deliver(receiver, message)

    def let_the_message_come() -> None:
        harness.eventually(lambda: harness.is_blocked(os.getpid()), what="the first one waits")
        second.start()
        harness.eventually(lambda: harness.is_blocked(second.native_id or 0), what="the second one waits")
        mark("both wait")

    third = threading.Thread(target=let_the_message_come)
    with mock.patch.object(ReceiveFromAny, "_deliver", interrupted_once):
        third.start()
        with pytest.raises(KeyboardInterrupt):
            bps.recv_any(np.zeros(count))
        third.join()
        second.join(10 * harness.PATIENCE)
    assert not second.is_alive()
    assert np.all(array == 1)
    mark("over")


def polled(handle: Any) -> None:
    while not handle.done():
        pass


def waited_by_descriptor(handle: Any) -> None:
    handle.completion_fd()
    handle.wait()


@SIZES
@pytest.mark.parametrize("way", [ReceiveFromAny.wait, polled, waited_by_descriptor])
@harness.on_ranks(workers=2, env=ENV)
def test_a_handle_is_good_after_an_interrupt_at_each_point(bps: Any, way: Any, count: int) -> None:
    point, goes_on = 0, True
    while goes_on:
        if bps.rank() == 0:
            array = np.full(count, -1.0)
            handle = recv_any_async(array)
            go = bps.send_async(np.zeros(1), "go", dst=1)
            goes_on = interrupted(point, lambda: way(handle))  # noqa: B023  called at once
            assert handle.wait() == 1
            assert np.all(array == point)
            go.wait()
        else:
            bps.recv(np.zeros(1), "go", src=0)
            bps.send(np.full(count, float(point)), dst=0)
        goes_on = bool(bps.broadcast(np.array([goes_on]), "goes on")[0])
        point += 1
    assert point > 10


def send_until_the_deadline(bps: Any, count: int) -> None:
    with pytest.raises(bps.DeadlineError):
        bps.send(np.zeros(count), dst=0, timeout=0.1)


def send_until_an_interrupt(bps: Any, count: int) -> None:
    def interrupt() -> None:
        harness.eventually(lambda: harness.is_blocked(os.getpid()), what="the main thread waits")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        bps.send(np.zeros(count), dst=0)
    thread.join()


@SIZES
@pytest.mark.parametrize("fail", [send_until_the_deadline, send_until_an_interrupt])
@harness.on_ranks(workers=3, env=ENV)
def test_who_takes_any_is_told_of_a_message_that_failed(bps: Any, fail: Any, count: int) -> None:
    """Nothing else has to be sent before, and the next message of that rank comes."""
    if bps.rank() == 1:
        bps.send(np.zeros(count), dst=0)  # makes the lane, so that the main thread waits for its message alone
        fail(bps, count)
        fail(bps, count)
        mark("gave up")
        bps.send(np.ones(count), dst=0)
    elif bps.rank() == 0:
        array = np.zeros(count)
        bps.recv_any(array)
        await_mark("gave up", 1)
        for _ in range(2):
            with pytest.raises((bps.DeadlineError, bps.PeerLostError), match="notice"):
                bps.recv_any(array)
        assert bps.recv_any(array) == 1
        assert np.all(array == 1)
    bps.barrier()


@SIZES
@pytest.mark.parametrize("behind_any", [False, True])
@harness.on_ranks(workers=2, env=ENV)
def test_a_dropped_handle_keeps_its_place(bps: Any, behind_any: bool, count: int) -> None:
    """A receive that nobody waits for gets its message, whatever was received before it."""
    if bps.rank() == 0:
        first, second = np.zeros(count), np.zeros(count)
        if behind_any:
            with pytest.raises(bps.DeadlineError):
                bps.recv_any(np.zeros(count), timeout=0)
        mark("gave up")
        bps.recv_async(first, src=1)
        assert np.all(bps.recv_async(second, src=1).wait() == 2)
        harness.eventually(lambda: np.all(first == 1), what="the first message has come, too")
    else:
        await_mark("gave up", 0)
        for number in (1.0, 2.0):
            bps.send(np.full(count, number), dst=0)
    bps.barrier()


@SIZES
@harness.on_ranks(workers=2, env=ENV)
def test_thousands_of_receivers_need_no_descriptors(bps: Any, count: int) -> None:
    receivers = 1500
    if bps.rank() == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        arrays = [np.full(count, -1.0) for _ in range(receivers)]
        handles = [recv_any_async(array) for array in arrays]
        assert handles[-1].wait() == 1
        for number, (handle, array) in enumerate(zip(handles, arrays, strict=True)):
            assert handle.wait() == 1
            assert np.all(array == number)
    else:
        for number in range(receivers):
            bps.send(np.full(count, float(number)), dst=0)
    bps.barrier()


@SIZES
@pytest.mark.parametrize("way", ["send", "recv"])
@harness.on_ranks(workers=2, env=ENV)
def test_what_was_waited_for_is_let_go(bps: Any, way: str, count: int) -> None:
    """Also if no other message ever follows in that lane."""

    array = np.zeros(count)
    gone = weakref.ref(array)
    peer = 1 - bps.rank()
    if (way == "send") == (bps.rank() == 0):
        bps.send_async(array, dst=peer).wait()
    else:
        bps.recv_async(array, src=peer).wait()
    del array
    bps.barrier()
    assert gone() is None


@SIZES
@pytest.mark.parametrize("way", ["recv", "recv_any", "all_to_all"])
@harness.on_ranks(workers=2, env=ENV)
def test_calls_leave_no_cycle_behind(bps: Any, way: str, count: int) -> None:
    gc.disable()
    gone, sent, peer = [], np.zeros(count), 1 - bps.rank()
    for _ in range(3):
        array = np.zeros(count)
        gone.append(weakref.ref(array))
        if way == "all_to_all":
            bps.all_to_all(np.zeros(2 * count), out=np.zeros(2 * count), sizes=[count, count], out_sizes=[count, count])
        elif bps.rank() == 0:
            bps.send(sent, dst=peer)
        elif way == "recv":
            bps.recv(array, src=peer)
        else:
            bps.recv_any(array)
        del array
    found = [one for one in gc.get_objects() if isinstance(one, Message | ReceiveFromAny)]
    bps.barrier()
    assert [one() for one in gone] == [None] * 3
    most = {"recv": 1, "recv_any": 2, "all_to_all": 1}[way]  # the last one of a lane, and one that is expected
    assert len(found) <= most, found


@harness.on_ranks(workers=2, env=ENV)
def test_threads_share_the_lanes(bps: Any) -> None:
    from bps_rdma.job import current
    from bps_rdma.operations import lanes

    class Slow(lanes.Lanes):
        def __init__(self, job: Any) -> None:
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(1)
            super().__init__(job)

    both, found = threading.Barrier(2), []
    with mock.patch.object(lanes, "Lanes", Slow):
        in_threads(*[lambda: found.append(lanes_of(current()))] * 2)
    assert found[0] is found[1]
