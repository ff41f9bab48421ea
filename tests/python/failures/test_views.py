# SPDX-License-Identifier: Apache-2.0
"""Members are lost, and the job goes on with the others: one RoundAbortedError on each, then right sums."""

import contextlib
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
from bodies.views import COUNT, FAST, TOLD, train
from harness import await_mark, mark
from harness.freeze import freeze, frozen, thread_of


def check(values: list[dict[str, Any]], sizes: list[int], culprit: str) -> None:
    assert [value["rank"] for value in values] == list(range(len(values))), "ranks keep their order and close up"
    for value in values:
        assert value["sizes"] == sizes, "one exception for each view that has ended"
        assert culprit in value["texts"][0], value["texts"]
        assert "view 2" in value["texts"][0], value["texts"]


@pytest.mark.parametrize("servers", [None, 2])
def test_the_job_goes_on_without_a_killed_worker(transport, servers):
    env = FAST | harness.over(transport) | {"BPS_MIN_WORKERS": "2"}
    check(harness.run(train, 20, 3, workers=4, servers=servers, env=env, kills="rank 2"), [4, 3], "worker 2")


def test_the_job_goes_on_without_a_killed_server(transport):
    env = FAST | TOLD | harness.over(transport) | {"BPS_MIN_WORKERS": "2"}
    check(harness.run(train, 100, 2, workers=2, servers=2, env=env, kills="server 1"), [2, 2], "server ")


def test_a_rank_that_ends_with_an_exception_is_not_waited_for(transport):
    env = FAST | harness.over(transport) | {"BPS_MIN_WORKERS": "2"}
    with harness.start(train, 20, 2, 1, workers=3, env=env) as job:
        check(job.values(but=[1]), [3, 2], "rank 1 ended: ValueError: no such file")
        assert "ValueError" in job.outcomes()[1].error


@pytest.mark.long_over("tcp")
def test_a_stopped_worker_that_wakes_up_changes_nothing(transport):
    env = FAST | harness.over(transport) | {"BPS_MIN_WORKERS": "2"}
    with harness.start(train, 200, 2, workers=3, env=env) as job:
        job.await_marks("running")
        job.kill("rank 1", signal.SIGSTOP)
        job.await_marks("size-2", ranks=[0, 2])
        with contextlib.suppress(ProcessLookupError):  # it may have been fenced, which ends the process
            job.kill("rank 1", signal.SIGCONT)
        check(job.values(but=[1]), [3, 2], "worker 1")
        woken = job.outcomes()[1]
        assert woken.status != 0 or "PeerLostError" in woken.error or "RoundAbortedError" in woken.error, woken


def left_open(bps: Any) -> list[str]:
    """What a rank that gets into no next view, because there is no scheduler, has open after shutdown()."""
    array = np.ones(8, np.float32)
    mark("running")
    with contextlib.suppress(bps.RoundAbortedError):
        while True:
            bps.push_pull_inplace(array, name="a")
    mark("told")
    await_mark("without scheduler")
    with pytest.raises(bps.PeerLostError):
        bps.push_pull_inplace(array, name="a")
    bps.shutdown()
    return [name for fd in Path("/proc/self/fd").iterdir() if "memfd:bps-" in (name := os.path.realpath(fd))]


def test_a_rank_that_gets_into_no_next_view_leaves_nothing_open():
    env = FAST | harness.over("tcp") | {"BPS_MIN_WORKERS": "2"}
    with harness.start(left_open, workers=3, servers=1, env=env) as job:
        job.await_marks("running")
        job.kill("rank 2")
        job.await_marks("told", ranks=[0, 1])
        job.kill("scheduler")
        job.set_mark("without scheduler")
        assert job.values(but=[2]) == [[], []]


def hang_up() -> int:
    """Ends each TCP connection of this process but the first, which is the one to the scheduler. Returns how many."""
    ended = 0
    for fd in sorted(int(name.name) for name in Path("/proc/self/fd").iterdir()):
        try:
            one = socket.socket(fileno=os.dup(fd))
        except OSError:
            continue
        with one, contextlib.suppress(OSError):  # some are no streams, or listen
            if one.getpeername()[1] == int(os.environ["DMLC_PS_ROOT_PORT"]):
                continue
            one.shutdown(socket.SHUT_RDWR)
            ended += 1
    return ended


def train_with_a_broken_connection(bps: Any, steps: int, breaks: int) -> dict[str, Any]:
    """Like train(), with connections of rank 1 to the servers that break although all processes are there."""
    array = np.empty(COUNT, np.float32)
    texts: list[str] = []
    step = 0
    while step < steps:
        if bps.rank() == 1 and step == 3 and len(texts) < breaks:
            assert hang_up() > 0
        try:
            array[:] = 1 + bps.rank()
            bps.push_pull_inplace(array, name="a", average=False)
            assert array.min() == array.max() == 6
            bps.commit()
        except bps.RoundAbortedError as error:
            texts.append(str(error))
            continue
        step += 1
    bps.barrier()
    return {"rank": bps.rank(), "texts": texts}


@pytest.mark.parametrize("breaks", [1, 2])
def test_a_connection_that_breaks_costs_nobody_his_place(breaks):
    env = FAST | TOLD | harness.over("tcp") | {"BPS_MIN_WORKERS": "1"}
    with harness.start(train_with_a_broken_connection, 10, breaks, workers=3, servers=2, env=env) as job:
        for value in job.values():
            assert len(value["texts"]) == breaks, value
            assert "the connection between" in value["texts"][0]
            assert "although both are here" in value["texts"][0]
            assert "worker 1" in value["texts"][0]


@pytest.mark.parametrize("pause", [0.0, 0.03, 0.1])
def test_losses_while_the_next_view_begins(transport, pause):
    env = FAST | harness.over(transport) | {"BPS_MIN_WORKERS": "2"}
    with harness.start(train, 20, 2, workers=5, env=env) as job:
        job.await_marks("running")
        for rank in (1, 4, 2):
            job.kill(f"rank {rank}")
            time.sleep(pause)
        values = job.values(but=[1, 2, 4])
    assert [value["rank"] for value in values] == [0, 1]
    assert [value["sizes"][-1] for value in values] == [2, 2]


def pair_of_the_last(bps: Any, seconds: float) -> list[float]:
    """What the two last ranks of the beginning sum in the group that they made then, in all views."""
    number = 1 + bps.rank()
    pair = bps.new_group([bps.size() - 2, bps.size() - 1]) if bps.rank() >= bps.size() - 2 else None
    found: set[float] = set()
    running = np.ones(1, np.float32)
    until = time.monotonic() + seconds
    mark("running")
    while running[0] > 0:
        try:
            still = bps.push_pull(np.float32([time.monotonic() < until]), name="running", average=False)
            if pair is not None:
                found.add(float(bps.push_pull(np.float32([number]), name="x", average=False, group=pair)[0]))
            bps.commit()
        except bps.RoundAbortedError:
            continue
        running = still
    return sorted(found) or [0.0]


@pytest.mark.parametrize(
    "pause", [0.004, *(pytest.param(pause, marks=pytest.mark.long) for pause in (0.008, 0.012, 0.03))]
)
def test_groups_keep_their_members_when_views_follow_each_other(transport, pause):
    """Some ranks may skip a view that has ended before they were in it."""
    env = FAST | harness.over(transport) | {"BPS_MIN_WORKERS": "2"}
    with harness.start(pair_of_the_last, 1.5, workers=6, env=env) as job:
        job.await_marks("running")
        for rank in (2, 1, 3):
            job.kill(f"rank {rank}")
            time.sleep(pause)
        assert job.values(but=[1, 2, 3])[1:] == [[11.0], [11.0]]


def test_too_few_workers_end_the_job(transport):
    env = FAST | harness.over(transport) | {"BPS_MIN_WORKERS": "3"}
    with harness.start(train, 200, 3, workers=4, env=env) as job:
        job.await_marks("running")
        job.kill("rank 3")
        job.await_marks("size-3", ranks=[0, 1, 2])
        job.kill("rank 1")
        for rank in (0, 2):
            error = job.outcomes(but=[1, 3])[rank].error
            assert "PeerLostError: " in error, error
            assert "RoundAbortedError: " not in error, error
            assert "worker 1" in error, error


def left_alone(bps: Any, comes: bool) -> str:
    """What rank 0 hears when rank 2 is lost, and then rank 1, which goes into the next view or does not."""
    first, array = bps.rank(), np.ones(8, np.float32)
    mark("running")
    with contextlib.suppress(bps.RoundAbortedError):
        while True:
            bps.push_pull_inplace(array, name="a")
    mark("told")
    if first == 1 and not comes:
        await_mark("never")
    while True:
        try:
            bps.push_pull_inplace(array, name="a")
        except bps.RoundAbortedError:
            continue
        except bps.PeerLostError as error:
            return str(error)


@pytest.mark.parametrize("comes", [False, True])
def test_too_few_workers_for_the_next_view_end_the_job(transport, comes):
    env = FAST | harness.over(transport) | {"BPS_MIN_WORKERS": "2", "BPS_TIMEOUT": str(20 * harness.PATIENCE)}
    with harness.start(left_alone, comes, workers=3, env=env) as job:
        job.await_marks("running")
        job.kill("rank 2")
        job.await_marks("told", ranks=[0, 1])
        job.kill("rank 1")
        text = job.values(but=[1, 2])[0]
        too_few = "worker 2 " in text and "fewer workers are left than BPS_MIN_WORKERS demands, which is 2" in text
        assert too_few or (comes and "worker 1 " in text), text


def stays_away(bps: Any) -> float:
    mark("running")
    if bps.rank() > 0:
        await_mark("never")
    await_mark("comes")
    for _ in range(2):
        with contextlib.suppress(bps.RoundAbortedError):
            return float(bps.push_pull(np.ones(8, np.float32), name="a", average=False)[0])
    return 0.0


def test_a_server_waits_for_the_last_worker_as_long_as_that_stays_away():
    """It has no call whose deadline could pass: only those of workers end the wait for a view."""
    server_times = FAST | {"BPS_MIN_WORKERS": "1", "BPS_TIMEOUT": "1"}
    patient = [{"BPS_TIMEOUT": "100"}] * 2
    with harness.start(stays_away, workers=2, servers=1, env=server_times, rank_env=patient) as job:
        job.await_marks("running")
        job.kill("rank 1")
        time.sleep(3)  # longer than the server's BPS_TIMEOUT
        job.set_mark("comes")
        assert job.values(but=[1]) == [1.0]
        assert job.helper_statuses() == {"scheduler": 0, "server 0": 0}


def test_a_server_that_no_view_follows_says_how_the_job_has_ended():
    """The last worker may take its time, to save a checkpoint."""
    server_times = FAST | {"BPS_MIN_WORKERS": "2", "BPS_TIMEOUT": "1"}
    patient = [{"BPS_TIMEOUT": "100"}] * 3
    with harness.start(stays_away, workers=3, servers=1, env=server_times, rank_env=patient) as job:
        job.await_marks("running")
        job.kill("rank 2")
        job.eventually(lambda: "worker 2 " in job.log("scheduler"))
        job.kill("rank 1")
        time.sleep(3)  # longer than the server's BPS_TIMEOUT
        job.set_mark("comes")
        assert "PeerLostError: worker 2 " in job.outcomes(but=[1, 2])[0].error
        assert job.helper_statuses() == {"scheduler": 1, "server 0": 1}
        assert job.log("server 0").splitlines()[-1] == "bps-server: the job ended early: a member was lost"


def test_who_hears_of_the_loss_from_another_rank_first(transport):
    env = FAST | harness.over(transport) | {"BPS_MIN_WORKERS": "2", "BPS_HEARTBEAT_TIMEOUT": "20"}
    with harness.start(train, 20, 2, workers=3, env=env) as job:
        job.await_marks("running")
        deaf = threading.Thread(target=freeze, args=(thread_of(job.pid("rank 1"), "bps-van"), 2.0))
        deaf.start()
        time.sleep(0.2)
        job.kill("rank 2")
        values = job.values(but=[2])
        deaf.join()
    check(values, [3, 2], "worker 2")


def starts_another(bps: Any) -> str:
    """What a call says that begins after an operation has failed because rank 2 is lost."""
    x, y = np.ones(10, np.float32), np.ones(10, np.float32)
    for name, array in (("x", x), ("y", y)):
        bps.push_pull_inplace(array, name=name)
    mark("running")
    if bps.rank() == 2:
        await_mark("never")
    failed = bps.push_pull_async_inplace(x, name="x")
    mark("waiting")
    while not bps.poll(failed):
        time.sleep(0.01)
    with pytest.raises(bps.RoundAbortedError) as told:
        bps.push_pull_async_inplace(y, name="y")
    mark("told")
    with pytest.raises(bps.RoundAbortedError, match="worker 2 "):
        bps.synchronize(failed)
    return str(told.value)


def test_a_call_names_the_loss_that_this_rank_has_heard_of_from_another():
    env = {"BPS_MIN_WORKERS": "2", "BPS_HEARTBEAT_TIMEOUT": "20"}
    with harness.start(starts_another, workers=3, env=env) as job:
        job.await_marks("waiting", [0, 1])
        with frozen(thread_of(job.pid("rank 1"), "bps-van")):
            job.kill("rank 2")
            job.await_marks("told", [0, 1])
        told = job.values(but=[2])[:2]
    assert all("view 1 of 3 workers has ended" in text and "worker 2 " in text for text in told), told


def groups_after(bps: Any) -> dict[str, Any]:
    """Rank 1 of 4 dies while nobody is in a call; groups, barriers and prepared operations in the next view."""
    rank = bps.rank()
    pair = bps.new_group([rank, (rank + 2) % 4])  # 0, 2 and 1, 3
    array = np.ones(10, np.float32)
    prepared = bps.prepare("push_pull", array, name="prepared", average=False)
    prepared()
    mark("ready")
    if rank == 1:
        await_mark("never", timeout=60)
    await_mark("killed")
    seen = []
    for call in (bps.barrier, lambda: bps.push_pull(array, name="x", group=pair)):
        before = bps.size()  # what this rank was told last, also when it could know better
        while True:  # as often as views end
            try:
                call()
            except bps.RoundAbortedError:
                seen.append(before)
            else:
                break
    with pytest.raises(bps.NotInitializedError, match="prepare it again"):
        prepared()
    total = bps.push_pull(np.ones(10, np.float32), name="x", average=False, group=pair)
    return {"seen": seen, "size": bps.size(), "ranks": pair.ranks, "sum": float(total[0])}


def test_groups_shrink_with_the_job():
    values = harness.run(groups_after, workers=4, env=FAST | {"BPS_MIN_WORKERS": "1"}, kills="rank 1", at="ready")
    assert [value["seen"] for value in values] == [[4]] * 3
    assert [value["size"] for value in values] == [3] * 3
    assert [value["ranks"] for value in values] == [(0, 1), (0, 1), (2,)]
    assert [value["sum"] for value in values] == [2.0, 2.0, 1.0]


def groups_between_views(bps: Any, first: str) -> dict[str, Any]:
    """What a group says first of all after the exception, before any call takes the rank into the next view."""
    rank = bps.rank()
    ends = bps.new_group([0, 2]) if rank != 1 else None
    all_of_them = bps.new_group([0, 1, 2], "all")
    mark("ready")
    if rank == 1:
        await_mark("never", timeout=60)
    before = (all_of_them.ranks, all_of_them.rank)
    with pytest.raises(bps.RoundAbortedError):
        bps.push_pull(np.ones(10, np.float32), name="x", group=all_of_them)
    told = getattr(all_of_them, first)
    return {"before": before, first: told, "ends": (ends.size, ends.ranks, ends.rank), "all": all_of_them.ranks}


@pytest.mark.parametrize(("first", "told"), [("size", [2, 2]), ("ranks", [(0, 1)] * 2), ("rank", [0, 1])])
def test_groups_are_those_of_the_next_view_as_soon_as_a_rank_is_told(first, told):
    values = harness.run(
        groups_between_views, first, workers=3, env=FAST | TOLD | {"BPS_MIN_WORKERS": "1"}, kills="rank 1", at="ready"
    )
    assert [value["before"] for value in values] == [((0, 1, 2), 0), ((0, 1, 2), 2)]
    assert [value[first] for value in values] == told
    assert [value["ends"] for value in values] == [(2, (0, 1), 0), (2, (0, 1), 1)]
    assert [value["all"] for value in values] == [(0, 1)] * 2


@pytest.mark.parametrize("servers", [None, 1])
@harness.on_ranks("servers", workers=3, env=FAST | {"BPS_MIN_WORKERS": "2"}, kills="rank 2", at="summed")
def test_exact_sums_exchange_nothing_more_in_the_next_view(bps: Any) -> None:
    """A caller waits for all it has begun when it has been told of the end of the view: as a pass of gradients does."""
    from bps_rdma import _core, arrays, presence
    from bps_rdma.exact import UnroundedSums

    accumulator = _core.ExactAccumulator(arrays.Dtype.float32, 1)
    accumulator.add(arrays.describe(np.float32([np.nan]), False))
    sums = UnroundedSums([accumulator], np.empty(1), "sums", None)
    sums.start(1)
    harness.eventually(lambda: bool(sums._steps) and sums._steps[0].done())
    mark("summed")
    first, ended = bps.rank(), presence.now().job
    assert ended is not None
    harness.eventually(lambda: ended.process.view_ended)
    with pytest.raises(bps.RoundAbortedError):
        bps.barrier()
    if first == 0:
        with pytest.raises(bps.RoundAbortedError):
            sums.wait()
    assert float(bps.push_pull(np.ones(1, np.float32), name="next", average=False)[0]) == 2.0


PROGRAM = """
import os, signal, sys
import numpy as np
import bps_rdma as bps
bps.init()
first, done = bps.rank(), 0
while done < 10:
    try:
        if first == 0 and done == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        total = bps.push_pull(np.ones(1000, np.float32), name="x", average=False)
        assert total[0] == bps.size(), total[0]
        done += 1
    except bps.RoundAbortedError as error:
        print(f"rank {first}: {error}")
bps.shutdown()
print(f"rank {first} is well, {first - 1} now")
"""


def test_bps_run_goes_on_without_rank_0(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    command = [harness.binary("bps"), "run", "-np", "3", "--min-np", "2", str(script)]
    env = harness.clean_env(**FAST)
    ended = harness.run_command(command, env=env, within=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    # The launcher may hear of a loss when the others have ended the job.
    assert re.search(r"rank 0 \(pid .*; the job (goes on|is over,) with 2 ranks", ended.stderr), ended.stderr
    for text in ("rank 1 is well, 0 now", "rank 2 is well, 1 now"):
        assert text in ended.stdout, ended.stdout
