# SPDX-License-Identifier: Apache-2.0
"""A process whose loops make no progress is lost, even if its connection to the scheduler lives on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import harness
from bodies.arrays import caught
from harness import await_mark, mark
from harness.freeze import freeze

HEARTBEAT_S = 1.5 * harness.PATIENCE
FAST = {"BPS_HEARTBEAT_TIMEOUT": str(HEARTBEAT_S), "BPS_SHUTDOWN_TIMEOUT": str(2 * harness.PATIENCE)}


def meets_the_other_later(bps: Any) -> str:
    """Rank 0 waits where no loop takes part, so that only the scheduler can notice."""
    bps.barrier()
    mark("ready")
    if bps.rank() == 1:
        await_mark("over")
    return caught(bps.barrier)


def a_loop_of(pid: int) -> int:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return next(int(task.name) for task in tasks if (task / "comm").read_text().startswith("bps-loop"))


def stopped_for(seconds: float) -> list[str]:
    """How both ranks end when a loop of rank 1 is stopped for so long."""
    with harness.start(meets_the_other_later, env=FAST) as job:
        job.await_marks("ready")
        freeze(a_loop_of(job.pid("rank 1")), seconds)
        job.set_mark("over")
        return [outcome.value for outcome in job.outcomes()]


def test_a_process_with_a_stuck_loop_is_lost():
    errors = stopped_for(3 * HEARTBEAT_S)
    assert errors[0].startswith("PeerLostError"), errors
    assert "worker 1" in errors[0], errors
    assert "silent" in errors[0], errors
    assert errors[1].startswith("PeerLostError"), errors


def test_a_loop_that_is_stopped_for_a_moment_changes_nothing():
    assert stopped_for(0.5 * HEARTBEAT_S) == ["", ""]
