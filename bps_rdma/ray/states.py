# SPDX-License-Identifier: Apache-2.0
"""What ranks do that have not returned in time: for the message.

Their actors are busy with the training function, and cannot be asked. A task on each of their nodes looks at the
processes instead, as `bps why` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from bps_rdma.ray.group import Actor
from bps_rdma.tools.inspection import local
from bps_rdma.tools.inspection.diagnosis import main_stack, waits_of
from bps_rdma.tools.inspection.job_state import JobState, Member

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
    """What processes of this machine do."""
    found = {process.pid: process for process in local.find()}
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
    alone = JobState(members={0: Member(0, 0, -1, "", pid, report=report)})  # whom it waits for is not asked
    waits = sorted(waits_of(alone), key=lambda wait: -wait.since_ms)
    if waits:
        return f"waits in {waits[0].what} ({waits[0].since_ms / 1e3:.1f} s)"
    frames = main_stack(report.get("stacks", ""))
    return f"is in code of its own: {frames[0]}" if frames else "is in code of its own"
