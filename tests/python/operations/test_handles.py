# SPDX-License-Identifier: Apache-2.0
"""Handles: polling, waiting, awaiting, forgetting; the GIL while waiting; many threads at once."""

import asyncio
import contextlib
import functools
import gc
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
from harness import await_mark, in_threads, mark
from reference.values import pushed, summed

import bps_rdma


@harness.on_ranks(workers=2)
def test_poll_and_synchronize(bps: Any) -> None:
    array = np.full(1000, bps.rank() + 1.0)
    if bps.rank() == 1:
        await_mark("pending", 0)
    handle = bps.push_pull_async_inplace(array, average=False, name="x")
    assert isinstance(handle, bps.Handle)
    if bps.rank() == 0:
        assert bps.poll(handle) is False
        assert "pending" in repr(handle)
        assert "'x'" in repr(handle)
        mark("pending")
    assert harness.eventually(lambda: bps.poll(handle)) is True
    assert handle.done()
    assert "done" in repr(handle)
    assert bps.synchronize(handle) is array
    assert array[0] == 3
    assert "taken" in repr(handle)
    for call in (bps.poll, bps.synchronize, lambda h: h.wait(), lambda h: bps.wait([h])):
        with pytest.raises(bps.UnknownHandleError) as caught:
            call(handle)
        assert caught.value.hint


@harness.on_ranks(workers=2)
def test_wait_for_several(bps: Any) -> None:
    rank, size = bps.rank(), bps.size()
    handles = [bps.push_pull_async(pushed(99, "int32", rank, 0, i), False, f"n{i}") for i in range(50)]
    order = list(range(50))[:: 1 if rank else -1]
    for i, result in zip(order, bps.wait(handles[i] for i in order), strict=True):
        assert np.array_equal(result, summed(99, "int32", range(size), 0, i))
    assert bps.wait([]) == []

    # One that fails does not keep the others from being waited for.
    good = bps.push_pull_async(np.ones(3), False, "good")
    taken = bps.push_pull_async(np.ones(3), False, "taken")
    bps.synchronize(taken)
    with pytest.raises(bps.UnknownHandleError):
        bps.wait([taken, good])
    with pytest.raises(bps.UnknownHandleError):
        bps.synchronize(good)  # wait() took it
    good = bps.push_pull_async(np.ones(3), False, "good")
    with pytest.raises(bps.UnknownHandleError, match="no handle"):
        bps.wait(["no handle", good])
    with pytest.raises(bps.UnknownHandleError):
        bps.synchronize(good)


@pytest.mark.parametrize("what", [7, None, "handle", object(), np.ones(3)])
def test_what_is_no_handle(alone, what):
    for call in (alone.poll, alone.synchronize, lambda one: alone.wait([one])):
        with pytest.raises(alone.UnknownHandleError) as caught:
            call(what)
        assert caught.value.hint
        assert isinstance(caught.value, KeyError)


@harness.on_ranks("transport", workers=2)
def test_await_and_gather(bps: Any) -> None:
    rank, size = bps.rank(), bps.size()

    async def one(index: int) -> None:
        await asyncio.sleep(0.001 * ((index * 7 + rank * 3) % 5))
        result = await bps.push_pull_async(pushed(500, "int32", rank, 0, index), False, f"n{index}")
        assert np.array_equal(result, summed(500, "int32", range(size), 0, index))

    async def main() -> None:
        await asyncio.gather(*(one(index) for index in range(300)))
        # Over before it is awaited.
        handle = bps.push_pull_async(np.ones(3), False, "early")
        while not handle.done():
            await asyncio.sleep(0.001)
        assert (await handle).tolist() == [size] * 3
        with pytest.raises(bps.UnknownHandleError):
            await handle
        # The loop runs on while one task waits.
        if rank == 1:
            await_mark("ticked", 0)
        waiting = asyncio.ensure_future(late())
        for _ in range(10 if rank == 0 else 0):
            await asyncio.sleep(0.005)
        mark("ticked")
        await waiting

    async def late() -> None:
        await bps.push_pull_async(np.ones(3), False, "late")

    asyncio.run(main())


@harness.on_ranks(workers=2)
def test_two_tasks_that_await_one_handle_both_go_on(bps: Any) -> None:
    if bps.rank() == 1:
        bps.barrier()
    handle = bps.push_pull_async(np.ones(3), average=False, name="x")

    async def one() -> Any:
        return await handle

    async def main() -> list[Any]:
        tasks = [asyncio.ensure_future(one()) for _ in range(2)]
        await asyncio.sleep(0)  # both wait
        if bps.rank() == 0:
            bps.barrier()
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)

    results = asyncio.run(main())
    refused = [found for found in results if isinstance(found, bps.UnknownHandleError)]
    taken = [found.tolist() for found in results if isinstance(found, np.ndarray)]
    assert (len(refused), taken) == (1, [[2] * 3])


@harness.on_ranks(workers=2, env={"BPS_SHUTDOWN_TIMEOUT": "2"}, kills="rank 1", at="ready")
def test_await_raises(bps: Any) -> None:
    if bps.rank() == 1:
        mark("ready")
        await_mark("never")

    async def main() -> None:
        handle = bps.push_pull_async(np.ones(3), False, "x")
        mark("ready")
        with pytest.raises(bps.PeerLostError, match="worker 1"):
            await handle

    asyncio.run(main())
    bps.shutdown()


@pytest.mark.parametrize("how", ["synchronize", "barrier", "declare and pull", "new_group"])
@harness.on_ranks(workers=2)
def test_waiting_leaves_the_gil_to_others(bps: Any, how: str) -> None:
    """A thread counts while another one waits. If that had the GIL, nobody would ever end the wait."""
    if bps.rank() == 1:
        await_mark("counted", 0)

    def count() -> None:
        for _ in range(2_000_000):  # much longer than a thread waits for the GIL before it calls
            pass
        mark("counted")

    array = np.ones(10)
    if bps.rank() == 0:
        threading.Thread(target=count).start()
    if how == "barrier":
        bps.barrier()
    elif how == "synchronize":
        bps.synchronize(bps.push_pull_async_inplace(array, False, "x"))
    elif how == "declare and pull":
        bps.push(array, "x", False)
        bps.pull(array, "x", False)
    else:
        bps.new_group([0, 1], "g")


@harness.on_ranks(workers=2, interrupts=True)
def test_ctrl_c_interrupts_a_wait(bps: Any) -> None:
    """The other rank has not come before."""
    if bps.rank() == 1:
        await_mark("interrupted", 0)
        bps.push_pull(np.ones(3), name="x")
        return
    handle = bps.push_pull_async(np.ones(3), name="x")
    harness.is_interrupted(lambda: bps.synchronize(handle))
    assert bps.synchronize(handle).tolist() == [1] * 3, "the handle is still good"


@harness.on_ranks("transport", workers=2)
def test_dropping_a_handle_keeps_the_memory_safe(bps: Any) -> None:
    """Handles and arrays are dropped while the operation runs; new arrays then take freed memory."""
    rank, size = bps.rank(), bps.size()
    for round_ in range(100 if os.environ.get("BPS_TEST_ALL") else 40):
        make = bps.empty if round_ % 2 else np.empty
        for index in range(5):
            array = make(50_000, "int32")
            array[...] = pushed(50_000, "int32", rank, round_, index)
            bps.push_pull_async_inplace(array, False, f"forgotten {index}")  # nobody keeps array or handle
            del array
        canaries = [np.full(50_000, 77, np.int32) for _ in range(5)]
        gc.collect()
        kept = bps.push_pull(pushed(1000, "int32", rank, round_), False, "kept")
        assert np.array_equal(kept, summed(1000, "int32", range(size), round_))
        for canary in canaries:
            assert np.all(canary == 77), "an operation wrote into memory that had been freed"
    bps.barrier()


@harness.on_ranks(workers=2)
def test_finished_arrays_are_released(bps: Any) -> None:
    """What is over is not kept: neither by the handle that was waited for, nor for ever when it was dropped."""
    array = np.ones(1000)
    before = sys.getrefcount(array)
    bps.push_pull_inplace(array, name="x")
    for _ in range(3):
        bps.push_pull_async_inplace(array, name="x")
    bps.barrier()
    for _ in range(20):  # as many on each rank
        time.sleep(0.01)
        bps.push_pull(np.ones(2), name="y")  # a later operation releases the earlier ones
    assert sys.getrefcount(array) == before


def eventfds() -> int:
    found = 0
    for fd in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(FileNotFoundError):  # the one of the list is closed
            found += "eventfd" in str(fd.readlink())
    return found


@harness.on_ranks(workers=2)
def test_a_dropped_handle_takes_no_descriptor(bps: Any) -> None:
    """Not until its loop looks for operations that are over, either: thousands may be so at once."""
    count = 200
    bps.declare_many({f"x{number}": ((3,), "float64") for number in range(count)})
    before = eventfds()
    arrays = [np.ones(3) for _ in range(count)]
    handles = [bps.push_pull_async_inplace(array, name=f"x{number}") for number, array in enumerate(arrays)]
    assert len({handle.completion_fd() for handle in handles}) == count
    for handle in handles:
        handle.wait()
    handles.clear()
    del handle
    assert eventfds() < before + 20, "but for the last ones, with which the loop may be busy"
    bps.barrier()


@pytest.mark.parametrize(("servers", "transport"), [(None, "shm"), (None, "tcp"), (2, "tcp")])
@harness.on_ranks("servers", "transport", workers=2)
def test_many_threads_start_operations_at_once(bps: Any) -> None:
    rank, size = bps.rank(), bps.size()
    sys.setswitchinterval(1e-5)  # threads take turns in the middle of everything

    def work(thread: int) -> None:
        for round_ in range(100):
            handles = []
            for index in range(4):
                values = pushed(200 + index, "int64", rank, round_, thread)
                handles.append(bps.push_pull_async(values, False, f"{thread} {index}"))
            for index, result in enumerate(bps.wait(handles)):
                assert np.array_equal(result, summed(200 + index, "int64", range(size), round_, thread))

    in_threads(*(functools.partial(work, thread) for thread in range(8)))


@harness.on_ranks(workers=2, env={"BPS_SHUTDOWN_TIMEOUT": "60"})
def test_a_handle_that_outlives_the_job_ends(bps: Any) -> None:
    bps.push_pull(np.ones(3), name="warm")
    handle = bps.push_pull_async(np.ones(3), name=f"only here {bps.rank()}")
    bps.barrier()  # whoever starts an operation with a rank that has left is refused
    bps.shutdown()
    begin = time.monotonic()
    with pytest.raises((bps.NotInitializedError, bps.PeerLostError)) as raised:
        handle.wait()
    assert raised.value.hint
    assert time.monotonic() - begin < 20 * harness.PATIENCE


def test_handles_in_a_world_of_one(alone):
    handles = [alone.push_pull_async(np.full(10, i), f"n{i}", average=False) for i in range(1000)]
    assert [int(result[0]) for result in alone.wait(handles)] == list(range(1000))
    assert isinstance(handles[0], bps_rdma.Handle)


@harness.on_ranks(workers=2)
def test_several_threads_wait_for_one_handle(bps: Any) -> None:
    """Several threads wait for each handle: one gets the result, the others are told that it has been taken."""
    for number in range(100):
        handle = bps.push_pull_async(np.ones(100), average=False, name="shared")
        outcomes: list[Any] = []
        start = threading.Barrier(3)

        def wait(handle: Any = handle, outcomes: list[Any] = outcomes, start: threading.Barrier = start) -> None:
            start.wait(60)
            try:
                outcomes.append(handle.wait())
            except bps.UnknownHandleError as error:
                outcomes.append(error)

        threads = [threading.Thread(target=wait) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        results = [one for one in outcomes if isinstance(one, np.ndarray)]
        assert len(outcomes) == 3, f"round {number}: a thread did not come back"
        assert len(results) == 1
        assert (results[0] == bps.size()).all()
