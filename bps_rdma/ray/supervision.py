# SPDX-License-Identifier: Apache-2.0
"""Watches the members of a job: collects results, and finds out which of several failures came first."""

from __future__ import annotations

import time
from typing import Any

import ray

from bps_rdma.ray.errors import Failure, JobFailedError, Kind
from bps_rdma.ray.group import Actor, Group
from bps_rdma.ray.losses import Losses
from bps_rdma.ray.states import states_of

# After a member's end the others raise within 2 s. They may be heard of first.
_CAUSE_FOLLOWS_S = 2.0
_OTHERS_FOLLOW_S = 0.2  # for the message; the cause is known


def results_of(group: Group, pickled: Any, timeout: float | None, losses: Losses) -> list[Any]:
    """Run the function on all ranks of the group and return their results in rank order, None for a lost rank.

    Raises:
        JobFailedError: a member failed, or not all ranks returned in time. It has the cause as `__cause__`.
    """
    ranks, helpers = group.begin(pickled)
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
            raise _too_late(group, [waiting[ref] for ref in ranks if ref in waiting], timeout)
        actor = waiting.pop(done[0])
        failure = _look(done[0], actor, results)
        if failure is None:
            losses.note_end(actor)
        elif losses.goes_on(actor, failure, waiting):
            ref, again = losses.start_again(actor, waiting)
            if again is not None:
                waiting[ref] = again
                ranks |= {ref: again} if again in group.ranks else {}
        else:
            raise _explain(_and_others(failure, waiting, losses.recent()))
    return [results.get(actor.label) for actor in group.ranks]


def _too_late(group: Group, late: list[Actor], timeout: float | None) -> JobFailedError:
    named = ", ".join(f"{actor.label} ({actor.where})" for actor in late)
    return JobFailedError(
        f"{named} did not return within {timeout:g} s: {states_of(late, group.runtime_env)}",
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
