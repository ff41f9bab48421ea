# SPDX-License-Identifier: Apache-2.0
"""The options of pushpull_bench."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from bps_rdma import extras
from bps_rdma.errors import InvalidArgumentError
from bps_rdma.files import output
from bps_rdma.launch.environment import LocalJob, inside_a_job
from bps_rdma.launch.run import Interrupted, signals_raise
from bps_rdma.terminal import closing, wide_console
from bps_rdma.tools.bench.launch import Listener, run_bench
from bps_rdma.tools.bench.peers import environments
from bps_rdma.tools.bench.plan import (
    BASELINES,
    DEFAULT_SIZES,
    DTYPES,
    MIN_ROUNDS,
    MPI_BASELINES,
    OPS,
    Plan,
    format_size,
    make_cases,
    parse_choices,
    parse_memory,
)
from bps_rdma.tools.bench.rank import run_rank
from bps_rdma.tools.bench.results import Outcome, to_json
from bps_rdma.tools.outputs import check_outputs, progress, wrote

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
CLOSING = closing(
    "bps bench --sizes 64K,1M --workers 4", "bps bench --compare gloo --plot out.png",
    "bps bench --transport tcp --servers 2 --json found.json", status="a result was wrong, or a rank failed.",
)  # fmt: skip


@app.command(epilog=CLOSING)
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
    device: Annotated[str, typer.Option(help="cpu or cuda. Ranks share a GPU where there are fewer.")] = "cpu",
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
        sizes = str(int(size_mb * (1 << 20))) if math.isfinite(size_mb) else str(size_mb)
    baselines = parse_choices(compare, BASELINES, "baseline") if compare else ()
    plan = Plan(
        cases=make_cases(sizes, dtypes, ops, group, calls, loaded=load > 0),
        iterations=iters,
        warmup=warmup,
        seconds=seconds,
        memory=parse_memory(memory, device, baselines),
        compare=baselines,
        bound=bound and device == "cpu",
        load=load,
        prepared=prepared,
    )
    require_modules(plan, plot)
    check_outputs(json_file, plot)
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
    with progress_of(plan) as listener:
        return run_bench(plan, job, listener)


def require_modules(plan: Plan, plot: Path | None) -> None:
    """Raise InvalidArgumentError before anything is measured when an optional package is missing."""
    wanted = {"torch": "gloo" in plan.compare or any(case.dtype == "bfloat16" for case in plan.cases)}
    wanted["torch"] |= plan.memory == "cuda"
    wanted["matplotlib"] = plot is not None
    for name in plan.compare:
        if name in MPI_BASELINES:
            environments.require(name)
    for module, needed in wanted.items():
        if needed and not extras.is_installed(module):
            raise InvalidArgumentError(f"{module} is not installed", extras.install_command(module))


@contextlib.contextmanager
def progress_of(plan: Plan, runs: int = 1) -> Iterator[Listener]:
    """Shows the progress of `runs` measurements of a plan; see outputs.progress()."""
    with progress(announcement(plan, runs)) as tell:
        yield lambda case, rounds, share: tell(
            f"{case.op} {case.dtype} {format_size(case.nbytes)}, {rounds} rounds", share
        )


def announcement(plan: Plan, runs: int = 1) -> str:
    """Says what is measured, and how long it takes at least."""
    names = ", ".join(("bps_rdma", *plan.compare))
    cases = f"{len(plan.cases)} case{'s' * (len(plan.cases) != 1)}"
    times = f" on {runs} numbers of ranks" if runs > 1 else ""
    if plan.iterations is not None:
        return f"measuring {cases}{times} of {names}: {plan.iterations} rounds of each"
    return (
        f"measuring {cases}{times} of {names}: about {plan.seconds * runs:.0f} s, and longer where "
        f"{MIN_ROUNDS} rounds of each case take longer"
    )


def _show(outcome: Outcome, json_file: Path | None, plot: Path | None) -> None:
    if json_file is not None and str(json_file) == "-":
        print(json.dumps(to_json(outcome)))
    else:
        from bps_rdma.tools.bench.report import print_report

        print_report(outcome, wide_console())
        if json_file is not None:
            with output(json_file) as out:
                out.write(json.dumps(to_json(outcome)).encode() + b"\n")
            wrote(json_file)
    if plot is not None:
        from bps_rdma.tools.bench.plot import save_plot

        save_plot([outcome], plot)
        wrote(plot)
