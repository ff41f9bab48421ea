# SPDX-License-Identifier: Apache-2.0
"""`bps trace`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from bps_rdma import extras, files
from bps_rdma.errors import InvalidArgumentError
from bps_rdma.terminal import closing, wide_console
from bps_rdma.tools.outputs import check_outputs, progress, wrote
from bps_rdma.tools.trace.files import Trace, find, paths
from bps_rdma.tools.trace.merge import merge as merged
from bps_rdma.tools.trace.summary import summarize

app = typer.Typer(
    help="Read the traces that BPS_TRACE has written.",
    epilog=closing("BPS_TRACE=/tmp/trace bps run -np 2 train.py", "bps trace summary /tmp/trace"),
    pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True, subcommand_metavar="COMMAND",
)  # fmt: skip

_LARGE = 20_000_000  # bytes, which take about two seconds to read

Folder = Annotated[Path, typer.Argument(help="The folder that BPS_TRACE named.")]


@app.command(
    short_help="One file for all processes.", epilog=closing("bps trace merge /tmp/trace --out /tmp/trace.json")
)
def merge(
    folder: Folder,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("trace.json"),
) -> None:
    """Write one trace of all processes, for chrome://tracing or Perfetto.

    Clocks of several hosts are brought together by the messages between them; it prints how well.
    """
    trace = merged(_read(folder))
    with files.output(out) as file:
        file.write(json.dumps(trace).encode())
    for clock in trace["otherData"]["clocks"]:
        error = "not aligned" if clock["error_us"] is None else f"within {clock['error_us']:.1f} us"
        print(f"{clock['process']} ({clock['host']}): {error}")
    print(f"{len(trace['traceEvents'])} events in {out}")


@app.command(
    short_help="Where the time went.",
    epilog=closing(
        "bps trace summary /tmp/trace",
        "bps trace summary --json /tmp/trace",
        "bps trace summary --plot t.png /tmp/trace",
    ),
)
def summary(
    folder: Folder,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    longest: Annotated[int, typer.Option(min=0, help="How many of the longest waits to list.")] = 10,
    plot: Annotated[Path | None, typer.Option(help="Plot stages and steps into this file (png, svg, pdf).")] = None,
) -> None:
    """Show how long each stage took, each step, and which rank the others waited for."""
    check_outputs(None, plot)
    if plot is not None and not extras.is_installed("matplotlib"):
        raise InvalidArgumentError("matplotlib is not installed", extras.install_command("matplotlib"))
    found = summarize(_read(folder), longest)
    if plot is not None:
        from bps_rdma.tools.trace.plot import save_plot

        save_plot(found, plot)
        wrote(plot)
    if as_json:
        print(json.dumps(found, indent=1))
        return
    stages = [{name: value for name, value in row.items() if name != "meaning"} for row in found["stages"]]
    _print("Stages, milliseconds", stages)
    _print("Steps, milliseconds", _told(found["steps"][-20:]))
    if found["hidden_percent"] is not None:
        print(f"{found['hidden_percent']:.1f} % of the communication was hidden behind computation")
    if ranks := found["last_ranks"]:
        rank, rounds, total = ranks[0]["rank"], ranks[0]["rounds"], sum(row["rounds"] for row in ranks)
        print(f"the others waited longest for rank {rank}: the last in {rounds} of {total} rounds")
    _print("Who came last", ranks[:20])
    _print("Longest waits", found["longest_waits"])
    if found["dropped"]:
        print(f"{found['dropped']} events were dropped: trace fewer rounds, with BPS_TRACE_START_STEP and _END_STEP")


def _told(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps, without the optimizer's time where no optimizer has told any: a plain one does not."""
    if any(step.get("optimizer_ms") for step in steps):
        return steps
    return [{name: value for name, value in step.items() if name != "optimizer_ms"} for step in steps]


def _read(folder: Path) -> list[Trace]:
    """All traces; in a terminal with a bar, where that takes seconds."""
    total = sum(path.stat().st_size for path in paths(folder))
    if total < _LARGE or not sys.stderr.isatty():
        return find(folder)
    with progress(f"reading {total / 1e6:.0f} MB") as tell:
        return find(folder, lambda path, done: tell(path.parent.name, done / total))


def _print(title: str, rows: list[dict[str, Any]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    if not rows:
        return
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for name, value in rows[0].items():
        table.add_column(name.replace("_", " "), justify="left" if isinstance(value, str) else "right", overflow="fold")
    for row in rows:
        table.add_row(*(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()))
    wide_console().print(table)
