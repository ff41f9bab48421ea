# SPDX-License-Identifier: Apache-2.0
"""Watches the members of a job: collects results, and decides which failures end the job.

With BPS_MIN_WORKERS a job goes on without lost members, and some are started again in their place. Where several fail,
the message names the one that failed first. Where ranks do not return in time, it says what they do: their actors are
busy with the training function and cannot be asked, so a task on each of their nodes looks at the processes, as
`bps why` does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from bps_rdma.launch.run import MOST_SCHEDULERS, SCHEDULERS_WITHIN
from bps_rdma.ray.errors import Failure, JobFailedError, Kind
from bps_rdma.ray.members import Actor, Members, answers
from bps_rdma.tools.inspection import local
from bps_rdma.tools.inspection.diagnosis import main_stack, waits_of
from bps_rdma.tools.inspection.job_state import JobState, Member

# After a member's end the others raise within 2 s. They may be heard of first.
_CAUSE_FOLLOWS_S = 2.0
_OTHERS_FOLLOW_S = 0.2  # for the message; the cause is known


def results_of(members: Members, pickled: Any, timeout: float | None, losses: Losses) -> list[Any]:
    """Run the function on all ranks of the job and return their results in rank order, None for a lost rank.

    Raises:
        JobFailedError: a member failed, or not all ranks returned in time. It has the cause as `__cause__`.
    """
    ranks, helpers = members.begin(pickled)
    waiting = {**ranks, **helpers}
    results: dict[str, Any] = {}
    deadline = None if timeout is None else time.monotonic() + timeout
    while ranks.keys() & waiting.keys():
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        for_newcomers = losses.left_for_newcomers(waiting)
        limits = [limit for limit in (left, for_newcomers) if limit is not None]
        done, _ = ray.wait(list(waiting), num_returns=1, timeout=min(limits, default=None))
        if not done and for_newcomers is not None and for_newcomers == min(limits):
            break  # they came too late
        if not done:
            raise _too_late(members, [waiting[ref] for ref in ranks if ref in waiting], timeout)
        actor = waiting.pop(done[0])
        failure = _look(done[0], actor, results)
        if failure is None:
            losses.note_end(actor)
        elif losses.goes_on(actor, failure, waiting):
            ref, again = losses.start_again(actor, waiting)
            if again is not None:
                waiting[ref] = again
                ranks |= {ref: again} if again in members.ranks else {}
        else:
            raise _explain(_and_others(failure, waiting, losses.recent()))
    return [results.get(actor.label) for actor in members.ranks]


def _too_late(members: Members, late: list[Actor], timeout: float | None) -> JobFailedError:
    named = ", ".join(f"{actor.label} ({actor.where})" for actor in late)
    return JobFailedError(
        f"{named} did not return within {timeout:g} s: {states_of(late, members.runtime_env)}",
        "raise the time-out, or see what they wait for",
    )


def _look(ref: Any, actor: Actor, results: dict[str, Any]) -> Failure | None:
    try:
        results[actor.label] = ray.get(ref)
    except Exception as error:
        return Failure(actor.label, actor.where, error)
    return None


def _and_others(first: Failure, waiting: dict[Any, Actor], before: list[Failure]) -> list[Failure]:
    """All failures that are known soon after the first one, the cause first; takes them out of `waiting`."""
    found = [*before, first]
    begun = time.monotonic()
    while waiting:
        cause = min(found, key=lambda failure: failure.kind)
        patience = _CAUSE_FOLLOWS_S if cause.kind is Kind.LOST_PEER else _OTHERS_FOLLOW_S
        done, _ = ray.wait(list(waiting), num_returns=1, timeout=max(0.0, begun + patience - time.monotonic()))
        if not done:
            break
        failure = _look(done[0], waiting.pop(done[0]), {})
        if failure is not None:
            found.append(failure)
    return sorted(found, key=lambda failure: failure.kind)  # stable: in order of arrival within a kind


def _explain(failures: list[Failure]) -> JobFailedError:
    cause, *others = failures
    message = cause.describe()
    if others:
        message += f" [{len(others)} other members followed; the first: {others[0].describe()}]"
    error = JobFailedError(message, getattr(cause.cause, "hint", ""), failures)
    error.__cause__ = cause.error
    return error


_log = logging.getLogger(__name__)

_RECENTLY_S = 5.0
_NEWCOMERS_FOLLOW_S = 10.0


class Losses:
    """Decides, for each failure, whether the job goes on.

    Args:
        members: of the attempt.
        pickled: what ranks that are started again run.
        least: the job goes on while that many ranks are left; 0: with all only.
        restarts: how often lost members are started again, all together.
    """

    def __init__(self, members: Members, pickled: Any, least: int, restarts: int) -> None:
        self._members = members
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
        if not self._least or (actor is self._members.scheduler and not self._may_replace_scheduler(actor, failure)):
            return False
        self._lost[actor.label] = (time.monotonic(), failure)
        self._past.append(self._lost[actor.label])
        if actor is self._members.scheduler:
            return True
        if actor in self._members.servers:
            return any(other in self._members.servers for other in waiting.values())
        return self._ranks_left() >= self._least

    def start_again(self, actor: Actor, waiting: Mapping[Any, Actor]) -> tuple[Any, Actor | None]:
        """Start a lost member again, if that may be; its future, and itself."""
        _, failure = self._lost[actor.label]
        left = f"{self._ranks_left()} of {len(self._members.ranks)} ranks"
        if actor is self._members.scheduler:
            _log.warning("%s; it is started again", failure.describe())
            del self._lost[actor.label]
            return self._members.start_again(actor, self._pickled)
        others = any(other in self._members.ranks for other in waiting.values())
        if self._restarts == 0 or not others or self._over_at is not None:
            _log.warning("%s; the job goes on with %s", failure.describe(), left)
            return None, None
        self._restarts -= 1
        _log.warning("%s; the job goes on with %s, and it is started again", failure.describe(), left)
        ref, again = self._members.start_again(actor, self._pickled)
        del self._lost[actor.label]
        self._newcomers.add(again.label)
        return ref, again

    def recent(self) -> list[Failure]:
        """Returns the losses of the last seconds, which may be the cause of a failure that ends the job."""
        since = time.monotonic() - _RECENTLY_S
        return [failure for at, failure in self._past if at > since][:-1]  # the last one is this failure

    def _may_replace_scheduler(self, actor: Actor, failure: Failure) -> bool:
        """Returns whether the scheduler can be replaced: on a node that is there, because members use its address."""
        now = time.monotonic()
        recent = [at for at in self._schedulers_lost if at > now - SCHEDULERS_WITHIN]
        self._schedulers_lost = [*recent, now]
        may = self._members.waits_for_schedulers and len(recent) + 1 < MOST_SCHEDULERS
        return may and failure.kind is Kind.DIED and answers(actor)

    def _ranks_left(self) -> int:
        return sum(1 for rank in self._members.ranks if rank.label not in self._lost)

    def note_end(self, actor: Actor) -> None:
        """Note that a member has ended as it should."""
        if actor is self._members.scheduler:  # it ends when all members have left
            self._over_at = time.monotonic()

    def left_for_newcomers(self, waiting: Mapping[Any, Actor]) -> float | None:
        """Seconds until ranks that are not in the job need not be waited for; None: those that wait may be in it."""
        ranks = [actor for actor in waiting.values() if actor in self._members.ranks]
        if self._over_at is None or any(rank.label not in self._newcomers for rank in ranks):
            return None
        return max(0.0, self._over_at + _NEWCOMERS_FOLLOW_S - time.monotonic())


_NODE_ANSWERS_S = 10.0  # it may have to start a process
_PROCESS_ANSWERS_S = 1.5
_MOST_NAMED = 8


def states_of(actors: Sequence[Actor], runtime_env: Mapping[str, Any] | None) -> str:
    """One clause for each actor, such as "rank 1 waits in push_pull of 'x', round 3 (2.1 s)".

    Args:
        actors: ranks.
        runtime_env: in which they run; bps_rdma may come from there.
    """
    shown = actors[:_MOST_NAMED]
    look = ray.remote(num_cpus=0, max_retries=0, runtime_env=runtime_env)(look_at)
    asked = {}
    for node in {actor.node for actor in shown}:
        pids = [actor.at.pid for actor in shown if actor.node == node and actor.at is not None]
        asked[node] = look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(pids)
    done, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=_NODE_ANSWERS_S)
    found = {node: _answer(ref) if ref in done else "is on a node that does not answer" for node, ref in asked.items()}
    clauses = [f"{actor.label} {_state_of(actor, found[actor.node])}" for actor in shown]
    return "; ".join(clauses) + (f"; and {len(actors) - len(shown)} more" if len(actors) > len(shown) else "")


def _answer(ref: Any) -> dict[int, str] | str:
    try:
        return ray.get(ref)  # type: ignore[no-any-return]
    except Exception as error:
        return f"cannot be looked at: {type(error).__name__}"  # its node was lost, for example


def _state_of(actor: Actor, of_node: dict[int, str] | str) -> str:
    if actor.at is None:
        return "was started again, and has not ended"
    return of_node if isinstance(of_node, str) else of_node[actor.at.pid]


def look_at(pids: Iterable[int]) -> dict[int, str]:
    """Describes what processes of this machine do, by process id."""
    found = local.pids_of(local.find())
    return {pid: _doing(pid, found.get(pid)) for pid in pids}


def _doing(pid: int, process: local.LocalProcess | None) -> str:
    state = local.state_of(pid)
    if state in ("", "Z"):
        return "has ended"
    if state in ("T", "t"):
        return f"is stopped, by SIGSTOP or a debugger (`kill -CONT {pid}` lets it go on)"
    if process is None:
        return "is in no job: it has not called bps_rdma.init(), or has left"
    report = local.ask(process, "report stacks", _PROCESS_ANSWERS_S)
    if report is None:
        return "does not answer"
    alone = JobState(members={0: Member(0, 0, -1, "", pid, report=report)})  # the ranks that it waits for are not asked
    waits = sorted(waits_of(alone), key=lambda wait: -wait.since_ms)
    if waits:
        return f"waits in {waits[0].what} ({waits[0].since_ms / 1e3:.1f} s)"
    frames = main_stack(report.get("stacks", ""))
    return f"is in code of its own: {frames[0]}" if frames else "is in code of its own"
