# SPDX-License-Identifier: Apache-2.0
"""suspend() and resume() in a job with dedicated servers: those, and the scheduler, wait for the workers."""

import os
import re
import signal
import time
from typing import Any

import harness
import numpy as np
import pytest
import torch
from harness import await_mark, mark

import bps_rdma.torch as bps_torch

COUNT = 300_000  # several partitions for each server
TWO = {"DMLC_NUM_WORKER": "2"}  # whatever number of ranks the test starts
PROMPT_S = 3 * harness.PATIENCE  # after so much silence a member of a job that is not suspended would be lost


def my_rank() -> int:
    return int(os.environ["DMLC_WORKER_ID"])


class Model:
    """Something that was wrapped once, and sums that are checked."""

    def __init__(self) -> None:
        self.bps = bps_torch
        self.inner = torch.nn.Linear(2, 1, bias=False)
        self.ddp = bps_torch.DistributedDataParallel(self.inner)

    def get_parameters(self) -> None:
        """All ranks call it, when new ones take part."""
        self.bps.broadcast_parameters(self.inner.state_dict(), root_rank=0)
        weight = self.inner.weight.detach()
        assert torch.allclose(self.bps.push_pull(weight, name="check"), weight), "it is the same on all ranks"

    def train(self, workers: int, steps: int = 3) -> None:
        """Each rank contributes another number, so that one too many or too few would show."""
        rank = self.bps.rank()
        assert self.bps.size() == workers
        array = torch.empty(COUNT)
        for _ in range(steps):
            self.ddp.zero_grad()
            self.ddp(torch.full((1, 2), float(rank + 1))).sum().backward()
            assert self.inner.weight.grad is not None
            assert self.inner.weight.grad[0, 0] == (workers + 1) / 2
            array[:] = rank + 1
            self.bps.push_pull_inplace(array, average=False, name="sum")
            assert array.min() == array.max() == workers * (workers + 1) / 2


def as_two_as_one_as_three(bps: Any) -> None:
    rank = my_rank()
    if rank == 2:
        await_mark("alone", 0)
        bps.init(num_workers=3)
        model = Model()
        model.get_parameters()
        model.train(3)
        bps.shutdown()
        return
    bps.init()
    model = Model()
    model.train(2)
    model.bps.suspend()
    model.bps.resume(2, 2, rank)
    model.train(2)
    model.bps.suspend()
    if rank == 0:
        model.bps.resume(1, 2, 0)
        model.train(1)
        model.bps.suspend()
        mark("alone")
    else:
        await_mark("alone", 0)
    model.bps.resume(3, 2, rank)
    model.get_parameters()
    model.train(3)
    bps.shutdown()


def server_ranks(job: harness.Job) -> dict[str, str]:
    """By name in the test: as which server the process has started."""
    return {
        label: re.findall(r"ready; this is (server \d+)", job.log(label))[0]
        for label in job.helpers
        if label != "scheduler"
    }


def running(job: harness.Job) -> list[str]:
    return [label for label in job.helpers if job.processes[label].status is None]


LEAST = {"BPS_MIN_WORKERS": "1"}


@pytest.mark.parametrize(
    ("transport", "least"),
    [
        ("shm", {}),
        ("tcp", LEAST),
        *(pytest.param(*one, marks=pytest.mark.long) for one in (("shm", LEAST), ("tcp", {}))),
    ],
)
def test_the_same_servers_serve_two_then_one_then_three(transport, least):
    env = harness.over(transport) | TWO | least
    with harness.start(as_two_as_one_as_three, workers=3, servers=2, env=env, init=False) as job:
        job.results()
        for label, server in server_ranks(job).items():
            assert job.log(label).count("the workers have suspended the job") == 3
            assert job.log(label).count("ready again; this is " + server) == 3


def as_three_as_two_as_three(bps: Any) -> list[list[float]]:
    rank = my_rank()
    model = Model()
    found = []

    def train(workers: int) -> None:
        model.train(workers)
        found.append([member["share"] for member in bps.dump()["members"]])

    train(3)
    model.bps.suspend()
    if rank < 2:
        model.bps.resume(2, 1, rank)
        train(2)
        model.bps.suspend()
        mark("two")
    await_mark("two", 0, 1)
    model.bps.resume(3, 1, rank)
    model.get_parameters()
    train(3)
    return found


def test_the_servers_inside_the_workers_come_and_go_with_them():
    """On several hosts these sum beside the dedicated one, as much as is best for so many workers."""
    three, two = [1 / 5, 1 / 5, 1 / 5, 2 / 5], [1 / 4, 1 / 4, 1 / 2]
    first, _, last = harness.run(as_three_as_two_as_three, servers=1, **harness.on_hosts("abc"))
    assert first == [pytest.approx(three, abs=1e-4), pytest.approx(two, abs=1e-4), pytest.approx(three, abs=1e-4)]
    assert last == [first[0], first[2]]


def suspend_and_wait(bps: Any, workers: int) -> None:
    model = Model()
    model.train(2)
    model.bps.suspend()
    mark("suspended")
    await_mark("resume")
    if my_rank() < workers:
        model.bps.resume(workers, global_rank=my_rank())
        model.train(workers)


@pytest.mark.long
@pytest.mark.parametrize("member", ["server 1", "scheduler"])
def test_a_process_that_is_stopped_while_it_waits_goes_on(member):
    env = {"BPS_HEARTBEAT_TIMEOUT": str(PROMPT_S)} | harness.over("tcp")
    with harness.start(suspend_and_wait, 2, workers=2, servers=2, env=env) as job:
        job.await_marks("suspended")
        job.kill(member, signal.SIGSTOP)
        time.sleep(2 * PROMPT_S)  # longer than what must not happen would take
        assert len(running(job)) == 3
        job.kill(member, signal.SIGCONT)
        job.set_mark("resume")
        job.results()


@pytest.mark.parametrize("seconds", [3, pytest.param(10, marks=pytest.mark.long)])
def test_a_server_that_is_stopped_when_the_job_is_resumed_is_waited_for(seconds):
    env = {"BPS_HEARTBEAT_TIMEOUT": str(20 * harness.PATIENCE)} | harness.over("tcp")
    with harness.start(suspend_and_wait, 2, workers=2, servers=2, env=env) as job:
        job.await_marks("suspended")
        job.kill("server 1", signal.SIGSTOP)
        job.set_mark("resume")
        time.sleep(seconds)  # whoever did not wait would have given up
        job.kill("server 1", signal.SIGCONT)
        job.results()


def test_a_server_that_dies_while_it_waits_can_be_replaced():
    with harness.start(suspend_and_wait, 1, workers=2, servers=2, env=harness.over("tcp")) as job:
        job.await_marks("suspended")
        job.kill("server 0")
        job.start_helper("server 0")
        job.set_mark("resume")
        job.results()
        assert " was lost: " in job.log("scheduler")


def fewer_servers(bps: Any) -> None:
    model = Model()
    model.train(2)
    model.bps.suspend()
    model.bps.resume(2, 1, my_rank())
    model.train(2)
    mark("resumed")
    await_mark("end")


def test_servers_that_are_not_wanted_any_more_end():
    with harness.start(fewer_servers, workers=2, servers=2, env=harness.over("tcp")) as job:
        job.await_marks("resumed")
        # One of them: a server that is slow to come may not be waited for.
        kept = job.eventually(
            lambda: [label for label in ("server 0", "server 1") if "ready again" in job.log(label)],
            20, "a server that is ready again", job.ranks,
        )  # fmt: skip
        (spare,) = {"server 0", "server 1"} - set(kept)
        assert job.helper_statuses(but=["scheduler", *kept]) == {spare: 0}
        assert "the workers have resumed the job with fewer servers" in job.log(spare)
        assert running(job) == [label for label in job.helpers if label != spare]
        job.set_mark("end")
        job.results()


def nobody_comes_back(bps: Any, suspends: list[int]) -> None:
    bps.push_pull_inplace(np.ones(COUNT, np.float32), name="x")
    if my_rank() in suspends:
        bps_torch.suspend()
    else:
        bps.shutdown()


@pytest.mark.parametrize("suspends", [pytest.param([0, 1], marks=pytest.mark.long), [1]])
def test_nobody_resumes_the_job(suspends):
    env = {"BPS_RESUME_TIMEOUT": "2"} | harness.over("shm")
    with harness.start(nobody_comes_back, suspends, workers=2, servers=1, env=env) as job:
        job.results()  # all of them have ended well
        for member in ("server 0", "scheduler"):
            assert "it waits 2 s for workers that resume it" in job.log(member)
            assert "nobody has resumed the job for 2 s, and it is over" in job.log(member)


def test_a_setting_lets_servers_end_with_the_workers():
    env = {"BPS_RESUME_TIMEOUT": "0"} | harness.over("shm")
    with harness.start(nobody_comes_back, [0, 1], workers=2, servers=1, env=env) as job:
        job.results()
        assert "suspended" not in job.log("server 0") + job.log("scheduler")


def come_back_alone(bps: Any) -> None:
    model = Model()
    model.train(2)
    if my_rank() == 1:
        model.bps.suspend()
        with pytest.raises(bps.DeadlineError, match=r"was not resumed by all members.* missing rank 0"):
            model.bps.resume(2, join_timeout=3)
    else:
        model.bps.suspend()


def test_not_all_workers_come_back():
    with harness.start(come_back_alone, workers=2, servers=1, env=harness.over("shm")) as job:
        assert [outcome.error for outcome in job.outcomes()] == ["", ""]
        assert job.helper_statuses() == {"scheduler": 1, "server 0": 1}
        assert "missing rank 0" in job.log("server 0")


def go_on_after_a_loss(bps: Any) -> None:
    model = Model()
    model.train(2)
    mark("trained")
    if my_rank() == 1:
        await_mark("never")
    with pytest.raises(bps.PeerLostError, match="worker 1"):
        model.train(2, steps=1 << 30)
    model.bps.suspend()
    model.bps.resume(1, global_rank=0)
    model.train(1)


def test_the_rest_of_a_job_that_was_lost_resumes_it(transport):
    with harness.start(go_on_after_a_loss, workers=2, servers=2, env=harness.over(transport)) as job:
        job.await_marks("trained")
        job.kill("rank 1")
        assert not job.outcomes()[0].error, job.outcomes()[0].error
        assert job.helper_statuses() == {"scheduler": 0, "server 0": 0, "server 1": 0}
