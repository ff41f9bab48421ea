# SPDX-License-Identifier: Apache-2.0
"""The plot of `bps trace summary`: stages, steps, and the ranks that were last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bps_rdma.files import output
from bps_rdma.tools.trace.steps import PARTS

_DARK, _LIGHT, _OTHER = "#0b5394", "#9fc5e8", "#e69138"
_PARTS = ("#d9ead3", "#93c47d", "#ea9999", "#cccccc")


def save_plot(found: dict[str, Any], path: Path) -> None:
    """Draw what summarize() has found into `path`; the suffix chooses the format (png, svg, pdf)."""
    mpl.use("Agg")
    figure = Figure(figsize=(15, 4.6), layout="constrained")
    stages, steps, ranks = figure.subplots(1, 3)
    _draw_stages(stages, [row for row in found["stages"] if row["count"]])
    numbers = [row["step"] for row in found["steps"]]
    _draw_parts(steps, found["steps"])
    steps.plot(numbers, [row["took_ms"] for row in found["steps"]], color=_DARK, label="the step took")
    under_way = [row["under_way_ms"] for row in found["steps"]]
    steps.plot(numbers, under_way, color=_OTHER, label="some partition was under way")
    hidden = found["hidden_percent"]
    title = "" if hidden is None else f"\n{hidden:.0f} % of the communication is hidden behind computation"
    steps.set(title=f"steps, on the slowest worker{title}", xlabel="step", ylabel="ms")
    # Above the bars there is room for the legend.
    steps.set_ylim(0, 1.4 * max((row["took_ms"] for row in found["steps"]), default=1.0))
    steps.grid(visible=True, alpha=0.3)
    steps.legend(frameon=False, fontsize=9, ncols=2, loc="upper center")
    last = found["last_ranks"][:20]
    ranks.bar([str(row["rank"]) for row in last], [row["waited_ms"] for row in last], color=_DARK)
    ranks.set(title="the first contribution waited for this rank", xlabel="rank", ylabel="ms, all rounds")
    ranks.grid(visible=True, axis="y", alpha=0.3)
    figure.suptitle(f"trace of {', '.join(found['processes'][:8])}", fontsize=11)
    with output(path) as out:
        figure.savefig(out, dpi=150, format=path.suffix[1:])


def _draw_parts(axis: Axes, rows: list[dict[str, Any]]) -> None:
    """Draws what the program did in each step, one upon the other, if it has said so."""
    if not rows or "forward_ms" not in rows[0]:
        return
    bottom = [0.0] * len(rows)
    for (name, column), colour in zip(PARTS.items(), _PARTS, strict=True):
        heights = [row[column] for row in rows]
        axis.bar([row["step"] for row in rows], heights, bottom=bottom, color=colour, label=name)
        bottom = [one + other for one, other in zip(bottom, heights, strict=True)]


def _draw_stages(axis: Axes, rows: list[dict[str, Any]]) -> None:
    names = [row["stage"] for row in rows]
    axis.barh(names, [row["p99_ms"] for row in rows], color=_LIGHT, label="99 % of them are shorter")
    axis.barh(names, [row["median_ms"] for row in rows], color=_DARK, label="median")
    axis.invert_yaxis()
    axis.set(title="stages of a partition", xlabel="ms")
    axis.grid(visible=True, axis="x", alpha=0.3)
    axis.legend(frameon=False, fontsize=9)
