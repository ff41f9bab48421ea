# SPDX-License-Identifier: Apache-2.0
"""Names that ranks give to what they make: the same on all of them when they make the same things in the same order."""

from __future__ import annotations

from collections import Counter

from bps_rdma import job


class Names:
    """The names given out in one job."""

    outlives_view = True  # what has them stays

    def __init__(self) -> None:
        self.given: Counter[str] = Counter()


def unique(prefix: str) -> str:
    """A name that nothing else in the job has: "ddp 0", "ddp 1", "ddp 2", ..."""
    given = job.current().part(Names).given
    given[prefix] += 1
    return f"{prefix} {given[prefix] - 1}"
