# SPDX-License-Identifier: Apache-2.0
"""A rank that ends, by an exception or by leaving too early: the others hear of it at once, and are told why."""

import contextlib
import functools
import itertools
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
from bodies.arrays import caught
from harness import await_mark, mark
from harness.freeze import frozen, thread_of

ENV = {"BPS_TIMEOUT": str(60 * harness.PATIENCE), "BPS_SHUTDOWN_TIMEOUT": str(60 * harness.PATIENCE)}
SOON_S = 20 * harness.PATIENCE  # a second on a quiet machine; who is not told waits for 60 s

RAISES = """
import numpy, pathlib, time, bps_rdma as bps
bps.init()
bps.push_pull(numpy.ones(1000, numpy.float32), name="warm")
while not pathlib.Path("mark-0-waits").exists():
    time.sleep(0.005)
time.sleep(0.2)  # for the other one to be within its call; either way it must hear of this
pathlib.Path("raised").write_text(str(time.monotonic()))
raise ValueError("no such sample")
"""


def number_of_this_rank() -> int:
    return int(os.environ.get("DMLC_WORKER_ID") or os.environ["RANK"])


def meets_one_that_raises(bps: Any, where: str) -> tuple[Any, ...]:
    folder = Path(os.environ["BPS_TEST_FOLDER"])
    if number_of_this_rank() == 1:
        ended = harness.run_command([sys.executable, "-c", RAISES], os.environ, folder, within=120)
        return ended.returncode, ended.stderr, time.monotonic()
    bps.init()
    bps.push_pull(np.ones(1000, np.float32), name="warm")
    mark("waits")
    try:
        if where == "barrier":
            bps.barrier()
        elif where == "later":
            harness.eventually((folder / "raised").exists)
            time.sleep(1)  # the call comes when everybody knows
            (folder / "raised").write_text(str(time.monotonic()))
            bps.push_pull(np.ones(1000, np.float32), name="later")
        else:
            bps.push_pull(np.ones(3_000_000, np.float32), name="blocked")
    except bps.PeerLostError as error:
        came = time.monotonic()
        bps.shutdown()
        return str(error), came - float((folder / "raised").read_text()), time.monotonic() - came
    return ("nothing",)


@pytest.mark.parametrize("servers", [None, 1])
@pytest.mark.parametrize("where", ["push_pull", "barrier", "later"])
def test_an_exception_is_told_to_the_others(where, servers):
    with harness.start(meets_one_that_raises, where, workers=2, servers=servers, env=ENV, init=False) as job:
        heard, ended = (outcome.value for outcome in job.outcomes())
        job.helper_statuses()
        told = servers is None or "rank 1 ended: ValueError: no such sample" in job.log("scheduler")
    text, seconds, left = heard
    assert told
    assert "rank 1 ended: ValueError: no such sample" in text
    assert seconds < SOON_S
    assert left < SOON_S
    status, output, _ = ended
    assert status == 1
    assert output.rstrip().endswith("ValueError: no such sample")
    assert output.count("Traceback") == 1


def leaves_early(bps: Any, where: str) -> tuple[str, float]:
    rank = bps.rank()
    one = np.ones(1000, np.float32)
    bps.push_pull(one, name="warm")
    if rank == 1:
        await_mark("waits", 0)
        bps.shutdown()
        return "left", 0.0
    mark("waits")
    began = time.monotonic()
    try:
        if where == "barrier":
            bps.barrier()
        elif where == "group":
            bps.new_group([0, 1], "late")
        else:
            bps.push_pull(one, name="blocked")
    except bps.PeerLostError as error:
        return str(error), time.monotonic() - began
    return "nothing", 0.0


@pytest.mark.parametrize("servers", [None, 1])
@pytest.mark.parametrize("where", ["push_pull", "barrier", "group"])
def test_leaving_while_another_rank_waits_is_its_error(where, servers):
    found = harness.run(leaves_early, where, workers=2, servers=servers, env=ENV)
    text, seconds = found[0]
    assert "worker 1" in text
    assert "has left the job" in text
    assert seconds < SOON_S
    assert found[1] == ("left", 0.0)


NEVER = {"BPS_TIMEOUT": "600", "BPS_SHUTDOWN_TIMEOUT": "600"}  # who is not told waits for longer than the test


def leaves_many_waiting(bps: Any, ranks: list[int]) -> list[str]:
    """All ranks but rank 0 leave one by one; rank 0 waits for sums of `ranks`, each made by one of the servers."""
    rank = bps.rank()
    group = bps.new_group(ranks) if rank in ranks else None
    if rank > 0:
        await_mark("goes", rank - 1)
        mark("goes")
        bps.shutdown()
        return []
    handles = [bps.push_pull_async(np.ones(100, np.float32), name=f"x {i}", group=group) for i in range(12)]
    mark("goes")
    told = []
    for handle in handles:
        with pytest.raises(bps.PeerLostError) as lost:
            bps.synchronize(handle)
        told.append(str(lost.value))
    return told


@pytest.mark.parametrize(
    ("ranks", "servers", "env"),
    [
        ([0, 1], None, {}),
        ([0, 1], None, harness.over("tcp")),
        ([0, 1], None, {"BPS_MIN_WORKERS": "1"}),
        ([0, 1], 2, {}),
        ([0, 2], None, {}),  # the server of rank 1 goes on when it has left, and hears that rank 2 leaves
        ([0, 2], None, {"BPS_HOST_SUM": "0"} | harness.over("tcp")),
    ],
)
def test_all_that_wait_for_a_rank_that_leaves_are_told(ranks, servers, env):
    told = harness.run(leaves_many_waiting, ranks, workers=ranks[-1] + 1, servers=servers, env=NEVER | env)[0]
    assert len(told) == 12
    assert all(f"worker {ranks[-1]}" in one and "has left the job" in one for one in told), told


def leaves_what_others_never_call(bps: Any) -> int:
    """Rank 1 leaves many operations that rank 0 never calls, and of which its server has heard."""
    if bps.rank() == 1:
        _ = [bps.push_pull_async(np.ones(100, np.float32), name=f"x {i}") for i in range(30)]
        await_mark("knows", 0)
        bps.shutdown()
        return 0
    harness.eventually(lambda: bps.metrics()["total"]["open_rounds"] > 0, what="a push of rank 1 here")
    mark("knows")
    with pytest.raises(bps.PeerLostError):
        bps.push_pull(np.ones(100, np.float32), name="y")
    return int(harness.eventually(lambda: bps.metrics()["total"]["open_rounds"], until=lambda rounds: rounds == 0))


def test_no_round_waits_for_ever_for_a_rank_that_has_left():
    assert harness.run(leaves_what_others_never_call, workers=2, env=NEVER)[0] == 0


def leaves_after_a_failure(bps: Any, is_refused: bool) -> str:
    """Rank 2 waits for rank 1 in vain and leaves; rank 0 waits for rank 2."""
    rank = bps.rank()
    one = np.ones(1000, np.float32)
    first, second = (bps.new_group(ranks) if rank in ranks else None for ranks in ([0, 2], [1, 2]))

    def failure(**call: Any) -> str:
        with pytest.raises(bps.BpsError) as error:
            bps.push_pull(one, **call)
        return str(error.value)

    if rank == 0:
        return failure(name="y", group=first, timeout=60)
    if rank == 1 and not is_refused:  # it does not call; otherwise it leaves
        await_mark("raised", 2)
    if rank == 2 and is_refused:  # once this rank knows that the other one has left
        harness.eventually(lambda: "cannot be synchronised" in failure(name="x", group=second, timeout=60))
    elif rank == 2:
        failure(name="x", group=second, timeout=0.3)
        mark("raised")
    return ""


@pytest.mark.parametrize(
    ("is_refused", "why"),
    [(False, "push_pull of 'x', round 0: not complete"), (True, "'x' cannot be synchronised: worker 1")],
)
def test_who_waits_for_a_rank_that_left_after_a_failure_is_told_of_the_failure(is_refused, why):
    told = harness.run(leaves_after_a_failure, is_refused, workers=3, servers=1, env=ENV)[0]
    assert "worker 2" in told, told
    assert f"has left the job, after: {why}" in told, told
    assert "1" in told.split("after:")[1], told


@pytest.mark.parametrize("servers", [None, 1])
@harness.on_ranks("servers", workers=2, env=ENV)
def test_what_a_rank_contributed_before_it_left_still_counts(bps: Any) -> None:
    """Rank 1 pushes and leaves at once; what it has pushed still counts."""
    array = np.full(100_000, bps.rank() + 1, np.float32)
    bps.push(array, name="x", average=False)
    if bps.rank() == 1:
        bps.shutdown()
        return
    time.sleep(0.3)
    assert bps.pull(array, name="x", average=False)[-1] == 3


def uses_what_the_gone_left(bps: Any) -> list[float]:
    """Rank 1 pushes many tensors and leaves; rank 0 comes when the server has seen rank 1's connections close."""
    array = np.full(1000, bps.rank() + 1, np.float32)
    names = [f"x {i}" for i in range(50)]
    if bps.rank() == 1:
        for name in names:
            bps.push(array, name=name, average=False)
        bps.shutdown(0)
        return []
    await_mark("rank 1 is gone")
    found = []
    for name in names:
        time.sleep(0.01)  # what the server hears of rank 1 comes meanwhile
        bps.push(array, name=name, average=False)
        found.append(float(bps.pull(array.copy(), name=name, average=False)[-1]))
    with pytest.raises(bps.PeerLostError, match=r"worker 1 .*has left the job"):  # it has contributed nothing to this
        bps.push_pull(array, name=names[0])
    return found


@pytest.mark.parametrize("env", [{}, harness.over("tcp")])
def test_what_a_rank_contributed_counts_when_its_connections_have_closed(env):
    env = ENV | {"BPS_LOG_LEVEL": "info"} | env
    with harness.start(uses_what_the_gone_left, workers=2, servers=1, env=env) as job:
        job.eventually(lambda: re.search(r"connection to worker 1 .*lost", job.log("server 0")), what="rank 1 gone")
        job.set_mark("rank 1 is gone")
        assert job.results() == [[3.0] * 50, []]


def sums_nothing(bps: Any, *, dies: bool) -> None:
    """The last calls of ranks are of an array without elements, which rank 1 does not wait for."""
    nothing = np.empty(0, np.float32)
    bps.barrier()  # init() of rank 0 speaks to a server inside rank 1
    if bps.rank() == 0:
        with pytest.raises(bps.PeerLostError, match="worker 1"):
            bps.push_pull(np.ones(1), name="x")
    assert bps.push_pull(nothing, name="sum").size == 0
    assert bps.push_pull_many({"b": nothing})["b"].size == 0
    assert bps.reduce_scatter(nothing, name="part").size == 0
    assert bps.all_gather(nothing, name="all").size == 0
    bps.broadcast(nothing, 0, name="copy")
    bps.store(nothing, name="kept")
    if bps.rank() == 1:
        if dies:
            os._exit(0)
        bps.shutdown(0)


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("servers", [None, 1])
def test_nobody_waits_for_a_rank_that_is_gone_where_nothing_is_sent(dies, servers):
    with harness.start(functools.partial(sums_nothing, dies=dies), workers=2, servers=servers, env=ENV) as job:
        job.values(but=[1] if dies else [])


@harness.on_ranks(workers=1, init=False)
def test_an_excepthook_that_was_set_before_is_called_once(bps: Any) -> None:
    code = """
import sys, bps_rdma as bps
sys.excepthook = lambda kind, value, trace: print("mine", kind.__name__)
bps.init()
bps.shutdown()
bps.init()
raise KeyError("x")
"""
    folder = os.environ["BPS_TEST_FOLDER"]
    ended = harness.run_command([sys.executable, "-c", code], os.environ, folder, within=120)
    assert (ended.returncode, ended.stdout) == (1, "mine KeyError\n")


def raises_ours(bps: Any) -> str:
    code = "import bps_rdma as bps; bps.init(); bps.push_pull(3)"
    folder = os.environ["BPS_TEST_FOLDER"]
    return harness.run_command([sys.executable, "-c", code], os.environ, folder, within=120).stderr


def test_one_line_says_why_a_rank_ends_before_its_traceback():
    (shown,) = harness.run(raises_ours, workers=1, init=False)
    first, _, rest = shown.partition("\n")
    assert first.startswith("error: rank 0 ends with InvalidTensorError: ")
    assert rest.startswith("Traceback")


def leaves_while_groups_are_made(bps: Any, tries: int) -> int:
    """The scheduler asks the loops of a rank that leaves whether they know a group."""
    made = 0
    for number in range(tries):
        bps.init()
        bps.push_pull(np.ones(10, np.float32), name="x")
        if bps.rank() == 0:
            bps.barrier()
            if number == 0:
                await_mark("made", 1)
            time.sleep(number * 0.001)  # into the middle of it; any other time is right, too
            bps.shutdown(0)
        else:
            bps.barrier()
            with contextlib.suppress(bps.BpsError):
                for name in itertools.count():
                    bps.new_group([1], str(name))
                    made += 1
                    if made == 1:
                        mark("made")
            bps.shutdown(0)
        mark(f"try {number}")
        await_mark(f"try {number}", 0, 1)
    return made


def test_a_rank_leaves_at_once_while_others_make_groups():
    made = harness.run(leaves_while_groups_are_made, 15, workers=2, servers=None, env=ENV)
    assert made[0] == 0
    assert made[1] > 0


def result_of_one_that_leaves(bps: Any, transport: str) -> list[float] | None:
    """Rank 1's server has all pushes, answers, and leaves with its rank while rank 0 is stopped."""
    from bps_rdma import job

    names = [f"t{number}" for number in range(16)]
    bps.declare_many(dict.fromkeys(names, ((1000,), "float32")))
    process, tensors = job.current().process, job.current().tensors
    name = next(name for name, tensor in zip(names, tensors.values(), strict=True) if process.servers_of(tensor) == [1])
    mine = np.full(1000, bps.rank() + 1, np.float32)
    mark("declared")
    if bps.rank() == 0:
        await_mark("wait")
        before = bps.metrics()["total"]["data_bytes"]
        handle = bps.push_pull_async(mine, False, name)
        harness.eventually(lambda: bps.metrics()["total"]["data_bytes"] > before or transport == "shm")
        mark("pushed")
        await_mark("left")
        return [float(value) for value in np.unique(bps.synchronize(handle))]
    harness.eventually(lambda: [one["missing"] for one in bps.dump()["rounds"]] == [[1]])
    bps.push_pull(mine, False, name)
    bps.shutdown(timeout=0)
    return None


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_what_a_rank_has_answered_before_it_left_counts(transport):
    """Rank 1 takes the push once rank 0 is stopped. So what it sends first goes by another socket than its answer."""
    env = ENV | {"BPS_TRANSPORT": transport}
    with harness.start(result_of_one_that_leaves, transport, workers=2, env=env) as job:
        job.await_marks("declared")
        job.kill("rank 1", signal.SIGSTOP)
        job.set_mark("wait")
        job.await_marks("pushed", [0])
        job.kill("rank 0", signal.SIGSTOP)
        job.kill("rank 1", signal.SIGCONT)
        job.eventually(lambda: job.processes["rank 1"].status is not None, what="the end of rank 1")
        job.set_mark("left")
        job.kill("rank 0", signal.SIGCONT)
        assert job.outcomes()[0].value == [3.0], job.report()


def uses_what_a_host_left(bps: Any) -> list[float | str]:
    """Ranks 0 and 1, of one host, push and leave while the server in rank 2 is stopped, which hears of that at once."""
    from bps_rdma import job

    names = [f"t{number}" for number in range(48)]
    bps.declare_many(dict.fromkeys(names, ((1000,), "float32")))
    process, tensors = job.current().process, job.current().tensors
    there = (name for name, tensor in zip(names, tensors.values(), strict=True) if process.servers_of(tensor) == [2])
    both, one, none = itertools.islice(there, 3)
    mine = np.full(1000, bps.rank() + 1, np.float32)
    mark("declared")
    await_mark("is stopped")
    if bps.rank() < 2:
        for name in (both, one)[: 2 - bps.rank()]:
            bps.push(mine, name, average=False)
        mark("pushed")
        await_mark("pushed", 0, 1)  # who pushes after the other one has left is told so at once
        return []
    for _ in range(2):  # a call that comes after the scheduler has told this process of both
        assert all("has left" in caught(lambda other=other: bps.new_group([other, 2], "x")) for other in (0, 1))
    mark("knows")
    await_mark("goes on")

    def sum_of(name: str) -> float:
        bps.push(mine, name, average=False)
        return float(bps.pull(mine.copy(), name, average=False)[-1])

    return [sum_of(both), *(caught(lambda name=name: sum_of(name)) for name in (one, none))]


def test_what_the_ranks_of_a_host_pushed_before_they_left_counts():
    """Their pushes ended at the relay of their host, before its contribution was at the server."""
    env = ENV | {"BPS_PUSH_THREAD": "1", "BPS_SERVER_ENGINE_THREAD": "1"}
    with harness.start(uses_what_a_host_left, **harness.on_hosts("aab"), env=env) as job:
        job.await_marks("declared")
        with frozen(thread_of(job.pid("rank 2"), "bps-loop-0")):
            job.set_mark("is stopped")
            job.await_marks("knows", [2])
        job.set_mark("goes on")
        total, *told = job.results()[2]
    assert total == 6
    assert all(re.match(r"PeerLostError: .*worker [01] .*has left the job", one) for one in told), told


def drops_its_handle(bps: Any) -> np.ndarray | None:
    """Rank 0 leaves while its last operation waits for rank 1, and has dropped the handle, as at the end of main()."""
    if bps.rank() == 0:
        bps.push_pull_async(np.full(1000, 2, np.float32), name="last", average=False)
        mark("leaves")
        bps.shutdown()
        return None
    await_mark("leaves", 0)
    return bps.push_pull(np.ones(1000, np.float32), name="last", average=False)


@pytest.mark.parametrize("servers", [None, 1])
def test_what_nobody_waits_for_is_finished(servers):
    assert (harness.run(drops_its_handle, workers=2, servers=servers, env=ENV)[1] == 3).all()


def needs_the_server_of_one_that_left(bps: Any) -> list[float]:
    """Rank 2 leaves; ranks 0 and 1 go on with sums of their own, some of which its server makes."""
    if bps.rank() == 2:
        mark("leaves")
        bps.shutdown()
        return []
    group = bps.new_group([0, 1])
    if bps.rank() == 1:
        await_mark("rank 2 was silent")
    handles = [bps.push_pull_async(np.ones(100), False, name=f"x {i}", group=group) for i in range(12)]
    mark("waits")
    return [float(bps.synchronize(handle)[-1]) for handle in handles]


def test_one_that_has_left_is_not_lost_when_its_server_is_silent_for_a_while():
    env = ENV | harness.over("tcp") | {"BPS_LOG_LEVEL": "info", "BPS_LINK_GBPS": "1"}
    # The third host is a spare one for the group of the others; those of one host would sum by themselves.
    with harness.start(needs_the_server_of_one_that_left, **harness.on_hosts("abc"), env=env) as job:
        job.await_marks("leaves", [2])
        job.await_call("rank 2")
        job.await_marks("waits", [0])
        job.kill("rank 2", signal.SIGSTOP)
        job.eventually(lambda: "is silent: the scheduler is asked" in job.log("rank 0"), what="the question of rank 0")
        job.kill("rank 2", signal.SIGCONT)
        job.set_mark("rank 2 was silent")
        assert job.results() == [[2.0] * 12, [2.0] * 12, []]
