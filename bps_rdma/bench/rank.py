"""pushpull_bench as one rank of a job that is already running: started by torchrun, `bps run`, mpirun or by roles.

There is no launcher of ours to collect the ranks' times, so they are gathered over the job itself, after each round and
outside of what is timed.
"""

from __future__ import annotations

import numpy as np

import bps_rdma
from bps_rdma.bench.contenders import Contender, Ours
from bps_rdma.bench.measure import CaseRunner
from bps_rdma.bench.peers import make_peer
from bps_rdma.bench.plan import Case, Plan
from bps_rdma.bench.results import CaseResult, Outcome, routes_of
from bps_rdma.bench.stats import Timing, rates

DEFAULT_ITERATIONS = 20


def run_rank(plan: Plan, *, line_per_round: bool) -> Outcome | None:
    """Run all cases; the outcome on rank 0, None on the others.

    `line_per_round`: rank 0 prints each round as BytePS's bench did.
    Raises BpsError when the job cannot be joined, a rank is lost, or a result is wrong.
    """
    bps_rdma.init()
    contenders: list[Contender] = [Ours(), *(make_peer(name) for name in plan.compare)]
    results = tuple(_run_case(plan, case, contenders, line_per_round=line_per_round) for case in plan.cases)
    rank, world = bps_rdma.rank(), bps_rdma.size()
    routes = routes_of([bps_rdma.metrics()["transports"]])
    separate = {setting.name: setting.value for setting in bps_rdma.config()}["BPS_NUM_SERVERS"]
    bps_rdma.shutdown()
    return Outcome(plan, results, world, int(separate or 0), routes) if rank == 0 else None


def _run_case(plan: Plan, case: Case, contenders: list[Contender], *, line_per_round: bool) -> CaseResult:
    world, first = bps_rdma.size(), bps_rdma.rank() == 0
    runner = CaseRunner(case, plan.memory, contenders)
    runner.run(plan.warmup)
    if line_per_round and first:
        size_mb = case.nbytes / (1 << 20)
        print(f"[bps-pushpull] world_size={world} size_mb={size_mb:g} dtype={case.dtype}", flush=True)
    times: dict[str, list[float]] = {}
    for index in range(plan.iterations or DEFAULT_ITERATIONS):
        own = runner.run(1)
        slowest = _slowest(list(own.values()))
        for name, seconds in zip(own, slowest, strict=True):
            times.setdefault(name, []).append(seconds)
        if line_per_round and first:
            _print_round(case, world, index, slowest[0])
    checked = runner.checked * world  # a rank with a wrong result would have ended the job
    return CaseResult(case, {name: Timing(tuple(t)) for name, t in times.items()}, checked)


def _slowest(own: list[list[float]]) -> list[float]:
    """For each contender, the longest of all ranks' seconds."""
    everybody = np.zeros((bps_rdma.size(), len(own)))
    everybody[bps_rdma.rank()] = np.ravel(own)
    bps_rdma.push_pull_inplace(everybody, average=False, name=f"bench/times/{len(own)}")
    return [float(seconds) for seconds in everybody.max(axis=0)]


def _print_round(case: Case, world: int, index: int, seconds: float) -> None:
    gbps = rates(case, world, seconds)
    print(
        f"[bps-pushpull] iter={index} time_ms={seconds * 1e3:.3f} per_rank_GBps={gbps.per_rank:.3f} "
        f"agg_GB/s={gbps.aggregate:.3f} bus_GB/s={gbps.bus:.3f}",
        flush=True,
    )
