# SPDX-License-Identifier: Apache-2.0
"""send and recv, gather, scatter, all_to_all, gathering parts that differ, and many arrays at once; against numpy."""

import asyncio
import functools
import time
from collections.abc import Callable
from typing import Any

import harness
import numpy as np
import pytest
from bodies.messages import (
    around,
    exchanges,
    from_any,
    gathers_and_scatters,
    in_groups,
    many_arrays,
    many_under_way,
    uneven,
)
from bodies.views import FAST
from harness import await_mark, mark

SMALL_PARTITIONS = harness.cut_at(8192)
TOPOLOGIES = [
    (2, None, {"BPS_TRANSPORT": "shm"}),
    (3, None, {"BPS_TRANSPORT": "tcp"}),
    (4, 2, {"BPS_TRANSPORT": "shm", "BPS_SHM_CMA": "0"}),
    (3, 1, {"BPS_TRANSPORT": "tcp", "BYTEPS_PUSH_THREAD": "2", "BYTEPS_SERVER_ENGINE_THREAD": "2"}),
]
everywhere = pytest.mark.parametrize(("workers", "servers", "env"), TOPOLOGIES)


@everywhere
@pytest.mark.parametrize("memory", ["plain", "empty"])
def test_send_and_receive(workers, servers, env, memory):
    harness.run(around, memory, workers=workers, servers=servers, env=SMALL_PARTITIONS | env)


@everywhere
@pytest.mark.parametrize("body", [many_under_way, from_any, gathers_and_scatters, exchanges, uneven, many_arrays])
def test_against_numpy(body, workers, servers, env):
    harness.run(body, workers=workers, servers=servers, env=SMALL_PARTITIONS | env)


def test_in_groups(transport):
    harness.run(in_groups, workers=4, env={"BPS_TRANSPORT": transport})


@pytest.mark.parametrize("body", [uneven, from_any])
def test_between_ranks_of_several_hosts(body):
    """Ranks of one host contribute together there, but not to a message."""
    harness.run(body, servers=2, env=SMALL_PARTITIONS, **harness.on_hosts("aab"))


# ---- What a message costs, and whom it concerns


def only_two(bps: Any, count: int) -> dict[str, int]:
    """Rank 0 sends to rank 1; rank 2 takes part in nothing."""
    if bps.rank() == 2:
        await_mark("over", 0, 1)
        return dict.fromkeys(bps.metrics()["total"], 0)
    array = np.zeros(count)
    found = {}
    for _ in range(2):  # the first message makes the lane
        before = bps.metrics()["total"]
        bps.send(array, dst=1) if bps.rank() == 0 else bps.recv(array, src=0)
        found = {name: value - before[name] for name, value in bps.metrics()["total"].items()}
    mark("over")
    return found


@pytest.mark.parametrize(("count", "partitions"), [(10, 2), (4000, 3)])
def test_a_message_is_one_push_and_one_pull(count, partitions):
    """A small one is an all_gather of two partitions; a larger one has another partition. Nobody else is needed."""
    found = harness.run(only_two, count, workers=3, servers=1, env={"BPS_TRANSPORT": "tcp"})
    assert [one["partitions"] for one in found] == [partitions, partitions, 0]


# ---- Ranks that disagree


def disagreeing(bps: Any, sent: tuple[int, str], expected: tuple[int, str], asynchronous: bool) -> str:
    """What comes of one message that does not fit, between others that do."""
    rank = bps.rank()
    how: dict[str, Any] = {"name": "w"}
    for _ in range(2):
        bps.send(np.ones(5000), dst=1, **how) if rank == 0 else bps.recv(np.empty(5000), src=0, **how)
    array = np.zeros(*(sent if rank == 0 else expected))

    def call() -> None:
        if asynchronous:
            handle = bps.send_async(array, dst=1, **how) if rank == 0 else bps.recv_async(array, src=0, **how)
            asyncio.run(awaited(handle))
        else:
            bps.send(array, dst=1, **how) if rank == 0 else bps.recv(array, src=0, **how)

    with pytest.raises(bps.MismatchError) as error:
        call()
    for count in (5000, sent[0], expected[0]):
        values = np.full(count, 3.0)
        if rank == 0:
            bps.send(values, dst=1, **how)
        else:
            assert np.array_equal(bps.recv(np.empty(count), src=0, **how), values)
    assert rank == 0 or not array.any() or sent[1] != expected[1], "what does not fit changes nothing"
    return str(error.value)


async def awaited(handle: Any) -> None:
    await handle


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ((3, "float64"), (4, "float64")),
        ((3, "float32"), (3, "int32")),
        ((3, "float64"), (6000, "float64")),
        ((6000, "float64"), (3, "float64")),
        ((6000, "float64"), (7000, "float64")),
        ((6000, "float64"), (6000, "int64")),
    ],
)
def test_both_ranks_are_told_what_does_not_fit(sent, expected, asynchronous, transport):
    env = SMALL_PARTITIONS | {"BPS_TRANSPORT": transport}
    found = harness.run(disagreeing, sent, expected, asynchronous, workers=2, env=env)
    for text in found:
        assert f"send 0->1 'w': rank 0 sends {sent[0]} elements of {sent[1]}" in text
        assert f"rank 1 expects {expected[0]} elements of {expected[1]}" in text


def followed(bps: Any, sizes: list[tuple[int, int]], backwards: tuple[bool, bool]) -> list[str]:
    """What comes of messages that are started together, some of which do not fit: (sent, expected) elements of each."""
    rank = bps.rank()
    handles = []
    for number, size in enumerate(sizes):
        array = np.full(size[rank], -1.0 if rank else float(number))
        handles.append(bps.send_async(array, "w", dst=1) if rank == 0 else bps.recv_async(array, "w", src=0))
    found = [""] * len(sizes)
    for number, handle in sorted(enumerate(handles), reverse=backwards[rank]):
        try:
            array = handle.wait()
            assert np.all(array == number), f"message {number} has the numbers of message {array[0]:g}"
            found[number] = "came"
        except bps.MismatchError:
            found[number] = "mismatch"
    for number in range(4):
        for size in sorted({size for pair in sizes for size in pair}):
            if rank == 0:
                bps.send(np.full(size, 10.0 + number), "w", dst=1)
            else:
                assert np.all(bps.recv(np.empty(size), "w", src=0) == 10.0 + number), "lanes are in order again"
    return found


@pytest.mark.parametrize("backwards", [(False, False), (True, True), (False, True)])
@pytest.mark.parametrize(
    "sizes",
    [
        [(5000, 6000), (7000, 8000)],
        [(5000, 6000), (5000, 5000), (6000, 6000)],
        [(5000, 6000), (6000, 5000), (5000, 5000), (3, 3)],
        [(5000, 3), (5000, 5000), (5000, 5000)],
        [(3, 5000), (5000, 5000), (7, 7)],
    ],
)
def test_messages_behind_one_that_does_not_fit_are_not_mixed_up(sizes, backwards, transport):
    first, second = harness.run(followed, sizes, backwards, workers=2, env={"BPS_TRANSPORT": transport})
    assert first == second
    for (sent, expected), outcome in zip(sizes, first, strict=True):
        assert outcome == "mismatch" or sent == expected
        assert outcome == "came" or max(sent, expected) > 100, "small messages are matched by their notices alone"


@harness.on_ranks(workers=2)
def test_ranks_that_name_other_roots_or_sizes(bps: Any) -> None:
    with pytest.raises(bps.MismatchError) as error:
        bps.gather(np.ones(3), root=bps.rank())
    with pytest.raises(bps.MismatchError):
        bps.all_to_all(np.ones(2 * (bps.rank() + 1)))
    with pytest.raises(bps.MismatchError, match=r"rank \d has float64 rows of shape"):
        bps.all_gather(np.ones((2, bps.rank() + 1)), uneven=True)
    text = str(error.value)
    assert "gather 0~1: rank" in text
    assert "nothing" in text


@harness.on_ranks(workers=2)
def test_wrong_arguments_are_refused_before_anything_is_sent(bps: Any) -> None:
    rank = bps.rank()
    array = np.ones(4)
    for call in (
        lambda: bps.send(array, dst=rank),
        lambda: bps.send(array, dst=9),
        lambda: bps.send(array, dst="1"),
        lambda: bps.recv(array, src=rank),
        lambda: bps.send(array, 5, dst=1 - rank),
        lambda: bps.send(array, dst=1 - rank, tag="1"),
        lambda: bps.recv(array, src=1 - rank, timeout="1"),
        lambda: bps.gather(array, root=7),
        lambda: bps.scatter(np.ones(5), root=rank, out=array),
        lambda: bps.scatter(np.ones(5), root=rank, sizes=[5], out=array),
        lambda: bps.all_to_all(np.ones(3)),
        lambda: bps.all_to_all(array, sizes=[1, 2]),
        lambda: bps.push_pull_many(array),
        lambda: bps.push_pull_many([array, np.ones((4, 4))[:, :2]]),
        lambda: bps.send(np.ones((4, 4))[:, :2], dst=1 - rank),
    ):
        with pytest.raises(bps.InvalidArgumentError):
            call()
    bps.send(array, dst=1) if rank == 0 else bps.recv(array, src=0)


# ---- Ranks that do not come, and that die


@pytest.mark.parametrize("count", [3, 5000])
@pytest.mark.parametrize("who", ["sender", "receiver"])
@harness.on_ranks("transport", workers=2)
def test_a_deadline_ends_a_message_on_both_ranks(bps: Any, count: int, who: str) -> None:
    """One rank's deadline passes; the other one, which comes later, fails at once, and both go on."""
    rank = bps.rank()
    array = np.zeros(count)

    def call(timeout: float | None) -> None:
        if rank == 0:
            bps.send(array, "w", dst=1, timeout=timeout)
        else:
            bps.recv(array, "w", src=0, timeout=timeout)

    if (rank == 0) == (who == "sender"):
        await_mark("gave up", 1 - rank)
        with pytest.raises(bps.DeadlineError) as error:
            call(None)
    else:
        with pytest.raises(bps.DeadlineError) as error:
            call(0.3)
        mark("gave up")
    array[...] = 5 + rank
    call(None)
    assert np.all(array == 5)
    assert "send 0->1 'w'" in str(error.value)


@harness.on_ranks(workers=3)
def test_nobody_sends_in_time(bps: Any) -> None:
    """Who takes from anybody has a deadline, too, and loses nothing by it."""
    got = np.zeros(3)
    if bps.rank() == 0:
        with pytest.raises(bps.DeadlineError, match="from any of the ranks 1, 2"):
            bps.recv_any(got, timeout=0.2)
        mark("gave up")
        assert sorted((bps.recv_any(got), bps.recv_any(got))) == [1, 2]
        with pytest.raises(bps.MismatchError, match="rank 1 sends 4 elements of float64, and rank 0 expects 3"):
            bps.recv_any(got, tag=1)
    else:
        await_mark("gave up", 0)
        bps.send(np.ones(3), dst=0)
        if bps.rank() == 1:
            bps.send(np.ones(4), dst=0, tag=1)
    bps.barrier()


CALLS: dict[str, Callable[[Any], Any]] = {
    "recv": lambda bps: bps.recv(np.empty(5000), src=1),
    "send": lambda bps: bps.send(np.empty(5000), dst=1),
    "all_to_all": lambda bps: bps.all_to_all(np.empty(6)),
    "uneven": lambda bps: bps.all_gather(np.empty((bps.rank(), 2)), uneven=True),
}


def left_behind(bps: Any, what: str) -> str:
    mark("ready")
    if bps.rank() == 1:
        await_mark("never")
    with pytest.raises(bps.PeerLostError) as error:
        CALLS[what](bps)
    return str(error.value)


@pytest.mark.parametrize("what", ["recv", "send", "all_to_all", "uneven"])
def test_who_waits_for_a_rank_that_dies_is_told(what):
    with harness.start(left_behind, what, workers=3 if what == "all_to_all" else 2) as job:
        job.await_marks("ready")
        job.await_call("rank 0")
        killed = job.kill("rank 1")
        for outcome in job.outcomes(but=[1]):
            if outcome.value is not None:
                assert "worker 1" in outcome.value
        assert time.monotonic() - killed < 20 * harness.PATIENCE


def one_leaves(bps: Any) -> int:
    """Who takes from anybody goes on when one of them has left."""
    got = np.zeros(3)
    if bps.rank() == 1:
        await_mark("taken", 0)
        return -1
    if bps.rank() == 2:
        bps.send(np.ones(3), dst=0)
        await_mark("gone", 0)
        bps.send(np.ones(3), dst=0)
        return -1
    assert bps.recv_any(got) == 2
    mark("taken")
    with pytest.raises(bps.PeerLostError):
        bps.recv(got, "nothing", src=1)
    mark("gone")
    return int(bps.recv_any(got))


def test_who_takes_from_anybody_goes_on_when_one_leaves():
    assert harness.run(one_leaves, workers=3)[0] == 2


@pytest.mark.parametrize("servers", [None, 1])
@harness.on_ranks("servers", "transport", workers=3, env=FAST | {"BPS_MIN_WORKERS": "2"}, kills="rank 1")
def test_messages_go_on_in_the_next_view(bps: Any) -> None:
    """Steps of messages in a ring, each of which is repeated where a member was lost; the sizes of the job."""
    steps = 50
    sizes = [bps.size()]
    step = 0
    while step < steps:
        rank, size = bps.rank(), bps.size()
        array = np.full(3000, 100.0 * step + rank)
        got = np.zeros(3000)
        try:
            sent = bps.send_async(array, "ring", dst=(rank + 1) % size)
            bps.recv(got, "ring", src=(rank - 1) % size)
            sent.wait()
            bps.commit()
        except bps.RoundAbortedError:
            step, sizes = 0, [*sizes, bps.size()]
            continue
        assert np.all(got == 100 * step + (rank - 1) % size)
        step += 1
        if step == 5:
            mark("running")
        if len(sizes) == 1:
            step = min(step, steps - 1)  # until a member is lost
    assert sizes == [3, 2]


@pytest.mark.parametrize("count", [3, 5000])
@harness.on_ranks(workers=2, interrupts=True)
def test_ctrl_c_interrupts_a_wait(bps: Any, count: int) -> None:
    """The other rank has not sent anything before."""
    array = np.full(count, float(bps.rank()))
    if bps.rank() == 1:
        await_mark("interrupted", 0)
        bps.send(array, dst=0)
        return
    handle = bps.recv_async(array, src=1)
    harness.is_interrupted(handle.wait)
    assert np.all(handle.wait() == 1), "the handle is still good"


@harness.on_ranks(workers=2)
def test_threads_send_at_the_same_time(bps: Any) -> None:
    """Each thread has messages of its own name; those of one name from several threads stay whole."""
    rank = bps.rank()

    def talk(name: str) -> None:
        for number in range(50):
            values = np.full(2000, float(number))
            if rank == 0:
                bps.send(values, name, dst=1)
            else:
                assert np.array_equal(bps.recv(np.empty(2000), name, src=0), values)

    harness.in_threads(*(functools.partial(talk, f"thread {number}") for number in range(4)))
