# SPDX-License-Identifier: Apache-2.0
"""Computes statistics from times."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from bps_rdma.tools.bench.stats import quantile
from bps_rdma.tools.compare.baselines import ALONE, SYNCS, TrainingMethod
from bps_rdma.tools.compare.launch import Times


@dataclass(frozen=True)
class Figure:
    """The results of one method. Times are in ms; all values are medians over rounds of what one round measured.

    Attributes:
        step: time of a whole step; lower and upper are its quartiles.
        exposed: how much longer a step takes than a step that sends nothing.
        noisy: whether the machine's noise is larger than that: in a quarter of the rounds or more, a step that sends
            nothing took as long. What is computed from `exposed` then means nothing.
        share: exposed / step.
        hidden: the share of a plain transfer of the same bytes over the same backend that is not exposed; below 0
            when more time is lost than that transfer takes.
        speedup: over the baseline, which is torch's DDP on gloo with the same bucket size, or with the first size;
            None without a baseline.
        exposed_ratio: exposed / the baseline's exposed; None if one of the two is noisy.
    """

    method: TrainingMethod
    step: float
    lower: float
    upper: float
    exposed: float
    noisy: bool
    share: float
    hidden: float
    speedup: float | None
    exposed_ratio: float | None


def figures_of(times: Times) -> tuple[float, dict[str, float], list[Figure]]:
    """(ms of a step without sending, ms of the plain transfer per backend, the results of each method)."""
    per_round = {one: [1e3 * statistics.median(turn) for turn in turns] for one, turns in times.seconds.items()}
    alone = per_round[TrainingMethod(ALONE)]
    transfers = {
        backend: statistics.median(per_round[TrainingMethod(kind)])
        for backend, kind in SYNCS.items()
        if TrainingMethod(kind) in per_round
    }
    found = []
    for one, steps in per_round.items():
        if one.kind in (ALONE, *SYNCS.values()):
            continue
        exposed, noisy = _exposed(steps, alone)
        step = statistics.median(steps)
        reference = _reference(one, per_round)
        speedup = exposed_ratio = None
        if reference is not None:
            theirs = per_round[reference]
            speedup = statistics.median(b / a for a, b in zip(steps, theirs, strict=True))
            their_exposed, theirs_noisy = _exposed(theirs, alone)
            exposed_ratio = None if noisy or theirs_noisy else exposed / their_exposed
        hidden = 1 - exposed / transfers[one.backend]
        lower, upper = quantile(steps, 0.25), quantile(steps, 0.75)
        found.append(Figure(one, step, lower, upper, exposed, noisy, exposed / step, hidden, speedup, exposed_ratio))
    return statistics.median(alone), transfers, found


def _exposed(steps: list[float], alone: list[float]) -> tuple[float, bool]:
    """The median over rounds, and whether it is lost in noise."""
    differences = [a - b for a, b in zip(steps, alone, strict=True)]
    return statistics.median(differences), quantile(differences, 0.25) <= 0


def _reference(one: TrainingMethod, per_round: dict[TrainingMethod, list[float]]) -> TrainingMethod | None:
    peers = [other for other in per_round if other.kind == "ddp-gloo"]
    same = [other for other in peers if other.bucket_mb == one.bucket_mb]
    return next(iter(same or peers), None)


def to_json(times: Times) -> dict[str, Any]:
    """The plan, the results, and all times in seconds."""
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
        "optimizer": plan.optimizer,
        "alone_ms": alone,
        "transfer_ms": transfers,
        "contenders": [
            {
                "kind": one.method.kind,
                "bucket_mb": one.method.bucket_mb,
                **{name: getattr(one, name) for name in Figure.__dataclass_fields__ if name != "method"},
                "memory_bytes": times.memory.get(one.method, {}),
            }
            for one in found
        ],
        "seconds": {one.label: turns for one, turns in times.seconds.items()},
    }
