# SPDX-License-Identifier: Apache-2.0
"""The plot of `bps tune`: what operations cost, partitions, buckets, and what spare hosts would bring."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from bps_rdma.files import output
from bps_rdma.tools.bench.plan import format_size
from bps_rdma.tools.tune.hosts import Predicted
from bps_rdma.tools.tune.measure import Found, Trial

_MEASURED, _MODEL = "#0b5394", "#e69138"


def save_plot(found: Found, path: Path, predicted: Predicted | None = None) -> None:
    """Draw into `path`; the suffix chooses the format (png, svg, pdf)."""
    mpl.use("Agg")
    panels = 3 if predicted is None else 4
    figure = Figure(figsize=(5 * panels, 4.6), layout="constrained")
    single, partitions, buckets, *spares = figure.subplots(1, panels)
    sizes = [size for size, _ in found.points]
    single.plot(
        sizes, [time * 1e3 for _, time in found.points], "o-", color=_MEASURED, label="measured (lower quartile)"
    )
    model = [found.costs.seconds(size) * 1e3 for size in sizes]
    single.plot(sizes, model, "--", color=_MODEL, label=_describe(found))
    _finish(single, "one operation", "bytes", sizes)
    single.set_yscale("log")
    if found.partitions:
        _draw(partitions, found.partitions, "measured (median, quartiles)")
        default = next(trial for trial in found.partitions if trial.nbytes is None)
        partitions.axhline(default.seconds * 1e3, linestyle=":", color=_MEASURED, label="default")
        sizes = [trial.nbytes for trial in found.partitions if trial.nbytes is not None]
        _finish(partitions, f"push_pull of {format_size(found.nbytes)}", "bytes per partition", sizes)
    else:
        partitions.set_visible(False)
    _draw(buckets, found.buckets, "measured (median, quartiles)")
    sizes = [trial.nbytes for trial in found.buckets if trial.nbytes is not None]
    shows = [found.costs.visible(found.nbytes, size) * 1e3 for size in sizes]
    buckets.plot(sizes, shows, "--", color=_MODEL, label="model: s/(w n) + n o")
    title = f"what shows of a step, backward pass {found.backward_s * 1e3:.1f} ms"
    _finish(buckets, title, "bytes per bucket", sizes)
    if predicted is not None:
        _draw_spares(spares[0], predicted)
    figure.suptitle(f"bps tune: {found.workers} ranks, {'+'.join(sorted(set(found.routes)))}", fontsize=11)
    with output(path) as out:
        figure.savefig(out, dpi=150, format=path.suffix[1:])


def _draw_spares(axis: Axes, predicted: Predicted) -> None:
    counts = [one.spares for one in predicted.counts]
    best = [predicted.of_line_rate(one.best_seconds) for one in predicted.counts if one.best_seconds]
    axis.plot(counts[: len(best)], best, "--", color=_MODEL, label="the best placement of sums")
    goodput = [predicted.of_line_rate(one.seconds) for one in predicted.counts]
    axis.plot(counts, goodput, "o-", color=_MEASURED, label=f"predicted, {format_size(predicted.nbytes)} at once")
    axis.set_title(f"{len(predicted.cluster.links)} hosts", fontsize=11)
    axis.set_xlabel("spare hosts")
    axis.set_ylabel("goodput / line rate")
    axis.set_ylim(bottom=0)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(visible=True, alpha=0.3)
    axis.legend(frameon=False, fontsize=9)


def _describe(found: Found) -> str:
    return f"{found.costs.overhead_s * 1e6:.0f} us + bytes / {found.costs.bytes_per_s / 1e9:.2f} GB/s"


def _draw(axis: Axes, trials: list[Trial], label: str) -> None:
    sized = [(trial.nbytes, trial) for trial in trials if trial.nbytes is not None]
    sizes = [size for size, _ in sized]
    axis.plot(sizes, [trial.seconds * 1e3 for _, trial in sized], "o-", color=_MEASURED, label=label)
    lower = [trial.lower * 1e3 for _, trial in sized]
    upper = [trial.upper * 1e3 for _, trial in sized]
    axis.fill_between(sizes, lower, upper, color=_MEASURED, alpha=0.15, linewidth=0)


def _finish(axis: Axes, title: str, across: str, sizes: list[int]) -> None:
    axis.set_title(title, fontsize=11)
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [format_size(size) for size in sizes], rotation=30, ha="right")
    axis.minorticks_off()
    axis.set_xlabel(across)
    axis.set_ylabel("ms")
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.grid(visible=True, which="major", alpha=0.3)
    axis.legend(frameon=False, fontsize=9)
