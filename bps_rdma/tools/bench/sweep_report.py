# SPDX-License-Identifier: Apache-2.0
"""The tables of allreduce_bench: one row per size, one column per number of ranks and library."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bps_rdma.tools.bench.plan import format_size
from bps_rdma.tools.bench.results import OURS, Outcome
from bps_rdma.tools.bench.stats import Rates, rates

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
            console.print(_table(outcomes, kind, title))
    for ranks, nbytes, reason in skipped:
        console.print(f"skipped: {format_size(nbytes)} with {ranks} ranks {reason}", highlight=False)
    checked = sum(outcome.checked for outcome in outcomes)
    console.print(f"{checked} results checked, all exact. GB/s: 10^9 bytes/s at the median.", highlight=False)


def _table(outcomes: Sequence[Outcome], kind: str, title: str) -> Table:
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
