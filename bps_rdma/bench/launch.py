"""A whole bench on this machine: starts the ranks, decides how many rounds, gathers the times."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import bps_rdma
from bps_rdma.bench import bound, worker
from bps_rdma.bench.plan import Case, Plan
from bps_rdma.bench.ranks import Ranks
from bps_rdma.bench.results import CaseResult, Outcome, routes_of
from bps_rdma.bench.stats import Timing, slowest
from bps_rdma.errors import BpsError
from bps_rdma.launch.environment import LocalJob
from bps_rdma.launch.process import Children
from bps_rdma.launch.run import spawn_helpers

# What the progress display is told: the case, its rounds so far, and the share of the whole run that is done.
Listener = Callable[[Case, int, float], None]

_MIN_ROUNDS, _MAX_ROUNDS = 5, 500  # quartiles need the former; the latter leaves time for large tensors
_CHUNK_SECONDS = 0.25  # between two signs of life
_ANSWER_SECONDS = 330.0  # longer than BPS_TIMEOUT's default, so that the library's own message comes first


def run_bench(plan: Plan, job: LocalJob, listener: Listener) -> Outcome:
    """Run all cases of `plan` on the ranks of `job`.

    Raises BpsError when a rank fails, a result is wrong, or a process cannot be started. No process is left behind.
    """
    with Children() as children, _shared_memory(bound.shared_bytes(plan, job.workers)) as shared:
        spawn_helpers(children, job)
        ranks = _spawn_ranks(children, plan, job, shared)
        routes = routes_of([answer["routes"] for answer in ranks.hear()])
        results = _run_cases(plan, ranks, listener)
        ranks.ask(do="end")
        while children.running and (ended := children.wait(_ANSWER_SECONDS)):
            for child in ended:
                if child.status:  # at its very end, but not well
                    raise BpsError(child.describe_end(), "what it wrote before is above")
    return Outcome(plan, tuple(results), job.workers, job.servers or 0, routes)


@contextlib.contextmanager
def _shared_memory(size: int) -> Iterator[tuple[int, int] | None]:
    """(descriptor, size) of memory without a name, which ends with the last process that has it; None for none."""
    if size == 0:
        yield None
        return
    descriptor = os.memfd_create("bps-bench-bound")
    try:
        os.ftruncate(descriptor, size)  # pages come when they are touched
        yield descriptor, size
    finally:
        os.close(descriptor)


def _spawn_ranks(children: Children, plan: Plan, job: LocalJob, shared: tuple[int, int] | None) -> Ranks:
    ranks = Ranks(children, _ANSWER_SECONDS)
    for rank in range(job.workers):
        ours, theirs = socket.socketpair()
        env = job.worker(rank) | {worker.CHANNEL: str(theirs.fileno()), worker.PLAN: plan.to_json()}
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo otherwise looks up this host's name, which may have none
        descriptors = [theirs.fileno()]
        if shared is not None:
            env[worker.SHARED] = f"{shared[0]} {shared[1]}"
            descriptors.append(shared[0])
        ranks.add(children.spawn(f"rank {rank}", _worker_command(), env, descriptors), ours)
        theirs.close()
    return ranks


def _worker_command() -> list[str]:
    # Not -m, which would look in the current folder first: in a checkout that is the package without its native part.
    root = str(Path(bps_rdma.__file__).parent.parent)
    code = f"import sys; sys.path = [p for p in sys.path if p] + [{root!r}]; from {worker.__name__} import main; main()"
    return [sys.executable, "-c", code]


def _run_cases(plan: Plan, ranks: Ranks, listener: Listener) -> list[CaseResult]:
    results: list[CaseResult] = []
    end = time.monotonic() + plan.seconds
    for index, case in enumerate(plan.cases):
        listener(case, 0, index / len(plan.cases))
        ranks.ask(do="case", index=index)
        budget = max(end - time.monotonic(), 0.0) / (len(plan.cases) - index)

        def tell(rounds: int, share: float, case: Case = case, index: int = index) -> None:
            listener(case, rounds, (index + share) / len(plan.cases))

        results.append(_run_case(plan, case, ranks, budget, tell))
    return results


def _run_case(plan: Plan, case: Case, ranks: Ranks, budget: float, tell: Callable[[int, float], None]) -> CaseResult:
    begin = time.monotonic()
    times: dict[str, list[float]] = {}
    checked = 0
    chunk, last_seconds = max(plan.warmup, 1), 0.0
    warming = plan.warmup > 0
    while True:
        chunk_begin = time.monotonic()
        answers = ranks.ask(do="rounds", count=chunk)
        last_seconds = (time.monotonic() - chunk_begin) / chunk
        checked = sum(answer["checked"] for answer in answers)
        if not warming:
            for name in answers[0]["times"]:
                timing = slowest([answer["times"][name] for answer in answers])
                times.setdefault(name, []).extend(timing.seconds)
        warming = False
        rounds = len(next(iter(times.values()), ()))
        left = _rounds_left(plan, rounds, last_seconds, budget - (time.monotonic() - begin))
        tell(rounds, rounds / max(rounds + left, 1))
        if left == 0:
            return CaseResult(case, {name: Timing(tuple(t)) for name, t in times.items()}, checked)
        chunk = max(1, min(left, int(_CHUNK_SECONDS / max(last_seconds, 1e-6))))


def _rounds_left(plan: Plan, rounds: int, seconds_each: float, seconds_left: float) -> int:
    """How many more rounds: up to plan.iterations, or until the case's time is over."""
    if plan.iterations is not None:
        return plan.iterations - rounds
    fitting = int(seconds_left / max(seconds_each, 1e-6)) if seconds_left > 0 else 0
    return max(min(fitting, _MAX_ROUNDS - rounds), _MIN_ROUNDS - rounds, 0)
