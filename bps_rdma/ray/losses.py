# SPDX-License-Identifier: Apache-2.0
"""Members that a job goes on without (BPS_MIN_WORKERS), and those that are started again in their place."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from bps_rdma.launch.run import MOST_SCHEDULERS, SCHEDULERS_WITHIN
from bps_rdma.ray.errors import Failure, Kind
from bps_rdma.ray.group import Actor, Group
from bps_rdma.ray.nodes import answers

_log = logging.getLogger(__name__)

_RECENTLY_S = 5.0
_NEWCOMERS_FOLLOW_S = 10.0


class Losses:
    """Decides, for each failure, whether the job goes on.

    Args:
        group: the members.
        pickled: what ranks that are started again run.
        least: the job goes on while that many ranks are left; 0: with all only.
        restarts: how often lost members are started again, all together.
    """

    def __init__(self, group: Group, pickled: Any, least: int, restarts: int) -> None:
        self._group = group
        self._pickled = pickled
        self._least = least
        self._restarts = restarts
        self._lost: dict[str, tuple[float, Failure]] = {}  # by label
        self._past: list[tuple[float, Failure]] = []
        self._newcomers: set[str] = set()
        self._over_at: float | None = None
        self._schedulers_lost: list[float] = []

    def goes_on(self, actor: Actor, failure: Failure, waiting: Mapping[Any, Actor]) -> bool:
        """Note the end of a member; whether enough others are left. `waiting` are those that have not ended."""
        if not self._least or (actor is self._group.scheduler and not self._may_replace_scheduler(actor, failure)):
            return False
        self._lost[actor.label] = (time.monotonic(), failure)
        self._past.append(self._lost[actor.label])
        if actor is self._group.scheduler:
            return True
        if actor in self._group.servers:
            return any(other in self._group.servers for other in waiting.values())
        return self._ranks_left() >= self._least

    def start_again(self, actor: Actor, waiting: Mapping[Any, Actor]) -> tuple[Any, Actor | None]:
        """Start a lost member again, if that may be; its future, and itself."""
        _, failure = self._lost[actor.label]
        left = f"{self._ranks_left()} of {len(self._group.ranks)} ranks"
        if actor is self._group.scheduler:
            _log.warning("%s; it is started again", failure.describe())
            del self._lost[actor.label]
            return self._group.start_again(actor, self._pickled)
        others = any(other in self._group.ranks for other in waiting.values())
        if self._restarts == 0 or not others or self._over_at is not None:
            _log.warning("%s; the job goes on with %s", failure.describe(), left)
            return None, None
        self._restarts -= 1
        _log.warning("%s; the job goes on with %s, and it is started again", failure.describe(), left)
        ref, again = self._group.start_again(actor, self._pickled)
        del self._lost[actor.label]
        self._newcomers.add(again.label)
        return ref, again

    def recent(self) -> list[Failure]:
        """What may be the cause of a failure that the job does not survive: earlier losses of the last seconds."""
        since = time.monotonic() - _RECENTLY_S
        return [failure for at, failure in self._past if at > since][:-1]  # the last one is this failure

    def _may_replace_scheduler(self, actor: Actor, failure: Failure) -> bool:
        """Members look for another one at the address of the lost one, so not when its node has gone."""
        now = time.monotonic()
        recent = [at for at in self._schedulers_lost if at > now - SCHEDULERS_WITHIN]
        self._schedulers_lost = [*recent, now]
        may = self._group.waits_for_schedulers and len(recent) + 1 < MOST_SCHEDULERS
        return may and failure.kind is Kind.DIED and answers(actor)

    def _ranks_left(self) -> int:
        return sum(1 for rank in self._group.ranks if rank.label not in self._lost)

    def note_end(self, actor: Actor) -> None:
        """Note that a member has ended as it should."""
        if actor is self._group.scheduler:  # which ends when all members have left
            self._over_at = time.monotonic()

    def left_for_newcomers(self, waiting: Mapping[Any, Actor]) -> float | None:
        """Seconds until ranks that are not in the job need not be waited for; None: those that wait may be in it."""
        ranks = [actor for actor in waiting.values() if actor in self._group.ranks]
        if self._over_at is None or any(rank.label not in self._newcomers for rank in ranks):
            return None
        return max(0.0, self._over_at + _NEWCOMERS_FOLLOW_S - time.monotonic())
