# SPDX-License-Identifier: Apache-2.0
"""Hosts that die or hang, and cables that are pulled, in mid-round. With default settings."""

import re
import time

import pytest
from harness import PATIENCE
from lab_job import MIB, Job

ENDLESS = 1_000_000
long = pytest.mark.long
SILENCE_S = 20.0  # the time-out of heartbeats is 10; kernels of user mode on a busy machine add some seconds


def names(text: str, *members: str) -> bool:
    return any(re.search(rf"\b{member}\b", text) for member in members)


# Which host, and who is lost with it. h0 and h1: workers; h2: the scheduler and a server; h3: the other server. Servers
# are numbered as they come.
WORKER, SCHEDULER, SERVER = (1, ("rank 1", "worker 1")), (2, ("scheduler", r"server \d")), (3, (r"server \d",))


@pytest.mark.parametrize(
    ("end", "victim", "lost"),
    [
        pytest.param("kill", *WORKER, id="kill-worker"),
        pytest.param("kill", *SCHEDULER, id="kill-scheduler"),
        pytest.param("kill", *SERVER, id="kill-server"),
        pytest.param("freeze", *WORKER, id="freeze-worker", marks=long),
        pytest.param("freeze", *SCHEDULER, id="freeze-scheduler", marks=long),
        pytest.param("freeze", *SERVER, id="freeze-server"),
    ],
)
def test_a_host_that_dies_or_hangs(lab, victim, lost, end):
    with Job(lab.hosts[:2], lab.hosts[2:], ENDLESS, MIB) as job:
        job.await_round(3)
        moment = getattr(lab.hosts[victim], end)()
        for rank in {0, 1} - {victim}:
            error = job.loss(rank, 30)
            print(end, victim, "rank", rank, error["at"] - moment, error["text"])
            assert error["at"] - moment < SILENCE_S * PATIENCE, error
            assert names(error["text"], *lost), error


@pytest.mark.parametrize("victim", [pytest.param(1, id="worker"), pytest.param(3, id="server", marks=long)])
def test_a_cable_that_is_pulled(lab, victim):
    """Everybody learns it, also the host that is cut off."""
    with Job(lab.hosts[:2], lab.hosts[2:], ENDLESS, MIB) as job:
        job.await_round(3)
        moment = time.monotonic()
        lab.cut(lab.hosts[victim])
        for rank in (0, 1):
            error = job.loss(rank, 30)
            print("cut", victim, "rank", rank, error["at"] - moment, error["text"])
            assert error["at"] - moment < SILENCE_S * PATIENCE, error


@pytest.mark.parametrize("victim", [1, 2, 3], ids=["worker", "scheduler", "server"])
def test_a_cable_that_is_out_for_a_second(lab, victim):
    with Job(lab.hosts[:2], lab.hosts[2:], 40, MIB) as job:
        job.await_round(3)
        lab.cut(lab.hosts[victim])
        job.processes["rank 0"].wait(1)  # a second, unless the job ends
        lab.heal(lab.hosts[victim])
        job.finish()
