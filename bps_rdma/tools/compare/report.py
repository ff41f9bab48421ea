# SPDX-License-Identifier: Apache-2.0
"""The table and the plot of a comparison."""

from __future__ import annotations

from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bps_rdma.files import output
from bps_rdma.tools.compare.figures import Figure, figures_of
from bps_rdma.tools.compare.launch import Times

_OURS, _THEIRS, _BASE = "#0b5394", "#e69138", "#bbbbbb"


def _title(times: Times) -> str:
    plan = times.plan
    return (
        f"{plan.model}, {times.parameters / 1e6:.1f} M parameters, {plan.ranks} ranks, "
        f"{plan.samples} x {plan.length} tokens each, {plan.optimizer}, {plan.rounds} rounds of {plan.steps} steps"
    )


def print_report(times: Times, console: Console) -> None:
    """Print what was compared, and the results."""
    alone, transfers, found = figures_of(times)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    headings = ("step\nms", "quartiles", "exposed\nms", "of the\nstep", "hidden", "times\nfaster", "exposed\nratio")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for one in found:
        exposed = ("noise", "-", "-") if one.noisy else (f"{one.exposed:.1f}", f"{one.share:.0%}", _share(one.hidden))
        table.add_row(
            one.method.label, f"{one.step:.1f}", f"{one.lower:.1f}-{one.upper:.1f}", *exposed,
            _or_dash(one.speedup), _or_dash(one.exposed_ratio),
        )  # fmt: skip
    console.print(_title(times), style="italic", highlight=False)
    console.print(table)
    bare = ", ".join(f"{backend} {ms:.1f} ms" for backend, ms in transfers.items())
    console.print(
        f"A step that sends nothing: {alone:.1f} ms. A plain transfer of all gradients: {bare}.\n"
        "exposed: how much longer a step takes than a step that sends nothing. times faster, exposed ratio: compared "
        "with torch's DDP\non gloo with the same bucket size, or with the first size. All methods reached the same "
        "weights on all ranks.",
        highlight=False,
    )
    if any(one.noisy for one in found):
        console.print(
            "noise: the time of a step varies between rounds by more than these methods add to it, so what is exposed\n"
            "cannot be told. Measure on an idle machine, or with more --rounds and --steps.",
            highlight=False,
        )


def print_memory(times: Times, console: Console) -> None:
    """Print what a training with each method holds in memory."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    trained = {one: held for one, held in times.memory.items() if held}
    names = list(next(iter(trained.values())))
    for name in names:
        table.add_column(name, justify="right")
    for one, held in trained.items():
        table.add_row(one.label, *(f"{held[name] / 2**20:.1f}" for name in names))
    console.print("What a training holds, in MiB, on the rank that holds most", style="italic")
    console.print(table)


def _share(hidden: float) -> str:
    return f"{hidden:.0%}" if hidden > 0 else "none"


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def save_plot(times: Times, path: Path) -> None:
    """Draw a bar per method: the cost of a step by itself, the exposed time, and the quartiles of the step."""
    import matplotlib as mpl
    from matplotlib.figure import Figure as Canvas

    mpl.use("Agg")
    alone, _, found = figures_of(times)
    ordered: list[Figure] = sorted(found, key=lambda one: -one.step)
    canvas = Canvas(figsize=(8, 1.6 + 0.34 * len(ordered)), layout="constrained")
    axis = canvas.subplots()
    rows = range(len(ordered))
    colours = [_THEIRS if one.method.kind == "ddp-gloo" else _OURS for one in ordered]
    axis.barh(rows, [min(alone, one.step) for one in ordered], color=_BASE, height=0.7)
    axis.axvline(alone, color="#888888", linewidth=1, linestyle="--")
    errors = [[one.step - one.lower for one in ordered], [one.upper - one.step for one in ordered]]
    axis.barh(rows, [max(one.step - alone, 0) for one in ordered], left=alone, color=colours, height=0.7)
    axis.errorbar(
        [one.step for one in ordered], rows, xerr=errors, fmt="none", ecolor="#444444", capsize=2, linewidth=1
    )
    for row, one in zip(rows, ordered, strict=True):
        axis.annotate(f" {one.step:.0f} ms", (one.upper, row), va="center", fontsize=8)
    axis.set_yticks(list(rows), [one.method.label for one in ordered])
    axis.set_xlim(0, max(one.upper for one in ordered) * 1.12)
    axis.set_xlabel("ms per step; dashed: a step that sends nothing; coloured: exposed (orange: torch DDP on gloo)")
    axis.set_title(_title(times), fontsize=10)
    axis.grid(visible=True, axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    with output(path) as out:
        canvas.savefig(out, dpi=150, format=path.suffix[1:])
