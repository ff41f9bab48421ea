# SPDX-License-Identifier: Apache-2.0
"""Ranks that sum on their host first: what is urgent overtakes on both levels, and a lost server is lost to both.

The hosts of these jobs are one machine, told apart by BPS_HOST_ID.
"""

from __future__ import annotations

import re
import signal
import time
from typing import Any

import harness
import numpy as np
import pytest
from bodies.arrays import QUIET_S, changed, make
from bodies.call_order import urgent_behind_bulk
from bodies.hosts import SMALL_PARTITIONS, used
from bodies.losses import FAST, SOON_S
from harness import await_mark, mark

PIECE = {"BYTEPS_PARTITION_BYTES": "8000", "BPS_MIN_PARTITION_BYTES": "8000", "BYTEPS_SERVER_ENGINE_THREAD": "1"}
# One piece at a time from the ranks to their relay; or as many as they like, which then wait there for the server.
FROM_THE_RANKS, FROM_THE_RELAY = {"BYTEPS_SCHEDULING_CREDIT": "1"}, {"BPS_SERVER_WINDOW": "1"}


def overtaken(bps: Any, urgency: int) -> tuple[bool, int, bool, int]:
    return *urgent_behind_bulk(bps, urgency), used(bps)


@pytest.mark.long
@pytest.mark.parametrize("servers", [None, 1])
@pytest.mark.parametrize("held_up", [FROM_THE_RANKS, FROM_THE_RELAY], ids=["ranks", "relay"])
def test_an_urgent_tensor_overtakes_a_large_one_on_other_hosts(held_up, servers):
    options = {"servers": servers, "env": PIECE | held_up, **harness.on_hosts("aabb")}
    urgent, patient = (harness.run(overtaken, urgency, **options) for urgency in (10, -10))
    for found in (urgent, patient):
        assert all(right for _, _, right, _ in found)
        assert sum(host_sums for *_, host_sums in found) > 1000, "the hosts did not sum first"
    assert not any(bulk_was_over for bulk_was_over, *_ in urgent)
    # A relay has half of the bulk, of which a rank counts its own pieces, and as a relay those of its host, too.
    assert all(pieces >= 490 for _, pieces, *_ in patient), "a less urgent tensor overtook"
    assert sum(pieces for _, pieces, *_ in urgent) < sum(pieces for _, pieces, *_ in patient)


def rounds_until_a_server_is_lost(bps: Any, memory: str) -> tuple[str, float, str]:
    """What was said of the loss, when, and what changed the array after that."""
    array = make(bps, memory, 300_000)
    for round_ in range(1_000_000):
        array.fill(bps.rank() + 1)
        try:
            bps.push_pull_inplace(array, False, "x")
        except bps.PeerLostError as error:
            text, at = str(error), time.monotonic()
            break
        if round_ == 5:
            assert sum(bps.all_gather(np.array([used(bps)]), "used")) > 0, "the hosts do not sum first"
            mark("running")
        wrong = changed(array, bps.size() * (bps.size() + 1) / 2)
        assert not wrong, (round_, wrong)
    array.fill(1000)
    mark("raised")
    await_mark("raised", *range(4))
    time.sleep(QUIET_S)
    return text, at, changed(array, 1000)


@pytest.mark.parametrize("memory", ["plain", "mapped"])
@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)])
def test_a_lost_server_is_named_on_all_hosts(memory, how):
    options = {"servers": 2, "env": SMALL_PARTITIONS | FAST, **harness.on_hosts("aabb")}
    with harness.start(rounds_until_a_server_is_lost, memory, **options) as job:
        job.await_marks("running")
        pid = job.pid("server 1")  # servers are numbered as they come
        lost = job.kill("server 1", how)
        outcomes = job.outcomes()
        left = job.helper_statuses(but=["server 1"])
    for rank, outcome in enumerate(outcomes):
        assert outcome.value, (rank, outcome)
        text, at, wrong = outcome.value
        assert re.search(rf"server \d .*pid {pid}\)", text), (rank, text)
        assert at - lost < SOON_S, (rank, text)
        assert wrong == "", (rank, wrong)
    assert None not in left.values(), f"still running: {left}"
