# SPDX-License-Identifier: Apache-2.0
"""pushpull_bench as one rank of a running job, which was started by torchrun, `bps run`, mpirun or by roles.

No launcher of this package collects the ranks' times, so they are gathered through the job itself after each round,
outside of the timed part.
"""

from __future__ import annotations

import time

import numpy as np

import bps_rdma
from bps_rdma.tools.bench.baselines import Implementation
from bps_rdma.tools.bench.measure import CaseRunner, Run
from bps_rdma.tools.bench.peers import make_peer
from bps_rdma.tools.bench.plan import MAX_ROUNDS, MIN_ROUNDS, Case, Plan
from bps_rdma.tools.bench.results import OURS, CaseResult, Outcome, routes_of
from bps_rdma.tools.bench.stats import Timing, merge, rates
from bps_rdma.tools.bench.worker import make_ours

LINES_OF_BYTEPS = 20  # rounds that BytePS's benchmark measures, and prints


def run_rank(plan: Plan, *, line_per_round: bool) -> Outcome | None:
    """Run all cases; the outcome on rank 0, None on the others.

    `line_per_round`: rank 0 prints each round as BytePS's benchmark does.
    Raises BpsError when the job cannot be joined, a rank is lost, or a result is wrong.
    """
    bps_rdma.init()
    implementations: list[Implementation] = [
        make_ours(plan),
        *(make_peer(name) for name in plan.compare),
    ]
    results: list[CaseResult] = []
    end = time.monotonic() + plan.seconds
    for index, case in enumerate(plan.cases):
        budget = max(end - time.monotonic(), 0.0) / (len(plan.cases) - index)
        results.append(_run_case(plan, case, implementations, budget, line_per_round=line_per_round))
    rank, world = bps_rdma.rank(), bps_rdma.size()
    routes = routes_of([bps_rdma.metrics()["transports"]])
    separate = {setting.name: setting.value for setting in bps_rdma.config()}["BPS_NUM_SERVERS"]
    bps_rdma.shutdown()
    return Outcome(plan, tuple(results), world, int(separate or 0), routes) if rank == 0 else None


def _run_case(
    plan: Plan, case: Case, implementations: list[Implementation], budget: float, *, line_per_round: bool
) -> CaseResult:
    world, first = bps_rdma.size(), bps_rdma.rank() == 0
    begin = time.monotonic()
    most = LINES_OF_BYTEPS if line_per_round else MAX_ROUNDS
    runner = CaseRunner(case, plan.memory, implementations)
    runner.run(plan.warmup)
    if line_per_round and first:
        size_mb = case.nbytes / (1 << 20)
        print(f"[bps-pushpull] world_size={world} size_mb={size_mb:g} dtype={case.dtype}", flush=True)
    timings: dict[str, Timing] = {}
    rounds, more = 0, True
    while more:
        own = runner.run(1)
        rounds += 1
        late = time.monotonic() - begin > budget
        more = rounds < plan.iterations if plan.iterations else rounds < MIN_ROUNDS or (rounds < most and not late)
        of_all, more = _gather(list(own.values()), more=more)
        for name, timing in zip(own, of_all, strict=True):
            timings[name] = timings[name] + timing if name in timings else timing
            if line_per_round and first and name == OURS:
                _print_round(case, world, rounds - 1, timing.seconds[0])
    checked = runner.checked * world  # a wrong result on any rank ends the job
    return CaseResult(case, timings, checked)


def _gather(own: list[Run], *, more: bool) -> tuple[list[Timing], bool]:
    """The latest round of each implementation, over all ranks; and whether rank 0, whose clock counts, wants more."""
    world, rank = bps_rdma.size(), bps_rdma.rank()
    everybody = np.zeros((world, len(own), 4))
    wish = float(more and rank == 0)
    everybody[rank] = [(run["seconds"][0], run["cpu"], run["switches"], wish) for run in own]
    bps_rdma.push_pull_inplace(everybody, average=False, name=f"bench/times/{len(own)}")
    return [
        merge([{"seconds": [float(row[0])], "cpu": float(row[1]), "switches": int(row[2])} for row in rows])
        for rows in everybody.swapaxes(0, 1)
    ], bool(everybody[0, 0, 3])


def _print_round(case: Case, world: int, index: int, seconds: float) -> None:
    gbps = rates(case, world, seconds)
    print(
        f"[bps-pushpull] iter={index} time_ms={seconds * 1e3:.3f} per_rank_GBps={gbps.per_rank:.3f} "
        f"agg_GB/s={gbps.aggregate:.3f} bus_GB/s={gbps.bus:.3f}",
        flush=True,
    )
