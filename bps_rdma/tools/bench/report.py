# SPDX-License-Identifier: Apache-2.0
"""The tables of a benchmark. Each fits into 80 columns; there, each operation and dtype has a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bps_rdma.tools.bench.plan import format_size
from bps_rdma.tools.bench.results import OURS, CaseResult, Outcome
from bps_rdma.tools.bench.stats import Rates, compare, rates

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


_TITLES = {
    "per_rank": "algorithm bandwidth, GB/s: bytes of the tensor / time",
    "bus": "bus bandwidth, GB/s: algorithm bandwidth times 2(n-1)/n, as in nccl-tests",
}


def print_sweep(outcomes: Sequence[Outcome], skipped: Sequence[tuple[int, int, str]], console: Console) -> None:
    """Print both bandwidths, the skipped sizes as (ranks, bytes, reason), and how many results were checked."""
    if outcomes:
        dtype = outcomes[0].results[0].case.dtype
        transports = "+".join(sorted({outcome.transport for outcome in outcomes}))
        line = (
            f"all-reduce of {dtype}, servers in the workers, transport {transports}, {outcomes[0].plan.memory} memory"
        )
        console.print(line, style="bold", highlight=False)
        for kind, title in _TITLES.items():
            console.print(_sweep_table(outcomes, kind, title))
    for ranks, nbytes, reason in skipped:
        console.print(f"skipped: {format_size(nbytes)} with {ranks} ranks {reason}", highlight=False)
    checked = sum(outcome.checked for outcome in outcomes)
    console.print(f"{checked} results checked, all exact. GB/s: 10^9 bytes/s at the median.", highlight=False)


def _sweep_table(outcomes: Sequence[Outcome], kind: str, title: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("size", justify="right", no_wrap=True)
    columns = [(outcome, name) for outcome in outcomes for name in (OURS, *outcome.plan.compare)]
    for outcome, name in columns:
        plural = "s" * (outcome.workers != 1)
        heading = f"{outcome.workers} rank{plural}\n{'bps' if name == OURS else name}"
        table.add_column(heading, justify="right", no_wrap=True)
    sizes = sorted({result.case.nbytes for outcome in outcomes for result in outcome.results})
    for nbytes in sizes:
        table.add_row(format_size(nbytes), *(_cell(outcome, name, nbytes, kind) for outcome, name in columns))
    return table


def _cell(outcome: Outcome, name: str, nbytes: int, kind: str) -> str:
    for result in outcome.results:
        if result.case.nbytes == nbytes and name in result.timings:
            found: Rates = rates(result.case, outcome.workers, result.timings[name].median)
            rate: float = getattr(found, kind)
            return f"{rate:.2f}" if rate >= 0.1 else f"{rate:.2g}"
    return "-"
