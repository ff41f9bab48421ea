# SPDX-License-Identifier: Apache-2.0
"""Watches the members of a job: collects results, finds out which of several failures came first, and who is silent."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from bps_rdma.ray.errors import Failure, JobFailedError, Kind
from bps_rdma.ray.group import Actor, Group
from bps_rdma.ray.placement import addresses

# After a member's end the others raise within 2 s. They may be heard of first.
_CAUSE_FOLLOWS_S = 2.0
_OTHERS_FOLLOW_S = 0.2  # for the message; the cause is known
_NODE_ANSWERS_S = 5.0  # a new process of Python on a busy node


def results_of(group: Group, pickled: Any, timeout: float | None) -> list[Any]:
    """Run the function on all ranks of the group and return their results in rank order.

    Raises:
        JobFailedError: a member failed, or not all ranks returned in time. It has the cause as `__cause__`.
    """
    ranks, helpers = group.begin(pickled)
    waiting = {**ranks, **helpers}
    results: dict[str, Any] = {}
    deadline = None if timeout is None else time.monotonic() + timeout
    while ranks.keys() & waiting.keys():
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        done, _ = ray.wait(list(waiting), num_returns=1, timeout=left)
        if not done:
            late = ", ".join(f"{waiting[ref].label} ({waiting[ref].where})" for ref in ranks if ref in waiting)
            raise JobFailedError(
                f"{late} did not return within {timeout:g} s", "raise the time-out, or see what they wait for"
            )
        actor = waiting.pop(done[0])
        failure = _look(done[0], actor, results)
        if failure is not None:
            raise _explain(_and_others(failure, waiting))
    return [results[actor.label] for actor in group.ranks]


def _look(ref: Any, actor: Actor, results: dict[str, Any]) -> Failure | None:
    try:
        results[actor.label] = ray.get(ref)
    except Exception as error:
        return Failure(actor.label, actor.where, error)
    return None


def _and_others(first: Failure, waiting: dict[Any, Actor]) -> list[Failure]:
    """All failures that are known soon after the first one, the cause first; takes them out of `waiting`."""
    found = [first]
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


def silent_nodes(actors: Iterable[Actor], error: JobFailedError | None) -> set[str]:
    """Nodes of the job that do not answer, although Ray may take them to be alive for another minute.

    Args:
        actors: of the attempt that failed.
        error: how; nodes whose members all raised by themselves are not asked. None: all are.
    """
    spoke = {f.member for f in error.failures if f.kind is not Kind.DIED} if error is not None else set()
    nodes = {actor.node for actor in actors if actor.label not in spoke} & addresses().keys()
    here = ray.get_runtime_context().get_node_id()
    probe = ray.remote(num_cpus=0, max_retries=0)(_answer)
    asked: Mapping[Any, str] = {
        probe.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(): node
        for node in nodes - {here}
    }
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_NODE_ANSWERS_S) if asked else ([], [])
    return {node for ref, node in asked.items() if ref not in answered or not _answered(ref)}


def _answer() -> bool:
    return True


def _answered(ref: Any) -> bool:
    try:
        return bool(ray.get(ref))
    except Exception:
        return False
