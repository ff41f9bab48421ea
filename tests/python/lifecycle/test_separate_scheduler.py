# SPDX-License-Identifier: Apache-2.0
"""Jobs whose ranks are the servers, too, with a scheduler that is a process of its own: BPS_ROLE=joint."""

from typing import Any

import harness
import numpy as np
import pytest

from bps_rdma.errors import PeerLostError


def job(body: Any, servers: int = 2, workers: int = 2) -> harness.Job:
    ranks = [{"DMLC_ROLE": "joint"}] * workers
    return harness.start(body, workers=workers, servers=0, env={"DMLC_NUM_SERVER": str(servers)}, rank_env=ranks)


def sums(bps: Any) -> float:
    return float(bps.push_pull(np.float32([bps.rank() + 1]), average=False, name="x")[0])


@pytest.mark.parametrize("workers", [1, 2])
def test_ranks_are_servers(workers: int) -> None:
    with job(sums, servers=workers, workers=workers) as running:
        assert [outcome.value for outcome in running.outcomes()] == [sum(range(1, workers + 1))] * workers


def until_it_is_lost(bps: Any) -> str:
    harness.mark("runs")
    with pytest.raises(PeerLostError) as lost:
        forever(bps)
    return str(lost.value)


def forever(bps: Any) -> None:
    while True:
        bps.push_pull(np.zeros(8, np.float32), name="x")


def test_no_rank_is_blamed_for_its_end() -> None:
    with job(until_it_is_lost) as running:
        running.await_marks("runs")
        running.kill("scheduler")
        for outcome in running.outcomes():
            assert "scheduler" in outcome.value
            assert "hosts it" not in outcome.value


def test_the_number_of_servers_is_that_of_ranks() -> None:
    with job(sums, servers=3) as running:
        assert all("BPS_NUM_SERVERS is 3" in outcome.error for outcome in running.outcomes())
