# SPDX-License-Identifier: Apache-2.0
"""init() on several hosts."""

from harness import PATIENCE
from lab_job import Job

REPEATS = 5  # a news that the kernel misses, it misses in a part of the jobs only


def test_hosts_that_have_not_met_before(lab):
    """A first connection asks for the hardware address of the peer."""
    seconds = []
    for _ in range(REPEATS):
        lab.forget_neighbours()
        with Job(lab.hosts[:3], [], 0, 0, "READY") as job:
            job.finish()
        seconds.append(job.init_seconds())
    print("init() with cold neighbours:", [f"{one:.1f} s" for one in seconds])
    assert max(seconds) < 10 * PATIENCE, seconds  # a miss took half of BPS_JOIN_TIMEOUT
