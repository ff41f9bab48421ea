# SPDX-License-Identifier: Apache-2.0
"""The scheduler is lost in a job that may lose members, and started again: its members rejoin, and the job goes on."""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
from harness import await_mark, mark

COUNT = 100_000  # several partitions
LONG = bool(os.environ.get("BPS_TEST_ALL"))
ENV = {
    "BPS_HEARTBEAT_TIMEOUT": str(3 * harness.PATIENCE),
    "BPS_SHUTDOWN_TIMEOUT": str(10 * harness.PATIENCE),
    "BPS_MIN_WORKERS": "2",
    "BPS_SCHEDULER_PATIENCE": str(int(60 * harness.PATIENCE)),
    "BPS_PARTITION_BYTES": "65536",
}


def start(
    tmp_path: Path, body: Any, *args: Any, servers: int = 0, transport: str = "auto", workers: int = 3, **env: str
) -> harness.Job:
    """A job with a scheduler of its own; servers 0: the ranks are the servers, too."""
    given = ENV | harness.over(transport) | {"BPS_SCHEDULER_STATE": str(tmp_path / "state")} | env
    if servers:
        return harness.start(body, *args, workers=workers, servers=servers, env=given)
    ranks = [{"DMLC_ROLE": "joint"}] * workers
    return harness.start(
        body, *args, workers=workers, servers=0, env=given | {"DMLC_NUM_SERVER": str(workers)}, rank_env=ranks
    )


def replace_scheduler(job: harness.Job, signum: signal.Signals = signal.SIGKILL) -> None:
    job.kill("scheduler", signum)
    job.start_helper("scheduler")


def values_of(job: harness.Job, but: tuple[int, ...] = ()) -> list[Any]:
    values = job.values(but=but)
    assert None not in job.helper_statuses().values()
    return values


def step(bps: Any, group: Any = None) -> None:
    """A sum holds one number per rank, so that a contribution too many or too few would show."""
    size = bps.size()
    for name in ("a", "b"):
        summed = bps.push_pull(np.full(COUNT, 1 + bps.rank(), np.float32), average=False, name=name)
        assert summed.min() == summed.max() == size * (size + 1) / 2
    if group is not None:
        pair = bps.push_pull(np.full(9, 1, np.float32), average=False, name="pair", group=group)
        assert (pair == len(group.ranks)).all()


def sums_without_and_with(bps: Any) -> dict[str, Any]:
    """Sums go on while there is no scheduler; once there is one, everything that needs it does."""
    group = bps.new_group([0, 1]) if bps.rank() < 2 else None
    step(bps, group)
    mark("running")
    await_mark("lost")
    for _ in range(10):
        step(bps, group)
    mark("without")
    texts = []
    for needs_it in (bps.commit, lambda: bps.new_group(range(bps.size()), "late"), bps.barrier):
        try:
            needs_it()  # waits for the scheduler
        except bps.RoundAbortedError as error:
            texts.append(str(error))
            needs_it()
    for _ in range(10):
        step(bps, group)
    bps.push_pull(np.zeros(4, np.float32), name="new")
    bps.commit()
    return {"rank": bps.rank(), "size": bps.size(), "texts": texts}


# With servers of their own the loss may be invisible: BPS_SERVER_FAILOVER.
FORMS = pytest.mark.parametrize(("servers", "failover"), [(0, "0"), (2, "0"), (2, "1")])


@FORMS
def test_a_killed_scheduler_is_replaced(tmp_path: Path, transport: str, servers: int, failover: str) -> None:
    with start(tmp_path, sums_without_and_with, servers=servers, transport=transport,
               BPS_SERVER_FAILOVER=failover) as job:  # fmt: skip
        job.await_marks("running")
        job.kill("scheduler")
        job.set_mark("lost")
        job.await_marks("without")
        job.start_helper("scheduler")
        for rank, value in enumerate(values_of(job)):
            assert (value["rank"], value["size"]) == (rank, 3), "everybody keeps his place"
            if failover == "1":
                assert value["texts"] == [], "nothing is interrupted"
            else:
                assert len(value["texts"]) == 1, "one exception for the view that has ended"
                assert "the scheduler was lost and started again" in value["texts"][0]
                assert "view 2" in value["texts"][0]
        assert job.helper_statuses()["scheduler"] == 0, "the job has ended well"
        assert not (tmp_path / "state").exists()


def trains(bps: Any, seconds: float) -> list[tuple[int, int]]:
    """The steps that were committed, each with the size it had: the same on all ranks."""
    committed: list[tuple[int, int]] = []
    deadline = time.monotonic() + seconds
    running = np.ones(1, np.float32)
    while running[0] > 0:
        try:
            step(bps)
            running = bps.push_pull(np.float32([time.monotonic() < deadline]), average=False, name="running")
            bps.commit()
        except bps.RoundAbortedError:
            continue
        committed.append((len(committed), bps.size()))
        if len(committed) == 5:
            mark("running")
    return committed


@pytest.mark.parametrize(("servers", "failover"), [(0, "0"), pytest.param(2, "0", marks=pytest.mark.long), (2, "1")])
def test_no_step_is_lost_or_counted_twice(tmp_path: Path, servers: int, failover: str) -> None:
    """Killed at any moment, also between the answers to a barrier."""
    kills = 40 if LONG else 8
    generator = random.Random(1)
    with start(tmp_path, trains, 0.3 * kills + 2, servers=servers, BPS_SERVER_FAILOVER=failover) as job:
        job.await_marks("running")
        for _ in range(kills):
            time.sleep(generator.uniform(0.0, 0.3))
            replace_scheduler(job)
        steps = values_of(job)
        assert steps[0] == steps[1] == steps[2]
        assert {size for _, size in steps[0]} == {3}


@pytest.mark.long
@pytest.mark.parametrize("first", ["scheduler", "rank 1"])
@pytest.mark.parametrize("servers", [0, 2])
def test_a_rank_is_lost_as_well(tmp_path: Path, servers: int, first: str) -> None:
    """In the view that the scheduler was lost in, or while it ends it."""
    with start(tmp_path, trains, 8, servers=servers) as job:
        job.await_marks("running")
        both = [first, "rank 1" if first == "scheduler" else "scheduler"]
        for member in both:
            job.kill(member)
        job.start_helper("scheduler")
        steps = values_of(job, but=(1,))
        assert steps[0] == steps[1]
        assert steps[0][-1][1] == 2


def ends_without(bps: Any) -> list[str]:
    step(bps)
    mark("running")
    await_mark("lost")
    step(bps)
    texts = []
    with pytest.raises(bps.PeerLostError) as lost:
        bps.barrier()
    texts.append(str(lost.value))
    step(bps)
    return texts


def test_without_another_scheduler_sums_go_on(tmp_path: Path) -> None:
    with start(tmp_path, ends_without, servers=2, BPS_SCHEDULER_PATIENCE="1") as job:
        job.await_marks("running")
        job.kill("scheduler")
        job.set_mark("lost")
        for texts in values_of(job):
            assert "there was no other one for 1.0 s" in texts[0]


def is_refused(bps: Any) -> str:
    step(bps)
    mark("running")
    await_mark("lost")
    with pytest.raises(bps.PeerLostError) as lost:
        wait_forever(bps)
    return str(lost.value)


def wait_forever(bps: Any) -> None:
    while True:
        bps.barrier()


def test_the_scheduler_of_another_run_takes_nobody_over(tmp_path: Path) -> None:
    """Processes of an earlier run that are left do not disturb the next one of the same name."""
    with start(tmp_path, is_refused, servers=0) as job:
        job.await_marks("running")
        job.kill("scheduler")
        job.wait("scheduler", 20)
        (tmp_path / "state").unlink()
        job.start_helper("scheduler")
        job.set_mark("lost")
        for value in [outcome.value for outcome in job.outcomes()]:
            assert "another run of the job has begun" in value
        job.kill("scheduler")  # it waits for its own job


@pytest.mark.long_over("tcp")
def test_a_stopped_scheduler_steps_down_and_is_replaced(tmp_path: Path, transport: str) -> None:
    with start(tmp_path, sums_without_and_with, servers=2, transport=transport) as job:
        job.await_marks("running")
        job.kill("scheduler", signal.SIGSTOP)
        time.sleep(5 * harness.PATIENCE)  # longer than BPS_HEARTBEAT_TIMEOUT
        job.set_mark("lost")
        job.await_marks("without")
        job.kill("scheduler", signal.SIGCONT)
        assert job.wait("scheduler", 20) == 75, "it steps down"
        job.start_helper("scheduler")
        assert [value["size"] for value in values_of(job)] == [3, 3, 3]


LAUNCHED = """
import contextlib, os, pathlib, signal, sys, time
import numpy as np
import bps_rdma as bps
bps.init()
committed, killed = 0, False
while committed < 30:
    try:
        assert (bps.push_pull(np.ones(8, np.float32), name="x", average=False) == bps.size()).all()
        bps.commit()
        committed += 1
    except bps.RoundAbortedError:
        continue
    if committed == 10 and bps.rank() == 0 and not killed:
        killed = True
        for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
            try:
                name, fields = stat.read_text().rsplit(")", 1)
            except OSError:
                continue
            if name.endswith("(bps-scheduler") and int(fields.split()[1]) == os.getppid():
                os.kill(int(stat.parent.name), signal.Signals[sys.argv[1]])
                with contextlib.suppress(OSError):  # otherwise the job could be over before the scheduler notices
                    while stat.read_text().rsplit(")", 1)[1].split()[0] != "Z":
                        time.sleep(0.01)
bps.shutdown()
"""


@pytest.mark.parametrize(
    ("servers", "signame", "how"),
    [
        ((), "SIGKILL", "was killed by SIGKILL"),
        pytest.param(("--servers", "2"), "SIGKILL", "was killed by SIGKILL", marks=pytest.mark.long),
        ((), "SIGTERM", "ended with status 143"),
    ],
)
def test_bps_run_starts_its_scheduler_again(tmp_path: Path, servers: tuple[str, ...], signame: str, how: str) -> None:
    script = tmp_path / "rank.py"
    script.write_text(LAUNCHED)
    words = [harness.binary("bps"), "run", "-np", "3", "--min-np", "2", *servers, str(script), signame]
    ended = harness.run_command(words, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert f"{how}; it is started again" in ended.stderr
    assert "RoundAborted" not in ended.stderr
