# SPDX-License-Identifier: Apache-2.0
"""The way to call an operation of the backend, what it returns, and whether a group may still be called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from bps_rdma.errors import DeadlineError
from bps_rdma.handle import PythonHandle
from bps_rdma.torch.transfer import AnyHandle
from bps_rdma.torch.transfer.dense import Finish


class Call(NamedTuple):
    """The way to call: timeout in seconds, and whether the caller waits next."""

    seconds: float
    awaited: bool


class Pending(NamedTuple):
    """Operations in progress, and what remains to be done once they are over."""

    handles: Sequence[AnyHandle | PythonHandle[Any]] = ()
    finishes: Sequence[Finish] = ()
    whole: torch.Tensor | None = None  # all_gather_parts(): all parts in one tensor, if they are equally large


NOTHING = Pending()


def together(pending: Iterable[Pending]) -> Pending:
    """Several as one."""
    all_of = list(pending)
    return Pending([h for one in all_of for h in one.handles], [f for one in all_of for f in one.finishes])


class Pace:
    """Keeps the calls of a group's ranks together: ends the group after one that was not complete in time.

    Another rank may have called something else then. What this rank calls next could meet what the other one has called
    before, and all later results would be wrong without an error.
    """

    def __init__(self) -> None:
        self._is_lost = False

    def lose(self) -> None:
        """Notes a collective that was not complete in time, once somebody has waited for it."""
        self._is_lost = True

    def check(self) -> None:
        """Raises DeadlineError after a collective that was not complete in time."""
        if self._is_lost:
            raise DeadlineError(
                "an earlier collective of this group was not complete in time, and its ranks may not be in the same "
                "call any more",
                "end the processes, or destroy the group and make it anew on all of its ranks",
            )
