"""The table of a bench, for people."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bps_rdma.bench.plan import format_size
from bps_rdma.bench.results import CaseResult, Outcome
from bps_rdma.bench.stats import compare, rates


def print_report(outcome: Outcome, console: Console) -> None:
    """Print what ran, the table, and what was checked."""
    servers = f"{outcome.servers} server processes" if outcome.servers else "servers in the workers"
    console.print(
        f"{outcome.workers} workers, {servers}, transport [bold]{outcome.transport}[/bold], "
        f"{outcome.plan.memory} memory; GB/s = 10^9 bytes/s, from the median",
        highlight=False,
    )
    console.print(_table(outcome))
    console.print(f"{outcome.checked} results checked, all exact", highlight=False)


def _table(outcome: Outcome) -> Table:
    cases = [result.case for result in outcome.results]
    several_ops = len({(case.op, case.dtype) for case in cases}) > 1
    grouped = any(case.tensors > 1 for case in cases)
    bounded = any("bound" in result.timings for result in outcome.results)
    table = Table(
        title=None if several_ops else f"{cases[0].op}, {cases[0].dtype}", title_justify="left", box=SIMPLE_HEAD
    )
    if several_ops:
        table.add_column("operation", no_wrap=True)
        table.add_column("dtype", no_wrap=True)
    if grouped:
        table.add_column("tensors", justify="right")
    headings = ["size", "rounds", "median ms", "p99 ms", "per rank GB/s", "aggregate GB/s", "bus GB/s"]
    headings += ["bound GB/s"] * bounded
    for peer in outcome.plan.compare:
        headings += [f"{peer} ms", f"{peer} GB/s", f"× {peer} (quartiles)"]
    for heading in headings:
        table.add_column(heading, justify="right")
    for result in outcome.results:
        row = [result.case.op, result.case.dtype] * several_ops
        row += [str(result.case.tensors)] * grouped
        table.add_row(*row, *_cells(outcome, result, bounded=bounded))
    return table


def _cells(outcome: Outcome, result: CaseResult, *, bounded: bool) -> list[str]:
    case, ours = result.case, result.ours
    gbps = rates(case, outcome.workers, ours.median)
    cells = [format_size(case.nbytes), str(len(ours.seconds)), _ms(ours.median), _ms(ours.p99)]
    cells += [_gbps(gbps.per_rank), f"[bold]{_gbps(gbps.aggregate)}[/bold]", _gbps(gbps.bus)]
    for name in ("bound",) * bounded + outcome.plan.compare:
        timing = result.timings.get(name)
        if timing is None:
            cells += ["-"] * (1 if name == "bound" else 3)
            continue
        rate = _gbps(rates(case, outcome.workers, timing.median).per_rank)
        if name == "bound":
            cells.append(rate)
        else:
            ratio = compare(ours, timing)
            cells += [_ms(timing.median), rate, f"{ratio.median:.2f} ({ratio.lower:.2f}-{ratio.upper:.2f})"]
    return cells


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def _gbps(rate: float) -> str:
    return f"{rate:.2f}" if rate >= 0.1 else f"{rate:.4f}"
