"""From times to figures."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from bps_rdma.bench.stats import quantile
from bps_rdma.torch.compare.contenders import ALONE, SYNCS, Contender
from bps_rdma.torch.compare.launch import Times


@dataclass(frozen=True)
class Figure:
    """One contender. Times in ms; all are medians over rounds of what was measured in the same round.

    Attributes:
        step: of a whole step; lower and upper are its quartiles.
        exposed: by how much a step is longer than one that sends nothing.
        share: exposed / step.
        hidden: how much of a bare transfer of the same bytes by the same backend is not exposed; below 0 when more
            time is lost than that transfer takes.
        speedup: of torch's DDP on gloo with buckets of the same size over this, else of the first such; None
            without one.
        exposed_ratio: exposed over that of the same one; None where that one exposes nothing.
    """

    contender: Contender
    step: float
    lower: float
    upper: float
    exposed: float
    share: float
    hidden: float
    speedup: float | None
    exposed_ratio: float | None


def figures_of(times: Times) -> tuple[float, dict[str, float], list[Figure]]:
    """(ms of a step alone, ms of the bare transfer per backend, the contenders' figures)."""
    per_round = {one: [1e3 * statistics.median(turn) for turn in turns] for one, turns in times.seconds.items()}
    alone = per_round[Contender(ALONE)]
    transfers = {
        backend: statistics.median(per_round[Contender(kind)])
        for backend, kind in SYNCS.items()
        if Contender(kind) in per_round
    }
    found = []
    for one, steps in per_round.items():
        if one.kind in (ALONE, *SYNCS.values()):
            continue
        exposed = _exposed(steps, alone)
        step = statistics.median(steps)
        reference = _reference(one, per_round)
        speedup = exposed_ratio = None
        if reference is not None:
            theirs = per_round[reference]
            speedup = statistics.median(b / a for a, b in zip(steps, theirs, strict=True))
            their_exposed = _exposed(theirs, alone)
            exposed_ratio = exposed / their_exposed if their_exposed > 0 else None
        hidden = 1 - exposed / transfers[one.backend]
        lower, upper = quantile(steps, 0.25), quantile(steps, 0.75)
        found.append(Figure(one, step, lower, upper, exposed, exposed / step, hidden, speedup, exposed_ratio))
    return statistics.median(alone), transfers, found


def _exposed(steps: list[float], alone: list[float]) -> float:
    return statistics.median(a - b for a, b in zip(steps, alone, strict=True))


def _reference(one: Contender, per_round: dict[Contender, list[float]]) -> Contender | None:
    peers = [other for other in per_round if other.kind == "ddp-gloo"]
    same = [other for other in peers if other.bucket_mb == one.bucket_mb]
    return next(iter(same or peers), None)


def to_json(times: Times) -> dict[str, Any]:
    """Everything: the plan, the figures and all times, in seconds."""
    alone, transfers, found = figures_of(times)
    plan = times.plan
    return {
        "schema": 1,
        "model": plan.model,
        "parameters": times.parameters,
        "ranks": plan.ranks,
        "samples": plan.samples,
        "length": plan.length,
        "rounds": plan.rounds,
        "steps": plan.steps,
        "alone_ms": alone,
        "transfer_ms": transfers,
        "contenders": [
            {
                "kind": one.contender.kind,
                "bucket_mb": one.contender.bucket_mb,
                **{name: getattr(one, name) for name in Figure.__dataclass_fields__ if name != "contender"},
            }
            for one in found
        ],
        "seconds": {one.label: turns for one, turns in times.seconds.items()},
    }
