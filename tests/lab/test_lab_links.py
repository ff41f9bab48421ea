# SPDX-License-Identifier: Apache-2.0
"""A link that becomes slow while a job runs, and is fast again later: what servers sum follows it over RDMA."""

from __future__ import annotations

import itertools
import signal

import pytest
from harness import PATIENCE
from lab_job import MIB, Job

RATE = 100.0  # Mbit/s
SPARE = 3
FULL = 0.4  # of all sums: its part where all links are equal. A busy machine makes them differ
DROP_S, RETURN_S = 120, 240
SETTINGS = {"BPS_PLACEMENT_SECONDS": "1"}  # between two changes


@pytest.mark.timeout((DROP_S + RETURN_S + 240) * PATIENCE)
def test_servers_follow_a_link_over_rdma(lab):
    lab.shape(RATE)
    spare = lab.hosts[SPARE]
    with Job(lab.hosts[:SPARE], [spare], 1_000_000, 4 * MIB, "UNTIL_TOLD", env=SETTINGS) as job:
        job.await_round(3)
        lab.shape(RATE / 4, hosts=[spare])
        job.eventually(lambda: job.shares_now()[SPARE] < FULL / 2, DROP_S, what="less for the slow link")
        lab.shape(RATE, hosts=[spare])
        job.eventually(lambda: job.shares_now()[SPARE] > FULL * 0.75, RETURN_S, what="all of it for the fast link")
        job.kill("rank 0", signal.SIGUSR1)
        job.finish()
    parts = [round(event["shares"][SPARE], 3) for event in job.events(0, "round")]
    print("part of all sums of the spare host:", ", ".join(str(part) for part, _ in itertools.groupby(parts)))
