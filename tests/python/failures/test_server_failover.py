# SPDX-License-Identifier: Apache-2.0
"""A server is lost, and nobody notices: every operation completes with the right sum, without an exception."""

import functools
import gc
import signal
import weakref
from typing import Any

import harness
import numpy as np
import pytest
from bodies import views
from bodies.failover import COUNT, FAST, env, train
from harness import await_mark, mark

SHM_FIRST, TCP_FIRST = pytest.mark.long_over("tcp"), pytest.mark.long_over("shm")


def test_nothing_changes_while_nothing_is_lost(transport: str) -> None:
    results = harness.run(train, 10, workers=2, servers=2, env=env(transport))
    assert [result["size"] for result in results] == [2, 2]


def test_a_killed_server_costs_nothing(transport: str) -> None:
    results = harness.run(train, 60, workers=2, servers=2, env=env(transport), kills="server 1", at="step-20")
    assert [result["size"] for result in results] == [2, 2]


def test_a_server_is_killed_that_shares_memory_with_one_of_two_ranks() -> None:
    on_a = FAST | {"BPS_HOST_ID": "a", "BPS_PARTITION_BYTES": str(256 * 1024)}
    results = harness.run(train, 60, servers=2, env=on_a, **harness.on_hosts("ab"), kills="server 1", at="step-20")
    assert [result["size"] for result in results] == [2, 2]


def on_two_hosts(layout: str, **more: str) -> dict[str, Any]:
    options = harness.on_hosts(layout)
    return options | {"env": env("tcp") | {"BPS_TRANSPORT": "shm,tcp"} | more}


def train_on_hosts(bps: Any, steps: int) -> dict[str, Any]:
    return train(bps, steps) | {"host_sums": bps.metrics()["total"]["host_sums"]}


@pytest.mark.parametrize(
    "layout", ["aabb", *(pytest.param(layout, marks=pytest.mark.long) for layout in ("abab", "aaab"))]
)
def test_a_server_is_killed_while_the_ranks_of_hosts_sum_first(layout: str) -> None:
    with harness.start(train_on_hosts, 40, servers=3, **on_two_hosts(layout)) as job:
        for number, step in ((1, 10), (0, 20)):
            job.await_marks(f"step-{step}")
            job.kill(f"server {number}")
        results = job.values()
        assert [result["size"] for result in results] == [4, 4, 4, 4]
        assert sum(result["host_sums"] for result in results) > 0
        job.helper_statuses(but=["server 0", "server 1"])


@pytest.mark.long
@TCP_FIRST
def test_three_servers_are_killed_one_after_the_other(transport: str) -> None:
    with harness.start(train, 80, workers=3, servers=4, env=env(transport)) as job:
        for number, step in enumerate((10, 30, 50)):
            job.await_marks(f"step-{step}", ranks=[0])
            job.kill(f"server {number}")
        assert [result["size"] for result in job.values()] == [3, 3, 3]
        job.helper_statuses(but=["server 0", "server 1", "server 2"])


@SHM_FIRST
def test_two_servers_are_killed_at_once(transport: str) -> None:
    with harness.start(train, 50, workers=3, servers=3, env=env(transport)) as job:
        job.await_marks("step-20")
        job.kill("server 2")
        job.kill("server 0")
        assert [result["size"] for result in job.values()] == [3, 3, 3]
        job.helper_statuses(but=["server 0", "server 2"])


@TCP_FIRST
@harness.on_ranks("transport", workers=2, servers=1, env=env, kills="server 0")
def test_the_last_server_is_missed(bps: Any) -> None:
    mark("running")
    array = np.ones(COUNT, np.float32)

    def sum_for_ever() -> None:
        while True:
            bps.push_pull_inplace(array, name="a")

    with pytest.raises(bps.PeerLostError) as raised:
        sum_for_ever()
    kept = array.copy()
    assert (array == kept).all()
    assert "server 0" in str(raised.value)


@SHM_FIRST
def test_a_stopped_server_costs_nothing(transport: str) -> None:
    with harness.start(train, 60, workers=3, servers=3, env=env(transport)) as job:
        job.await_marks("step-20")
        job.kill("server 0", signal.SIGSTOP)
        results = job.values()
        assert [result["size"] for result in results] == [3, 3, 3]
        job.kill("server 0", signal.SIGKILL)
        job.helper_statuses(but=["server 0"])


@pytest.mark.parametrize("victims", [["rank 1"], ["rank 1", "server 0"], ["server 0", "rank 1"]])
@SHM_FIRST
def test_the_loss_of_a_worker_is_told_once(transport: str, victims: list[str]) -> None:
    with harness.start(views.train, 40, 3, workers=4, servers=2, env=env(transport)) as job:
        job.await_marks("running")
        for victim in victims:
            job.kill(victim)
        values = job.values(but=[1])
        assert [value["rank"] for value in values] == [0, 1, 2]
        for value in values:
            assert value["sizes"] == [4, 3], "one exception, however many servers were lost beside"


@harness.on_ranks("transport", workers=2, servers=2, env=env, kills="server 1", at="started")
def test_a_dropped_prepared_operation_keeps_its_array(bps: Any) -> None:
    """Rank 0 drops a prepared operation that its view has left incomplete: the next view still writes to its array.

    Rank 1 prepares when the view has ended, and goes into the next one by that.
    """
    bps.barrier()  # both are in the view that ends
    if bps.rank() == 1:
        mark("started")
        await_mark("dropped", 0)
    array = np.full(COUNT, 1.0 + bps.rank())
    prepared = bps.prepare("push_pull", array, average=False, name="dropped")
    if bps.rank() == 0:
        prepared.start()
        mark("started")
        harness.eventually(prepared.done, what="the end of the view")
        kept = weakref.ref(array)
        del prepared, array
        gc.collect()
        assert kept() is not None, "the memory is still needed"
        mark("dropped")
    else:
        assert (prepared() == 3).all()
    bps.barrier()


@TCP_FIRST
@harness.on_ranks("transport", workers=2, servers=2, env=env, kills="server 1", at="step-20")
def test_handles_that_nobody_waits_for(bps: Any) -> None:
    """Nobody waits for these: they must be summed all the same, in memory that stays."""
    for step in range(60):
        for i in range(4):
            bps.push_pull_async_inplace(np.full(COUNT, step, np.float32), name=f"left {i}", average=False)
        array = np.full(COUNT, step, np.float32)
        bps.push_pull_inplace(array, name="awaited", average=False)
        assert array.min() == array.max() == bps.size() * step
        if step % 10 == 0:
            mark(f"step-{step}")


@SHM_FIRST
@harness.on_ranks("transport", workers=2, servers=3, env=env, kills="server 1", at="step-20")
def test_several_threads_meet_the_same_loss(bps: Any) -> None:
    """Two threads with names of their own, and one that only begins later."""

    def work(name: str) -> None:
        for step in range(60):
            array = np.full(COUNT, step + bps.rank(), np.float32)
            bps.push_pull_inplace(array, name=name, average=False)
            assert array.min() == array.max() == 2 * step + 1, (name, step, array[0])
            if name == "first" and step % 10 == 0:
                mark(f"step-{step}")

    harness.in_threads(*(functools.partial(work, name) for name in ("first", "second", "third")))
    assert bps.size() == 2


@SHM_FIRST
@harness.on_ranks("transport", workers=2, servers=2, env=env, kills="server 1", at="summed")
def test_a_call_on_a_view_that_has_ended_goes_on_in_the_next(bps: Any) -> None:
    """What a thread meets that has begun a call when another one went into the next view."""
    from bps_rdma import _core, job

    before = job.current().process
    array = np.ones(COUNT, np.float32)
    for step in range(3):
        bps.push_pull_inplace(array, name="first", average=False)
        if step == 0:
            mark("summed")
            await_mark("killed")
    assert job.current().process is not before
    with pytest.raises(bps.RoundAbortedError):
        before.barrier(0, 1)
    asked: list[_core.Process] = []

    def rank_of(process: _core.Process) -> int:
        asked.append(process)
        return (before if len(asked) == 1 else process).rank

    assert job.asked(rank_of) == bps.rank()
    assert len(asked) == 2


@pytest.mark.parametrize("what", ["compressed", "stored", "apart", "nothing"])
@harness.on_ranks(workers=2, servers=2, env=env("tcp"), kills="server 1", at="step-20")
def test_what_is_lost_with_a_server_costs_one_exception(bps: Any, what: str) -> None:
    """How many exceptions the loss of a server costs a rank that has done this once."""
    array = np.empty(COUNT, np.float32)
    if what == "apart":
        array[:] = 1
        bps.push(array, name="apart", average=False)
        bps.pull(array, name="apart", average=False)
    elif what == "stored":
        bps.store(np.ones(4, np.float32), name="weights")
    aborted, step = 0, 0
    while step < 60:
        try:
            array[:] = 1 + bps.rank()
            bps.push_pull_inplace(
                array, name="x", average=False, compression=bps.Int8() if what == "compressed" else None
            )
            assert abs(array - 3).max() < 0.1, array
            bps.commit()
        except bps.RoundAbortedError:
            aborted += 1
            continue
        step += 1
        if step % 10 == 0:
            mark(f"step-{step}")
    assert aborted == (what != "nothing")


def survives_servers(bps: Any) -> bool:
    from bps_rdma import job

    return bool(job.current().process.survives_servers)


def test_it_is_on_by_itself() -> None:
    auto = FAST | {"BPS_SERVER_FAILOVER": "auto"}
    assert harness.run(survives_servers, workers=2, servers=1, env=auto) == [True] * 2
    assert harness.run(survives_servers, servers=1, env=auto, **harness.on_hosts("aab")) == [True] * 3


@harness.on_ranks("transport", workers=2, servers=2, env=env, kills="server 1", at="given up")
def test_a_round_that_was_given_up_meets_no_other(bps: Any) -> None:
    """Rank 0 gives a round up that rank 1 has not begun; then a server is lost."""
    array = np.zeros(COUNT, np.float32)
    if bps.rank() == 0:
        with pytest.raises(bps.DeadlineError):
            bps.push_pull_inplace(array, name="x", average=False, timeout=1)
    bps.barrier()
    mark("given up")
    await_mark("killed")
    bps.push_pull_inplace(np.zeros(COUNT, np.float32), name="the loss is noticed", average=False)
    bps.new_group([0, 1], name="made in the next view")
    if bps.rank() == 1:
        array[:] = 1
        with pytest.raises(
            bps.DeadlineError, match=r"not complete within 1\.0 s"
        ):  # at once, not after its own deadline
            bps.push_pull_inplace(array, name="x", average=False, timeout=1000)
    bps.barrier()
    array[:] = 10 + bps.rank()
    bps.push_pull_inplace(array, name="x", average=False)
    assert [float(array.min()), float(array.max())] == [21, 21]


def wait_for_a_stopped_server(bps: Any) -> tuple[str, list[float]]:
    """Rank 0 reaches its deadline, and no server can tell it whether that is a failure of all ranks."""
    array = np.ones(COUNT, np.float32)
    bps.push_pull_inplace(array, name="x")
    mark("running")
    await_mark("stopped")
    with pytest.raises(bps.DeadlineError) as raised:
        bps.push_pull_inplace(array, name="x", timeout=1 if bps.rank() == 0 else 1000)
    returned = array.copy()
    sums = np.full(COUNT, bps.rank() + 1, np.float32)
    bps.push_pull_inplace(sums, name="x", average=False)
    assert (array == returned).all()
    return str(raised.value), [float(sums.min()), float(sums.max())]


@TCP_FIRST
def test_a_deadline_that_meets_a_loss_is_one_of_all_ranks(transport: str) -> None:
    with harness.start(wait_for_a_stopped_server, workers=2, servers=2, env=env(transport)) as job:
        job.await_marks("running")
        job.kill("server 1", signal.SIGSTOP)
        job.set_mark("stopped")
        for text, sums in job.values():
            assert "not complete within 1.0 s" in text
            assert sums == [3, 3]


def copies(bps: Any) -> int:
    """Of this rank, once it knows the server's redo log."""
    array = bps.empty(COUNT, np.float32)
    before = 0
    for step in range(10):
        if step == 5:
            bps.barrier()
            before = bps.metrics()["total"]["copies"]
        array[:] = step + bps.rank()
        bps.push_pull_inplace(array, name="x", average=False)
        assert array.min() == array.max() == 2 * step + 1
    made: int = bps.metrics()["total"]["copies"] - before
    return made


def test_no_array_is_copied_for_it(transport: str) -> None:
    assert harness.run(copies, workers=2, servers=1, env=env(transport)) == [0, 0]
