# SPDX-License-Identifier: Apache-2.0
"""Runs a benchmark on this machine: starts the processes, decides on the number of rounds, gathers the times."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence

from bps_rdma.errors import BpsError
from bps_rdma.launch.environment import LocalJob
from bps_rdma.launch.process import Children
from bps_rdma.launch.run import spawn_helpers
from bps_rdma.tools.bench import bound, teams
from bps_rdma.tools.bench.plan import MAX_ROUNDS, MIN_ROUNDS, MPI_BASELINES, Case, Plan
from bps_rdma.tools.bench.results import CaseResult, Outcome, routes_of
from bps_rdma.tools.bench.stats import Timing, merge
from bps_rdma.tools.ranks import Ranks

# Receives the progress: the case, its rounds so far, and the share of the whole run that is complete.
Listener = Callable[[Case, int, float], None]

_CHUNK_SECONDS = 0.25  # between two updates of the progress display
_TURN_SECONDS = (
    0.05  # seconds of a team's turn if there are several; short, so that other work disturbs all of them alike
)
_END_SECONDS = 60.0


def run_bench(plan: Plan, job: LocalJob, listener: Listener) -> Outcome:
    """Run all cases of `plan` on the ranks of `job` and of the MPI baselines.

    Raises BpsError when a rank fails, a result is wrong, or a process cannot be started. No process is left behind.
    """
    with (
        teams.folder_for_shared_memory("openmpi" in plan.compare) as folder,  # removed after all processes have ended
        Children() as children,
        _shared_memory(bound.shared_bytes(plan, job.workers)) as shared,
    ):
        spawn_helpers(children, job)
        ours = teams.start_ours(children, plan, job, shared)
        routes = routes_of([answer["routes"] for answer in ours.gather()])
        mpi = [name for name in plan.compare if name in MPI_BASELINES]
        others = [teams.start_mpi(children, plan, name, job.workers, folder) for name in mpi]
        for team in others:
            team.gather()
        with teams.busy(children, plan.load):
            results = _run_cases(plan, [ours, *others], listener)
        for team in (ours, *others):
            team.request(do="end")
        while children.running and (ended := children.wait(_END_SECONDS)):
            for child in ended:
                if child.status:  # it failed after its last answer
                    raise BpsError(child.describe_end(), "see its output above")
    return Outcome(plan, tuple(results), job.workers, job.servers or 0, routes)


@contextlib.contextmanager
def _shared_memory(size: int) -> Iterator[tuple[int, int] | None]:
    """(descriptor, size) of anonymous memory, freed with the last process that uses it; None if `size` is 0."""
    if size == 0:
        yield None
        return
    descriptor = os.memfd_create("bps-bench-bound")
    try:
        os.ftruncate(descriptor, size)  # pages are allocated at first use
        yield descriptor, size
    finally:
        os.close(descriptor)


def _run_cases(plan: Plan, all_teams: Sequence[Ranks], listener: Listener) -> list[CaseResult]:
    results: list[CaseResult] = []
    end = time.monotonic() + plan.seconds
    for index, case in enumerate(plan.cases):
        listener(case, 0, index / len(plan.cases))
        for team in all_teams:
            team.request(do="case", index=index)
        budget = max(end - time.monotonic(), 0.0) / (len(plan.cases) - index)

        def tell(rounds: int, share: float, case: Case = case, index: int = index) -> None:
            listener(case, rounds, (index + share) / len(plan.cases))

        results.append(_run_case(plan, case, all_teams, budget, tell))
    return results


def _run_case(
    plan: Plan, case: Case, all_teams: Sequence[Ranks], budget: float, tell: Callable[[int, float], None]
) -> CaseResult:
    begin = time.monotonic()
    timings: dict[str, Timing] = {}
    checked, turns = 0, 0
    chunk, last_seconds = max(plan.warmup, 1), 0.0
    warming = plan.warmup > 0
    while True:
        chunk_begin = time.monotonic()
        order = all_teams if turns % 2 == 0 else all_teams[::-1]
        answers = {id(team): team.request(do="rounds", count=chunk) for team in order}
        last_seconds = (time.monotonic() - chunk_begin) / chunk
        turns += 1
        checked = sum(answer["checked"] for answer in answers[id(all_teams[0])])
        for team in all_teams if not warming else ():
            for name in answers[id(team)][0]["runs"]:
                more = merge([answer["runs"][name] for answer in answers[id(team)]])
                timings[name] = timings[name] + more if name in timings else more
        warming = False
        rounds = len(next(iter(timings.values())).seconds) if timings else 0
        left = _rounds_left(plan, rounds, last_seconds, budget - (time.monotonic() - begin))
        tell(rounds, rounds / max(rounds + left, 1))
        if left == 0:
            return CaseResult(case, timings, checked)
        seconds = _CHUNK_SECONDS if len(all_teams) == 1 else _TURN_SECONDS * len(all_teams)
        chunk = max(1, min(left, int(seconds / max(last_seconds, 1e-6))))


def _rounds_left(plan: Plan, rounds: int, seconds_each: float, seconds_left: float) -> int:
    """The number of rounds still to run: up to plan.iterations, or until the time of the case has passed."""
    if plan.iterations is not None:
        return plan.iterations - rounds
    fitting = int(seconds_left / max(seconds_each, 1e-6)) if seconds_left > 0 else 0
    return max(min(fitting, MAX_ROUNDS - rounds), MIN_ROUNDS - rounds, 0)
