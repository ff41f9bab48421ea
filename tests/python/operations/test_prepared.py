# SPDX-License-Identifier: Apache-2.0
"""Prepared operations: the results of the ordinary ones, bit for bit; their life, their errors, their memory."""

import asyncio
import contextlib
import gc
import signal
import threading
import time
from typing import Any

import harness
import numpy as np
import pytest
from bodies.children import in_child
from harness import await_mark, mark
from harness.freeze import frozen, thread_of
from reference.values import NUMPY_DTYPES, pushed, summed

import bps_rdma

ROUNDS = 5


def reduces(bps: Any, dtype: str, op: str | None) -> list[bytes]:
    """The results of calls of both kinds, which take turns on one name."""
    rank, count = bps.rank(), 1001
    array, out, plain = (np.empty(count, dtype) for _ in range(3))
    options = {"average": False, "op": op, "name": "x"}
    in_place = bps.prepare("push_pull", array, **options)
    beside = bps.prepare("push_pull", array, out=out, **options)
    found = []
    for round_ in range(ROUNDS):
        array[:] = plain[:] = pushed(count, dtype, rank, round_)
        assert beside() is out
        assert np.array_equal(array, plain)
        bps.push_pull_inplace(plain, **options)
        assert in_place() is array
        assert array.tobytes() == out.tobytes() == plain.tobytes()
        if op is None:
            assert np.array_equal(array, summed(count, dtype, range(bps.size()), round_))
        found.append(array.tobytes())
    return found


@pytest.mark.parametrize(("dtype", "op"), [(dtype, None) for dtype in NUMPY_DTYPES] + [("float32", "max")])
def test_reductions_are_those_of_the_ordinary_calls(transport, dtype, op):
    first, second, third = harness.run(reduces, dtype, op, workers=3, env=harness.over(transport))
    assert first == second == third


def moves(bps: Any) -> None:
    rank, size, count = bps.rank(), bps.size(), 1000
    begin, end = bps.shard_bounds(count, size, rank)
    whole, part = np.empty(count), np.empty(end - begin)
    gathered, copied = bps.empty(count, "float64"), np.empty(count)
    scatter = bps.prepare("reduce_scatter", whole, average=False, name="s", out=part)
    to_new = bps.prepare("reduce_scatter", whole, average=True, name="n")
    gather = bps.prepare("all_gather", part, name="g", out=gathered)
    own = bps.prepare("all_gather", gathered[begin:end], name="own", out=gathered)
    fresh = bps.prepare("all_gather", whole[:10], name="f")
    copy = bps.prepare("broadcast", copied, root=size - 1, name="b")
    for round_ in range(ROUNDS):
        whole[:] = pushed(count, "float64", rank, round_)
        total = summed(count, "float64", range(size), round_)
        assert scatter() is part
        assert np.array_equal(part, total[begin:end])
        assert np.array_equal(to_new(), total[begin:end] / size)
        assert gather() is gathered
        assert np.array_equal(gathered, total)
        gathered[begin:end] *= 2
        assert np.array_equal(own(), total * 2)
        rows = fresh()
        assert rows.shape == (10 * size,)
        assert np.array_equal(rows[10:20], pushed(count, "float64", 1, round_)[:10])
        copied[:] = whole
        assert copy() is copied
        assert np.array_equal(copied, pushed(count, "float64", size - 1, round_))


@pytest.mark.parametrize("loops", [1, 2])
@pytest.mark.parametrize("servers", [None, 2])
def test_operations_that_move(servers, loops):
    harness.run(moves, workers=2, servers=servers, env={"BPS_PUSH_THREAD": str(loops)})


async def awaited(operation: Any) -> Any:
    return await operation.start()


@harness.on_ranks(workers=2)
def test_start_and_wait(bps: Any) -> None:
    array = np.full(100, bps.rank() + 1.0)
    other = np.full(300_000, 1.0)
    operation = bps.prepare("push_pull", array, average=False, name="x")
    large = bps.prepare("push_pull", other, average=False, name="large")
    assert isinstance(operation, bps.PreparedOperation)
    assert "push_pull of 'x'" in repr(operation)
    assert operation.done()
    for call in (operation.wait, operation.completion_fd, lambda: bps.poll(operation), lambda: bps.wait([operation])):
        with pytest.raises(bps.UnknownHandleError) as caught:
            call()
        assert caught.value.hint
    if bps.rank() == 1:
        await_mark("pending", 0)
    assert operation.start() is operation
    for call in (operation, operation.start):
        with pytest.raises(bps.InvalidArgumentError, match="started already"):
            call()
    if bps.rank() == 0:
        assert not operation.done()
        assert not bps.poll(operation)
        mark("pending")
    assert operation.wait() is array
    assert array[0] == 3
    for expected in (6, 12, 24):  # a descriptor of an earlier round must not end the wait for a later one
        assert asyncio.run(awaited(operation)) is array
        assert array[0] == expected
    assert bps.wait([large.start(), operation.start()])[0] is other
    assert other[0] == 2
    assert bps.synchronize(operation.start()) is array


@harness.on_ranks(workers=2)
def test_a_later_job_has_operations_of_its_own(bps: Any) -> None:
    array = np.ones(10)
    operation = bps.prepare("push_pull", array, average=False, name="x")
    assert operation()[0] == 2
    bps.shutdown()
    with pytest.raises(bps.NotInitializedError) as caught:
        operation()
    assert "prepare" in caught.value.hint
    bps.init()
    with pytest.raises(bps.NotInitializedError):
        operation.start()
    assert array[0] == 2
    again = bps.prepare("push_pull", array, average=False, name="x")
    assert again()[0] == 4


@harness.on_ranks(workers=2)
def test_a_deadline_ends_one_start_only(bps: Any) -> None:
    array = np.ones(10)
    operation = bps.prepare("push_pull", array, average=False, name="x", timeout=2 * harness.PATIENCE)
    assert operation()[0] == 2
    missing = "rank 1" if bps.rank() == 0 else "rank 0 gave up"
    if bps.rank() == 1:
        await_mark("failed", 0)
    for call in (operation, lambda: operation.start().wait()):
        with pytest.raises(bps.DeadlineError, match=rf"push_pull of 'x', round \d: .*{missing}"):
            call()
    mark("failed")
    bps.barrier()
    for _ in range(3):
        array[:] = 1
        assert operation()[0] == 2


@harness.on_ranks(workers=2, servers=1, kills="rank 1", at="ready")
def test_a_lost_peer(bps: Any) -> None:
    array = np.ones(10)
    operation = bps.prepare("push_pull", array, average=False, name="x")
    assert operation()[0] == 2
    mark("ready")
    if bps.rank() == 1:
        threading.Event().wait()
    for _ in range(2):  # the second one before anything is sent
        with pytest.raises(bps.PeerLostError):
            operation()


def outlives_its_view(bps: Any) -> list[str]:
    """What a loop whose only call is a prepared operation hears of the loss of rank 2."""
    array, heard = np.ones(10, np.float32), list[str]()
    operation = bps.prepare("push_pull", array, name="x", average=False)
    operation()
    mark("running")
    while "sums" not in heard:
        try:
            array[:] = 1
            operation()
            if heard:
                heard.append("sums" if array[0] == 2 else str(array[0]))
        except bps.RoundAbortedError:
            heard.append("aborted")
        except bps.NotInitializedError as error:
            heard.append(error.hint)
            operation = bps.prepare("push_pull", array, name="x", average=False)
    return heard


@pytest.mark.parametrize("is_deaf", [False, True])
def test_the_call_after_the_end_of_a_view_goes_into_the_next(is_deaf):
    """A deaf rank hears of the loss from another rank before the scheduler can tell it."""
    env = {"BPS_MIN_WORKERS": "2", "BPS_HEARTBEAT_TIMEOUT": "20"}
    with harness.start(outlives_its_view, workers=3, env=env) as job, contextlib.ExitStack() as deaf:
        job.await_marks("running")
        if is_deaf:
            deaf.enter_context(frozen(thread_of(job.pid("rank 1"), "bps-van")))
        job.kill("rank 2")
        if is_deaf:
            time.sleep(1)  # for a second call that would go wrong
            deaf.close()
        assert job.values(but=[2])[:2] == [["aborted", "prepare it again", "sums"]] * 2


@harness.on_ranks(workers=2)
def test_an_interrupt_ends_the_call_for_all(bps: Any) -> None:
    array = np.ones(10)
    operation = bps.prepare("push_pull", array, average=False, name="x")
    assert operation()[0] == 2
    if bps.rank() == 0:

        def interrupt(*_: object) -> None:
            if not operation.done():  # that is, within the call
                signal.setitimer(signal.ITIMER_REAL, 0)
                raise KeyboardInterrupt

        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        with pytest.raises(KeyboardInterrupt):
            operation()
        assert operation.taken
        mark("interrupted")
    else:
        await_mark("interrupted", 0)
        with pytest.raises(bps.PeerLostError, match="interrupted"):
            operation()
    bps.barrier()
    array[:] = 1
    assert operation()[0] == 2


@harness.on_ranks(workers=2)
def test_one_thread_at_a_time(bps: Any) -> None:
    array = np.ones(10)
    operation = bps.prepare("push_pull", array, average=False, name="x")
    if bps.rank() == 1:
        await_mark("refused", 0)
        operation()
        return
    results: list[Any] = []
    caller = threading.Thread(target=lambda: results.append(operation()))
    caller.start()
    while operation.done():  # until the thread is in its call
        pass
    for call in (operation, operation.start):
        with pytest.raises(bps.InvalidArgumentError, match="started already"):
            call()
    with pytest.raises(bps.UnknownHandleError):
        operation.wait()
    mark("refused")
    caller.join()
    assert results[0] is array
    assert array[0] == 2


@harness.on_ranks(workers=2)
def test_memory(bps: Any) -> None:
    operation = bps.prepare("push_pull", np.ones(100_000), average=False, name="x")
    fresh = [np.full(100_000, 7.0) for _ in range(3)]  # where the array would lie if it were gone
    gc.collect()
    assert np.all(operation() == 2)
    assert all(np.all(one == 7) for one in fresh)

    array = np.ones(10)
    dropped = bps.prepare("push_pull", array, average=False, name="y")
    if bps.rank() == 1:
        await_mark("dropped", 0)
    dropped.start()
    del dropped
    gc.collect()
    mark("dropped")
    bps.barrier()
    bps.push_pull(np.ones(10), name="y")  # the next round: the one before is over
    assert array[0] == 2

    forgotten = bps.prepare("push_pull", array, average=False, name="z")
    assert forgotten()[0] == 4
    bps.forget(np.empty(3))
    assert forgotten()[0] == 8
    bps.forget(array)
    with pytest.raises(bps.InvalidArgumentError, match="forget"):
        forgotten()
    assert bps.prepare("push_pull", array, average=False, name="z")()[0] == 16


@harness.on_ranks(workers=2)
def test_a_forked_process_has_none(bps: Any) -> None:
    array = np.ones(10)
    operation = bps.prepare("push_pull", array, average=False, name="x")
    assert operation()[0] == 2

    def child() -> None:
        with pytest.raises(bps.NotInitializedError):
            operation()
        with pytest.raises(bps.NotInitializedError):
            operation.start()

    def waiting_child() -> None:
        with pytest.raises(bps.NotInitializedError):
            operation.wait()

    assert in_child(child) == 0
    assert operation()[0] == 4
    operation.start()
    assert in_child(waiting_child) == 0
    assert operation.wait()[0] == 8


@harness.on_ranks(workers=1)
def test_what_cannot_be_prepared(bps: Any) -> None:
    array = np.ones(10)
    for arguments, options, error in (
        (("all_to_all", array), {}, bps.InvalidArgumentError),
        (("push_pull", array), {"op": "median"}, bps.InvalidArgumentError),
        (("push_pull", np.ones(10, bool)), {}, bps.InvalidTensorError),
        (("push_pull", array), {"out": np.ones(9)}, bps.InvalidTensorError),
        (("push_pull", array[::2]), {}, bps.InvalidTensorError),
        (("reduce_scatter", array), {"out": np.ones(9)}, bps.InvalidTensorError),
        (("broadcast", array), {"root": 7}, bps.InvalidArgumentError),
        (("push_pull", array), {"timeout": -1.0}, bps.InvalidArgumentError),
    ):
        with pytest.raises(error) as caught:
            bps.prepare(*arguments, name="refused", **options)
        assert caught.value.hint


def test_without_a_job():
    with pytest.raises(bps_rdma.NotInitializedError):
        bps_rdma.prepare("push_pull", np.ones(3))


def runs_often(bps: Any) -> int:
    array = np.zeros(16)
    operation = bps.prepare("push_pull", array, average=False, name="x")
    for round_ in range(3000):
        array[:] = round_ + bps.rank()
        operation() if round_ % 7 else operation.start().wait()
        assert np.all(array == 2 * round_ + 1)
    return dict(bps.metrics()["total"])["operations"]


@pytest.mark.parametrize("loops", [1, 2])
def test_many_rounds(loops):
    assert harness.run(runs_often, workers=2, env={"BPS_PUSH_THREAD": str(loops)}) == [3000, 3000]


@harness.on_ranks(workers=2, env={"BPS_TIMEOUT": "20"})
def test_what_only_moves_numbers_meets_without_compression(bps: Any) -> None:
    """A prepared call and an ordinary one without names meet, whatever the prepared one says of compression."""
    rank = bps.rank()
    array = np.full(3, rank, np.float32)
    for kind in ("all_gather", "broadcast"):
        for compression in (bps.Int8(), None):
            prepared = bps.prepare(kind, array.copy(), compression=compression)
            found = prepared() if rank == 0 else getattr(bps, kind)(array.copy())
            assert np.array_equal(found, np.repeat([0, 1], 3) if kind == "all_gather" else np.zeros(3))
