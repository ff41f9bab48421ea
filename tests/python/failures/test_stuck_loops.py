# SPDX-License-Identifier: Apache-2.0
"""A process whose loops make no progress is lost, even if its connection to the scheduler lives on."""

from typing import Any

import harness
import numpy as np
from bodies.arrays import caught
from harness import await_mark, mark
from harness.freeze import freeze, frozen, thread_of

HEARTBEAT_S = 6 * harness.PATIENCE
FAST = {"BPS_HEARTBEAT_TIMEOUT": str(HEARTBEAT_S), "BPS_SHUTDOWN_TIMEOUT": str(2 * harness.PATIENCE)}


def meets_the_other_later(bps: Any) -> str:
    """Rank 0 waits where no loop takes part, so that only the scheduler can notice.

    The sum comes first: a loop that sets something up for a peer may take its time, and does not count as stuck.
    """
    bps.push_pull(np.ones(1000), name="x")
    bps.barrier()
    mark("ready")
    if bps.rank() == 1:
        await_mark("over")
    return caught(bps.barrier)


def test_a_process_with_a_stuck_loop_is_lost():
    with harness.start(meets_the_other_later, env=FAST) as job:
        job.await_marks("ready")
        with frozen(thread_of(job.pid("rank 1"), "bps-loop-0")):
            job.wait("rank 0")
        job.set_mark("over")
        errors = [outcome.value for outcome in job.outcomes()]
    assert errors[0].startswith("PeerLostError"), errors
    assert "worker 1" in errors[0], errors
    assert "silent" in errors[0], errors
    assert errors[1].startswith("PeerLostError"), errors


def test_a_loop_that_is_stopped_for_a_moment_changes_nothing():
    with harness.start(meets_the_other_later, env=FAST) as job:
        job.await_marks("ready")
        freeze(thread_of(job.pid("rank 1"), "bps-loop-0"), 0.25 * HEARTBEAT_S)
        job.set_mark("over")
        assert job.results() == ["", ""]
