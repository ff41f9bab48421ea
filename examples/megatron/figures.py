# SPDX-License-Identifier: Apache-2.0
"""Computes statistics from times, and shows a table and a plot."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from gpt import Setup

from bps_rdma.terminal import wide_console
from bps_rdma.tools.bench.stats import quantile

STOCK, ALONE = "stock", "alone"
_OURS, _THEIRS, _BASE = "#0b5394", "#e69138", "#bbbbbb"


@dataclass(frozen=True)
class Outcome:
    """The measurements, and the results of training.

    Attributes:
        seconds: [kind][round] the counted steps of a turn, each with the time of the slowest rank.
        losses: [kind] of all steps, including those that are not counted.
        norms: [kind] of the gradients of all steps.
        same: [kind] whether losses, norms and weights equal those of stock Megatron bit for bit on every rank.
    """

    setup: Setup
    ranks: int
    parameters: int
    seconds: dict[str, list[list[float]]]
    losses: dict[str, list[float]]
    norms: dict[str, list[float]]
    same: dict[str, bool]


@dataclass(frozen=True)
class Figure:
    """The results of one kind. Times are in ms, medians over rounds; the time of a turn is that of its median step.

    Attributes:
        step, lower, upper: time of a whole step, and its quartiles.
        exposed: how much longer a step takes than a step that sends nothing.
        ratio, ratio_lower, ratio_upper: step / stock's step, and its quartiles; below 1 is faster than stock.
        exposed_ratio: exposed / stock's exposed; None if stock exposes nothing.
    """

    kind: str
    step: float
    lower: float
    upper: float
    exposed: float
    ratio: float
    ratio_lower: float
    ratio_upper: float
    exposed_ratio: float | None


def figures_of(outcome: Outcome) -> tuple[float, list[Figure]]:
    """(ms of a step without sending, the results of each kind, stock first)."""
    per_round = {kind: [1e3 * statistics.median(turn) for turn in turns] for kind, turns in outcome.seconds.items()}
    alone, stock = per_round[ALONE], per_round[STOCK]
    stock_exposed = _exposed(stock, alone)
    found = []
    for kind, steps in sorted(per_round.items(), key=lambda one: one[0] != STOCK):
        if kind == ALONE:
            continue
        ratios = [a / b for a, b in zip(steps, stock, strict=True)]
        exposed = _exposed(steps, alone)
        found.append(Figure(
            kind, statistics.median(steps), quantile(steps, 0.25), quantile(steps, 0.75), exposed,
            statistics.median(ratios), quantile(ratios, 0.25), quantile(ratios, 0.75),
            exposed / stock_exposed if stock_exposed > 0 else None,
        ))  # fmt: skip
    return statistics.median(alone), found


def _exposed(steps: list[float], alone: list[float]) -> float:
    return statistics.median(a - b for a, b in zip(steps, alone, strict=True))


def to_json(outcome: Outcome) -> dict[str, Any]:
    """The configuration, the results, all losses and norms, and all times in seconds."""
    alone, found = figures_of(outcome)
    return {"schema": 1, **asdict(outcome), "alone_ms": alone, "kinds": [asdict(one) for one in found]}


def _title(outcome: Outcome) -> str:
    setup, turns = outcome.setup, outcome.seconds[STOCK]
    how = [f"{outcome.ranks} ranks"]
    how += [f"{name} {size}" for name, size in (("tp", setup.tp), ("pp", setup.pp)) if size > 1]
    how += ["distributed optimizer"] if setup.distributed_optimizer else []
    how += ["overlap"] if setup.overlap else []
    batch = f"{setup.microbatches * setup.samples} x {setup.length} tokens each"
    rounds = f"{len(turns)} rounds of {len(turns[0])} steps"
    return f"GPT, {outcome.parameters / 1e6:.1f} M parameters, {', '.join(how)}, {batch}, {rounds}"


def show(outcome: Outcome) -> None:
    """Print losses side by side, the times, and whether the results are equal."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    console = wide_console()
    alone, found = figures_of(outcome)
    kinds = list(outcome.losses)
    losses = Table(title="Losses", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    figures = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))  # no title: it would be wrapped to the width of the table
    for heading in ("step", *kinds):
        losses.add_column(heading, justify="right", no_wrap=True)
    for step, values in enumerate(zip(*outcome.losses.values(), strict=True)):
        losses.add_row(str(step + 1), *(f"{value:.7f}" for value in values))
    figures.add_column("", no_wrap=True)
    for heading in ("step\nms", "quartiles", "step /\nstock", "quartiles", "exposed\nms", "exposed /\nstock"):
        figures.add_column(heading, justify="right", no_wrap=True)
    for one in found:
        figures.add_row(
            one.kind, f"{one.step:.1f}", f"{one.lower:.1f}-{one.upper:.1f}", f"{one.ratio:.2f}",
            f"{one.ratio_lower:.2f}-{one.ratio_upper:.2f}", f"{one.exposed:.1f}",
            "-" if one.exposed_ratio is None else f"{one.exposed_ratio:.2f}",
        )  # fmt: skip
    console.print(losses)
    console.print(_title(outcome), highlight=False)
    console.print(figures)
    console.print(f"A step without sending: {alone:.1f} ms. exposed: how much longer a step takes.", highlight=False)
    for kind, same in outcome.same.items():
        console.print(f"{kind}: {_verdict(outcome, kind, same)}", highlight=False)


def _verdict(outcome: Outcome, kind: str, same: bool) -> str:
    if same:
        return "losses, norms and weights equal those of stock Megatron bit for bit"
    pairs = zip(outcome.losses[kind] + outcome.norms[kind], outcome.losses[STOCK] + outcome.norms[STOCK], strict=True)
    worst = max(abs(a - b) / abs(b) for a, b in pairs)
    return f"the relative difference of losses and norms from stock Megatron is at most {worst:.1e}"


def save_plot(outcome: Outcome, path: str) -> None:
    """Draw a bar per kind: the cost of a step by itself, the exposed time, and the quartiles of the step."""
    import matplotlib as mpl
    from matplotlib.figure import Figure as Canvas

    mpl.use("Agg")
    alone, found = figures_of(outcome)
    found = found[::-1]  # stock on top
    canvas = Canvas(figsize=(9, 1.6 + 0.42 * len(found)), layout="constrained")
    axis = canvas.subplots()
    rows = range(len(found))
    colours = [_THEIRS if one.kind == STOCK else _OURS for one in found]
    axis.barh(rows, [min(alone, one.step) for one in found], color=_BASE, height=0.7)
    axis.axvline(alone, color="#888888", linewidth=1, linestyle="--")
    axis.barh(rows, [max(one.step - alone, 0) for one in found], left=alone, color=colours, height=0.7)
    errors = [[one.step - one.lower for one in found], [one.upper - one.step for one in found]]
    axis.errorbar([one.step for one in found], rows, xerr=errors, fmt="none", ecolor="#444444", capsize=2, linewidth=1)
    for row, one in zip(rows, found, strict=True):
        axis.annotate(f"  {one.step:.0f} ms", (max(one.upper, alone), row), va="center", fontsize=8)
    axis.set_yticks(list(rows), [one.kind for one in found])
    axis.set_xlim(0, max(alone, *(one.upper for one in found)) * 1.12)
    axis.set_xlabel("ms per step; dashed: a step that sends no gradient; coloured: exposed (orange: stock)")
    axis.set_title(_title(outcome), fontsize=9)
    axis.grid(visible=True, axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    canvas.savefig(path, dpi=150)
