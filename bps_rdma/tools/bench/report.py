# SPDX-License-Identifier: Apache-2.0
"""The tables of a benchmark. Each fits into 80 columns; there, each operation and dtype has a table."""

from __future__ import annotations

from dataclasses import replace

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bps_rdma.tools.bench.plan import format_size
from bps_rdma.tools.bench.results import CaseResult, Outcome
from bps_rdma.tools.bench.stats import compare, rates

_NARROW = 110  # columns of a terminal in which the names of operation and dtype do not fit beside the figures


def print_report(outcome: Outcome, console: Console) -> None:
    """Print the job, the results, the comparisons, and how many results were checked."""
    console.print(outcome.job, style="bold", highlight=False)
    for part in _kinds(outcome) if console.width < _NARROW else [outcome]:
        console.print(_figures(part))
        for peer in part.plan.compare:
            console.print(_comparison(part, peer))
    console.print(
        f"{outcome.checked} results checked, all exact. GB/s: 10^9 bytes/s at the median. "
        "Rounds with several calls: ms per call, p99 over rounds.",
        highlight=False,
    )


def _kinds(outcome: Outcome) -> list[Outcome]:
    """The same of each operation and dtype by itself."""
    kinds = dict.fromkeys((result.case.op, result.case.dtype) for result in outcome.results)
    return [
        replace(outcome, results=tuple(one for one in outcome.results if (one.case.op, one.case.dtype) == kind))
        for kind in kinds
    ]


def _figures(outcome: Outcome) -> Table:
    bounded = any("bound" in result.timings for result in outcome.results)
    headings = ["rounds", "median\nms", "p99\nms", "per rank\nGB/s", "aggregate\nGB/s", "bus\nGB/s"]
    table = _table(outcome, headings + ["bound\nGB/s"] * bounded)
    for result in outcome.results:
        ours = result.ours
        gbps = rates(result.case, outcome.workers, ours.median)
        calls = result.case.calls
        rounds = str(len(ours.seconds)) if calls == 1 else f"{len(ours.seconds)}x{calls}"
        cells = [rounds, _ms(ours.median / calls), _ms(ours.p99 / calls)]
        cells += [_gbps(gbps.per_rank), _gbps(gbps.aggregate), _gbps(gbps.bus)]
        table.add_row(*_case_cells(outcome, result), *cells, *[_rate_of(outcome, result, "bound")] * bounded)
    return table


def _comparison(outcome: Outcome, peer: str) -> Table:
    headings = [
        "ours\nms",
        f"{peer}\nms",
        "ours\nGB/s",
        f"{peer}\nGB/s",
        "times\nfaster",
        "quartiles",
        "times\nless cpu",
    ]
    table = _table(outcome, headings)
    for result in outcome.results:
        if peer not in result.timings:
            continue
        ours, theirs = result.ours, result.timings[peer]
        ratio = compare(ours, theirs)
        calls = result.case.calls
        cells = [_ms(ours.median / calls), _ms(theirs.median / calls)]
        cells += [_rate_of(outcome, result, "bps_rdma"), _rate_of(outcome, result, peer)]
        cells += [f"[bold]{ratio.median:.2f}[/bold]", f"{ratio.lower:.2f}-{ratio.upper:.2f}"]
        cells.append(f"{theirs.cpu / ours.cpu:.2f}" if ours.cpu > 0 else "-")
        table.add_row(*_case_cells(outcome, result), *cells)
    return table


def _table(outcome: Outcome, headings: list[str]) -> Table:
    first = outcome.results[0].case
    title = None if _several_kinds(outcome) else f"{first.op}, {first.dtype}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    if _several_kinds(outcome):
        table.add_column("operation", no_wrap=True)
        table.add_column("dtype", no_wrap=True)
    if _grouped(outcome):
        table.add_column("tensors", justify="right", no_wrap=True)
    for heading in ["size", *headings]:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _case_cells(outcome: Outcome, result: CaseResult) -> list[str]:
    case = result.case
    cells = [case.op, case.dtype] * _several_kinds(outcome)
    return [*cells, *[str(case.tensors)] * _grouped(outcome), format_size(case.nbytes)]


def _several_kinds(outcome: Outcome) -> bool:
    return len({(result.case.op, result.case.dtype) for result in outcome.results}) > 1


def _grouped(outcome: Outcome) -> bool:
    return any(result.case.tensors > 1 for result in outcome.results)


def _rate_of(outcome: Outcome, result: CaseResult, name: str) -> str:
    timing = result.timings.get(name)
    return "-" if timing is None else _gbps(rates(result.case, outcome.workers, timing.median).per_rank)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def _gbps(rate: float) -> str:
    return f"{rate:.2f}" if rate >= 0.1 else f"{rate:.2g}"
