# SPDX-License-Identifier: Apache-2.0
"""Two hosts with two rails, one of which is cut in the middle of a job and healed: it costs a moment, and no round.

Both rails are used by default. After the other files of this folder, because the lab is built anew.
"""

import signal
import statistics

import pytest
from harness import PATIENCE
from lab_job import MIB, Job

RATE = 100.0  # Mbit/s
CUT = 1  # the number of the rail; the scheduler is reached by the other one
LOST, BACK = r"a rail to .* is lost: .*; the other rails are used", r"a connection to .* that was lost is back"
ROUNDS = 15  # before, without and after the rail


def more_rounds(job):
    """Waits for some more rounds of every rank."""
    job.await_round(max(event["round"] for rank in (0, 1) for event in job.events(rank, "round")) + ROUNDS)


def carried(lab):
    """Bytes so far on each rail of the first host."""
    return [sum(lab.carried(rail)[0]) for rail in (0, 1)]


def difference(before, after):
    return [b - a for a, b in zip(before, after, strict=True)]


@pytest.mark.parametrize("booted", [(2, 2)], indirect=True, ids=["2 hosts, 2 rails"])
def test_a_rail_is_cut_and_healed(lab):
    lab.shape(RATE)
    with Job(lab.hosts, [], 1_000_000, 4 * MIB, "UNTIL_TOLD", env={"BPS_LOG_LEVEL": "info"}) as job:
        start = carried(lab)
        job.await_round(ROUNDS)
        both = difference(start, carried(lab))
        lab.cut(lab.hosts[1], CUT)
        job.await_lines(LOST)
        start = carried(lab)
        more_rounds(job)
        one = difference(start, carried(lab))
        lab.heal(lab.hosts[1], CUT)
        job.await_lines(BACK)
        start = carried(lab)
        more_rounds(job)
        again = difference(start, carried(lab))
        job.kill("rank 0", signal.SIGUSR1)
        job.finish()
    times = [event["seconds"] for event in job.events(0, "round")]
    longest = max(times) - statistics.median(times)
    print(f"a rail of two cut: {len(times)} rounds, of which the longest took {longest:.2f} s more than the median")
    for rank in (0, 1):
        assert job.events(rank, "counted")[0]["paths_lost"] >= 1
    assert both[CUT] > 0.25 * both[0], "both rails are used"
    assert one[CUT] < 0.1 * one[0], "the other rail carries everything"
    assert again[CUT] > 0.25 * again[0], "the rail is used again"
    assert longest < 3 * PATIENCE, "the switch-over takes less than a second on a quiet machine"
