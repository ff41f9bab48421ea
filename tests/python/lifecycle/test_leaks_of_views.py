# SPDX-License-Identifier: Apache-2.0
"""Views follow each other, and leave nothing behind: memory, descriptors and threads are what they were."""

import gc
import os
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
from harness import await_mark, mark

LONG = bool(os.environ.get("BPS_TEST_ALL"))
CHANGES, ROUNDS = (100, 1000) if LONG else (20, 50)  # of views; in each view
SETTLED = CHANGES // 5  # views after which nothing grows any more
ENV = {
    "BPS_HEARTBEAT_TIMEOUT": str(5 * harness.PATIENCE),
    "BPS_SHUTDOWN_TIMEOUT": str(10 * harness.PATIENCE),
    "BPS_MIN_WORKERS": "2",
    "BPS_PARTITION_BYTES": "65536",
}
LIMITS = {"resident": 8192, "descriptors": 2, "threads": 0}  # KiB, and numbers


def footprint(pid: int | str = "self") -> dict[str, int]:
    """What a process holds."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "resident": int(status["VmRSS"].split()[0]),
        "descriptors": sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()),
        "threads": int(status["Threads"]),
    }


def check(before: dict[str, int], after: dict[str, int]) -> None:
    grown = {name: after[name] - before[name] for name in before}
    assert all(grown[name] <= limit for name, limit in LIMITS.items()), grown


def sums_across_views(bps: Any) -> dict[str, Any]:
    """Sums in every view, and says so; a group is made anew in each of them by the job itself."""
    from bps_rdma import job

    pair = bps.new_group([0, 1])
    shared = bps.empty(20_000)
    found: dict[str, Any] = {"rounds": 0, "views": 0}
    rounds, epoch = 0, 1
    through = False
    while not through:
        try:
            view = job.current().process.epoch
            if view != epoch:
                epoch, rounds = view, 0
                found["views"] += 1
            shared[...] = 1 + bps.rank()
            # With failover one rank may be an operation further than the other when it learns of a view, so that their
            # counts differ by one: they end after the same operation because its sum tells them to.
            shared[0] = found["views"] >= CHANGES and rounds >= ROUNDS
            bps.push_pull_inplace(shared, name="shared", average=False)
            agreed = shared[0] == 2
            assert shared[1:].min() == shared[1:].max() == 3
            plain = bps.push_pull(np.full(20_000, 1 + bps.rank(), np.float32), name="plain", average=False, group=pair)
            assert plain.min() == plain.max() == 3
        except bps.RoundAbortedError:
            continue
        through = agreed
        rounds += 1
        found["rounds"] += 2
        if rounds == ROUNDS:
            gc.collect()
            if found["views"] == SETTLED:
                found["before"] = footprint()
            mark(f"enough-{found['views']}")
    found["after"] = footprint()
    await_mark("looked at")
    bps.barrier()
    return found


@pytest.mark.long
@pytest.mark.timeout(1800 if LONG else 300)
@pytest.mark.parametrize("failover", ["0", "1"])
def test_views_leave_nothing(transport: str, failover: str) -> None:
    env = ENV | harness.over(transport) | {"BPS_SERVER_FAILOVER": failover}
    with harness.start(sums_across_views, workers=2, servers=2, env=env) as job:
        before: dict[str, dict[str, int]] = {}
        stays = ("server 0", "scheduler")
        for change in range(CHANGES + 1):
            job.await_marks(f"enough-{change}", timeout=100)
            if change == SETTLED:
                before = {member: footprint(job.pid(member)) for member in stays}
            if change == CHANGES:
                break
            if change % 2 == 0:
                job.kill("server 1")
                job.wait("server 1", 20)
            else:
                job.start_helper("server 1")  # it enters at once
        for member in stays:
            check(before[member], footprint(job.pid(member)))
        job.set_mark("looked at")
        for value in job.values():
            assert value["rounds"] >= CHANGES * ROUNDS
            check(value["before"], value["after"])
