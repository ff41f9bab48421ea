# SPDX-License-Identifier: Apache-2.0
"""The groups that torch has made in a job, counted: each has names of its own for its operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import bps_rdma
from bps_rdma import Group
from bps_rdma.job import current


class CountedGroups:
    """Counts the groups of a job: a job that outlives a default group must not see the names of its operations again.

    Each counts once it is made. Who is interrupted before, as while it waits for the others, makes it again under the
    name that the others give it; torch's own numbers then differ between ranks.
    """

    def __init__(self) -> None:
        self.made = 0  # default groups
        self._others: Counter[tuple[int, ...]] = Counter()  # by their ranks

    @property
    def prefix(self) -> str:
        """The prefix of the names of operations in the current default group."""
        return f"torch {self.made}"

    @property
    def next_prefix(self) -> str:
        """That of the next default group."""
        return f"torch {self.made + 1}"

    def make(self, ranks: Sequence[int]) -> Group:
        """Makes a group of some worker ranks, on all of these."""
        key = tuple(sorted(ranks))
        group = bps_rdma.new_group(ranks, name=f"{self.prefix}.{self._others[key]}")
        self._others[key] += 1
        return group


def counted_groups() -> CountedGroups:
    """Those of the running job."""
    return current().part(CountedGroups)
