# SPDX-License-Identifier: Apache-2.0
"""A server is lost, and nobody notices: over RDMA."""

import signal

import harness
import pytest
from bodies import failover


def env() -> dict[str, str]:
    return failover.env("rdma")


@pytest.mark.parametrize("signum", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)])
def test_a_lost_server_costs_nothing(signum: signal.Signals) -> None:
    with harness.start(failover.train, 40, workers=2, servers=2, env=env()) as job:
        job.await_marks("step-10")
        job.kill("server 1", signum)
        assert [result["size"] for result in job.values()] == [2, 2]
        if signum == signal.SIGSTOP:
            job.kill("server 1", signal.SIGKILL)
        job.helper_statuses(but=["server 1"])


@pytest.mark.long
def test_two_of_three_servers_are_killed_at_once() -> None:
    with harness.start(failover.train, 60, workers=3, servers=3, env=env()) as job:
        job.await_marks("step-20")
        job.kill("server 2")
        job.kill("server 0")
        assert [result["size"] for result in job.values()] == [3, 3, 3]
        job.helper_statuses(but=["server 0", "server 2"])
