# SPDX-License-Identifier: Apache-2.0
"""The options of pushpull_bench."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from bps_rdma.bench.launch import Listener, run_bench
from bps_rdma.bench.peers import environments
from bps_rdma.bench.plan import (
    BASELINES,
    DEFAULT_SIZES,
    DTYPES,
    MEMORY_KINDS,
    MPI_BASELINES,
    OPS,
    Case,
    Plan,
    format_size,
    make_cases,
    parse_choices,
)
from bps_rdma.bench.rank import run_rank
from bps_rdma.bench.results import Outcome, to_json
from bps_rdma.errors import InvalidArgumentError
from bps_rdma.launch.environment import LocalJob, inside_a_job
from bps_rdma.launch.run import Interrupted, signals_raise
from bps_rdma.terminal import wide_console

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def pushpull_bench(
    sizes: Annotated[
        str, typer.Option(help="Comma-separated bytes per tensor, for example 4K,64K,1M.")
    ] = DEFAULT_SIZES,
    dtypes: Annotated[
        str, typer.Option("--dtypes", "--dtype", help=f"Comma-separated, of {','.join(DTYPES)}.")
    ] = "float32",
    ops: Annotated[str, typer.Option(help=f"Comma-separated, of {','.join(OPS)}.")] = "push_pull",
    workers: Annotated[int, typer.Option(min=1, help="Number of worker processes to start.")] = 2,
    servers: Annotated[
        int | None,
        typer.Option(min=1, help="Number of dedicated server processes. Default: servers inside the workers."),
    ] = None,
    transport: Annotated[str | None, typer.Option(help="auto, shm, tcp or rdma; see BPS_TRANSPORT.")] = None,
    iters: Annotated[
        int | None, typer.Option(min=1, help="Rounds per case. Default: as many as fit into --seconds.")
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Warm-up rounds per case, checked but not timed.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.1, help="Time for all cases together, without --iters.")] = 16.0,
    group: Annotated[int, typer.Option(min=1, help="Tensors per call, started together.")] = 1,
    memory: Annotated[str, typer.Option(help="plain (numpy.empty) or shared (bps_rdma.empty).")] = "plain",
    calls: Annotated[
        int | None,
        typer.Option(min=1, help="Calls per round, one after the other. Default: enough for 4 MiB, at most 64."),
    ] = None,
    compare: Annotated[
        str | None, typer.Option(help=f"Baselines for comparison, comma-separated, of {','.join(BASELINES)}.")
    ] = None,
    load: Annotated[
        int, typer.Option(min=0, help="Number of busy processes to run meanwhile, to simulate a busy machine.")
    ] = 0,
    prepared: Annotated[
        bool,
        typer.Option("--prepared", help="Prepare each operation once (bps_rdma.prepare), and start it in every round."),
    ] = False,
    bound: Annotated[bool, typer.Option(help="Also measure an upper bound: a plain sum in shared memory.")] = True,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all results to this file; - for stdout.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Plot bandwidth over size into this file (png, svg, pdf).")] = None,
    size_mb: Annotated[
        float | None,
        typer.Option(help="Measure one size in MiB and print a line per round, as BytePS's benchmark does."),
    ] = None,
) -> None:
    """Measure push_pull and related operations, and check every result against the known sum.

    Starts its own workers on this machine. Inside a job (torchrun, bps run, DMLC_ROLE=worker) it measures as one rank
    of that job.
    """
    if size_mb is not None:
        sizes = str(int(size_mb * (1 << 20)))
    plan = Plan(
        cases=make_cases(sizes, dtypes, ops, group, calls, loaded=load > 0),
        iterations=iters,
        warmup=warmup,
        seconds=seconds,
        memory=parse_choices(memory, MEMORY_KINDS, "kind of memory")[0],
        compare=parse_choices(compare, BASELINES, "baseline") if compare else (),
        bound=bound,
        load=load,
        prepared=prepared,
    )
    require_modules(plan, plot)
    check_folders(json_file, plot)
    job = LocalJob(workers, servers, transport)
    try:
        with signals_raise():
            outcome = _measure(plan, job, line_per_round=size_mb is not None)
    except Interrupted as interrupted:
        raise typer.Exit(128 + interrupted.signum) from None
    if outcome is not None:
        _show(outcome, json_file, plot)


def _measure(plan: Plan, job: LocalJob, *, line_per_round: bool) -> Outcome | None:
    if inside_a_job():
        if plan.load or any(name in MPI_BASELINES for name in plan.compare):
            raise InvalidArgumentError(
                "--load and MPI baselines are not available inside a job", "start pushpull_bench outside of any job"
            )
        return run_rank(plan, line_per_round=line_per_round)
    with progress() as listener:
        return run_bench(plan, job, listener)


def require_modules(plan: Plan, plot: Path | None) -> None:
    """Raise InvalidArgumentError before anything is measured when an optional package is missing."""
    wanted = {"torch": "gloo" in plan.compare or any(case.dtype == "bfloat16" for case in plan.cases)}
    wanted["matplotlib"] = plot is not None
    for name in plan.compare:
        if name in MPI_BASELINES:
            environments.require(name)
    extras = {"torch": "torch", "matplotlib": "plot"}
    for module, needed in wanted.items():
        if needed and importlib.util.find_spec(module) is None:
            raise InvalidArgumentError(f"{module} is not installed", f"pip install 'bps_rdma[{extras[module]}]'")


def check_folders(*files: Path | None) -> None:
    """Raise InvalidArgumentError when the folder of one of `files` does not exist."""
    for path in files:
        if path is not None and not path.absolute().parent.is_dir():
            raise InvalidArgumentError(
                f"the folder {path.absolute().parent} does not exist", "create it, or choose another file"
            )


@contextlib.contextmanager
def progress() -> Iterator[Listener]:
    """A progress bar on standard error; only on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[what]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=1.0, what="")

        def listen(case: Case, rounds: int, share: float) -> None:
            what = f"{case.op} {case.dtype} {format_size(case.nbytes)}"
            bar.update(task, description=what, completed=share, what=f"{rounds} rounds")

        yield listen


def _show(outcome: Outcome, json_file: Path | None, plot: Path | None) -> None:
    if json_file is not None and str(json_file) == "-":
        print(json.dumps(to_json(outcome)))
    else:
        from bps_rdma.bench.report import print_report

        print_report(outcome, wide_console())
        if json_file is not None:
            json_file.write_text(json.dumps(to_json(outcome)) + "\n")
    if plot is not None:
        from bps_rdma.bench.plot import save_plot

        save_plot([outcome], plot)
