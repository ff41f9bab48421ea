# SPDX-License-Identifier: Apache-2.0
"""The plot of a benchmark: bandwidth over size, for bps_rdma, the baselines and the upper bound."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from bps_rdma.files import output
from bps_rdma.tools.bench.plan import format_size
from bps_rdma.tools.bench.results import OURS, CaseResult, Outcome
from bps_rdma.tools.bench.stats import quantile, rates

# The same colours in every plot. They differ in lightness too, so that they can be told apart without colour.
_COLOURS = {OURS: "#0b5394", "gloo": "#e69138", "openmpi": "#6aa84f", "mpich": "#a64d79", "bound": "#999999"}
_LABELS = {
    OURS: "bps_rdma",
    "gloo": "gloo all_reduce",
    "openmpi": "Open MPI Allreduce",
    "mpich": "MPICH Allreduce",
    "bound": "bound: sum in shared memory",
}


def save_plot(outcomes: Sequence[Outcome], path: Path) -> None:
    """Draw one panel per run, operation and dtype into `path`; the suffix chooses the format (png, svg, pdf).

    Lines show medians, bands show quartiles.
    """
    panels: dict[tuple[str, str, int], list[CaseResult]] = {}
    for outcome in outcomes:
        for result in outcome.results:
            panels.setdefault((result.case.op, result.case.dtype, outcome.workers), []).append(result)
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    mpl.use("Agg")
    figure = Figure(figsize=(6.4 * columns, 4.6 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharey=len(outcomes) > 1).flat
    for axis, ((op, dtype, workers), results) in zip(axes, panels.items(), strict=False):
        _draw(axis, results, workers)
        axis.set_title(f"{op}, {dtype}" + f", {workers} workers" * (len(outcomes) > 1), fontsize=11)
    for axis in list(axes)[len(panels) :]:
        axis.set_visible(False)
    figure.suptitle(outcomes[0].job if len(outcomes) == 1 else "all-reduce on one host", fontsize=11)
    with output(path) as out:
        figure.savefig(out, dpi=150, format=path.suffix[1:])


def _draw(axis: Axes, results: list[CaseResult], world: int) -> None:
    ordered = sorted(results, key=lambda result: result.case.total_bytes)
    names = dict.fromkeys(name for result in ordered for name in result.timings)
    for name in sorted(names, key=list(_COLOURS).index):
        have = [result for result in ordered if name in result.timings]
        sizes = [result.case.total_bytes for result in have]

        def rate_at(q: float, name: str = name, have: list[CaseResult] = have) -> list[float]:
            return [rates(r.case, world, quantile(r.timings[name].seconds, q)).per_rank for r in have]

        style = "--" if name == "bound" else "-"
        marker = "" if name == "bound" else "o"
        axis.plot(sizes, rate_at(0.5), style, marker=marker, markersize=4, color=_COLOURS[name], label=_LABELS[name])
        axis.fill_between(sizes, rate_at(0.75), rate_at(0.25), color=_COLOURS[name], alpha=0.15, linewidth=0)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    ticks = sorted({result.case.total_bytes for result in ordered})
    axis.set_xticks(ticks, [format_size(size) for size in ticks], rotation=30, ha="right")
    axis.minorticks_off()
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_xlabel("bytes per rank")
    axis.set_ylabel("GB/s per rank (bytes / time)")
    axis.grid(visible=True, which="major", alpha=0.3)
    axis.legend(frameon=False, fontsize=9)
