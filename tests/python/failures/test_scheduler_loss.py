# SPDX-License-Identifier: Apache-2.0
"""The scheduler is lost in a job that may lose members: sums go on, and only what needs the scheduler fails."""

import signal
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
from harness import await_mark, mark

COUNT = 300_000  # several partitions
ENV = {
    "BPS_HEARTBEAT_TIMEOUT": str(3 * harness.PATIENCE),
    "BPS_SHUTDOWN_TIMEOUT": str(5 * harness.PATIENCE),
    "BPS_MIN_WORKERS": "2",
}


def check_sums(bps: Any, group: Any, steps: int) -> None:
    """Every collective on names that are declared; a sum holds one number per rank."""
    size, whole = bps.size(), bps.size() * (bps.size() + 1) / 2
    for _ in range(steps):
        if bps.rank() < 2:
            pair = bps.push_pull(np.full(9, 1 + bps.rank(), np.float32), average=False, name="p", group=group)
            assert (pair == 3).all()
        mine = np.full(COUNT, 1 + bps.rank(), np.float32)
        assert (bps.push_pull(mine, average=False, name="a") == whole).all()
        gathered = bps.all_gather(np.full(3, bps.rank(), np.float32), name="g")
        assert gathered.reshape(size, 3)[:, 0].tolist() == list(range(size))
        root = bps.broadcast(np.full(5, bps.rank(), np.float32), 1, name="b")
        assert (root == 1).all()


def until_and_after(bps: Any) -> list[str]:
    """Sums before, across and long after the loss; then returns what fails without the scheduler."""
    group = bps.new_group([0, 1]) if bps.rank() < 2 else None
    check_sums(bps, group, 2)
    mark("running")
    await_mark("lost")
    check_sums(bps, group, 5)  # the loss has not been noticed yet, perhaps
    texts = []
    with pytest.raises(bps.PeerLostError) as lost:
        bps.barrier()  # a scheduler that is stopped is lost after the heartbeat's time-out
    texts.append(str(lost.value))
    check_sums(bps, group, 20)
    for call in (
        bps.commit,
        lambda: bps.new_group(range(bps.size()), "late"),
        lambda: bps.push_pull(np.zeros(4, np.float32), name="new"),
    ):
        with pytest.raises(bps.PeerLostError) as lost:
            call()
        texts.append(str(lost.value))
    check_sums(bps, group, 1)
    mark("through")
    await_mark("through", *range(3))  # shutdown() waits for nobody: a rank that is a server would leave too early
    return texts


def start(servers: int, transport: str, body: Any = until_and_after) -> harness.Job:
    env = ENV | harness.over(transport)
    if servers:
        return harness.start(body, workers=3, servers=servers, env=env)
    ranks = [{"DMLC_ROLE": "joint"}] * 3
    return harness.start(body, workers=3, servers=0, env=env | {"DMLC_NUM_SERVER": "3"}, rank_env=ranks)


@pytest.mark.parametrize("servers", [0, 2])
@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)])
def test_sums_go_on_without_the_scheduler(transport: str, servers: int, how: signal.Signals) -> None:
    with start(servers, transport) as job:
        job.await_marks("running")
        job.kill("scheduler", how)
        job.set_mark("lost")
        for rank, texts in enumerate(job.values()):
            for text in texts:
                assert "scheduler" in text
                assert "sums of declared names go on" in text
            assert "sums of declared names go on" in job.log(f"rank {rank}"), "it is said once, when it happens"
        # Dedicated servers end with their last worker, and not before.
        assert None not in job.helper_statuses(but=["scheduler"]).values()


def stopped_and_going_on(bps: Any) -> int:
    group = bps.new_group([0, 1]) if bps.rank() < 2 else None
    check_sums(bps, group, 1)
    mark("running")
    await_mark("lost")
    with pytest.raises(bps.PeerLostError):
        bps.barrier()
    mark("noticed")
    await_mark("going-on")
    check_sums(bps, group, 20)
    with pytest.raises(bps.PeerLostError, match="scheduler"):
        bps.barrier()
    return int(bps.size())


@pytest.mark.long_over("shm")
def test_a_stopped_scheduler_that_goes_on_changes_nothing(transport: str) -> None:
    with start(2, transport, stopped_and_going_on) as job:
        job.await_marks("running")
        job.kill("scheduler", signal.SIGSTOP)
        job.set_mark("lost")
        job.await_marks("noticed")
        job.kill("scheduler", signal.SIGCONT)
        assert job.wait("scheduler", 20) == 75, "it steps down"
        job.set_mark("going-on")
        assert job.values() == [3] * job.workers


def loses_a_rank_as_well(bps: Any) -> str:
    bps.push_pull(np.zeros(8, np.float32), name="x")
    mark("running")
    await_mark("lost")
    with pytest.raises(bps.PeerLostError) as lost:
        sum_forever(bps)
    mark("told")
    await_mark("told", 0, 2)  # one that ends now would be a loss to the other one, too
    return str(lost.value)


def sum_forever(bps: Any) -> None:
    while True:
        bps.push_pull(np.zeros(8, np.float32), name="x")


@pytest.mark.parametrize("servers", [0, 2])
def test_a_rank_that_is_lost_as_well_ends_the_others(transport: str, servers: int) -> None:
    with start(servers, transport, loses_a_rank_as_well) as job:
        job.await_marks("running")
        job.kill("scheduler")
        job.set_mark("lost")
        job.kill("rank 1")
        for value in job.values(but=[1]):
            assert "worker 1" in value
            assert "scheduler" in value, "why there is no next view"


LAUNCHED = """
import os, pathlib, signal, time
import numpy as np
import bps_rdma as bps
bps.init()
while True:
    try:
        bps.push_pull(np.ones(8, np.float32), name="x")
        bps.barrier()
        if bps.rank() == 0:
            for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
                try:
                    name, fields = stat.read_text().rsplit(")", 1)
                except OSError:
                    continue
                if name.endswith("(bps-scheduler") and int(fields.split()[1]) == os.getppid():
                    os.kill(int(stat.parent.name), signal.SIGKILL)
        bps.barrier()
    except bps.RoundAbortedError:
        continue
    except bps.PeerLostError:
        break
for _ in range(20):
    assert (bps.push_pull(np.ones(8, np.float32), name="x", average=False) == bps.size()).all()
pathlib.Path(f"through-{bps.rank()}").touch()
while not all(pathlib.Path(f"through-{rank}").exists() for rank in range(bps.size())):
    time.sleep(0.01)
bps.shutdown()
"""


@pytest.mark.parametrize("servers", [(), pytest.param(("--servers", "2"), marks=pytest.mark.long)])
def test_bps_run_gives_its_scheduler_up_in_the_end(tmp_path: Path, servers: tuple[str, ...]) -> None:
    script = tmp_path / "rank.py"
    script.write_text(LAUNCHED)
    words = [harness.binary("bps"), "run", "-np", "3", "--min-np", "2", *servers, str(script)]
    env = harness.clean_env(BPS_SCHEDULER_PATIENCE="5")  # a scheduler that is started again needs a moment
    ended = harness.run_command(words, env=env, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("was killed by SIGKILL; it is started again") == 9, ended.stderr
    assert ended.stderr.count("was killed by SIGKILL; the ranks go on without it") == 1, ended.stderr
