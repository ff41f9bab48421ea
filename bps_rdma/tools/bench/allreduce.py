# SPDX-License-Identifier: Apache-2.0
"""allreduce_bench: measures the sum of one tensor over several numbers of ranks, for every installed library.

It runs pushpull_bench's measurement once for each number of ranks and shows all results in one table. Sizes that do not
fit into this machine's memory with some number of ranks are skipped and reported.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from bps_rdma import extras
from bps_rdma.errors import InvalidArgumentError
from bps_rdma.files import output
from bps_rdma.launch.environment import LocalJob, inside_a_job
from bps_rdma.launch.run import Interrupted, signals_raise
from bps_rdma.terminal import closing, wide_console
from bps_rdma.tools.bench import memory
from bps_rdma.tools.bench.cli import progress_of, require_modules
from bps_rdma.tools.bench.launch import run_bench
from bps_rdma.tools.bench.peers import environments
from bps_rdma.tools.bench.plan import BASELINES, MPI_BASELINES, Case, Plan, make_cases, parse_choices, parse_memory
from bps_rdma.tools.bench.results import Outcome, to_json
from bps_rdma.tools.outputs import check_outputs, wrote

SCHEMA = 1
_SIZES, _QUICK_SIZES = "1M,4M,16M,64M,256M,1G", "1M,4M"
_RANKS, _QUICK_RANKS = "2,4,6", "2"
_SECONDS, _QUICK_SECONDS = 30.0, 3.0
_BACKENDS = ("bps", *BASELINES)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
CLOSING = closing(
    "bps allreduce --quick", "bps allreduce --ranks 2,4 --backends bps,gloo --plot out.png",
    status="a result was wrong, or a rank failed.",
)  # fmt: skip


@dataclass(frozen=True)
class Skip:
    """A size that was not measured at a number of ranks, and why."""

    ranks: int
    nbytes: int
    reason: str


@app.command(epilog=CLOSING)
def allreduce_bench(
    sizes: Annotated[str | None, typer.Option(help=f"Comma-separated bytes per tensor. Default: {_SIZES}.")] = None,
    ranks: Annotated[
        str | None, typer.Option(help=f"Comma-separated numbers of ranks; one run for each. Default: {_RANKS}.")
    ] = None,
    backends: Annotated[
        str | None,
        typer.Option(help=f"Comma-separated, of {','.join(_BACKENDS)}; must include bps. Default: all installed."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="One dtype of pushpull_bench.")] = "float32",
    transport: Annotated[str | None, typer.Option(help="auto, shm, tcp or rdma; see BPS_TRANSPORT.")] = None,
    iters: Annotated[
        int | None, typer.Option(min=1, help="Rounds per size. Default: as many as fit into --seconds.")
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Warm-up rounds per size, checked but not timed.")] = 1,
    seconds: Annotated[
        float | None, typer.Option(min=0.1, help=f"Time for each number of ranks. Default: {_SECONDS:g}.")
    ] = None,
    memory_kind: Annotated[
        str, typer.Option("--memory", help="plain (numpy.empty) or shared (bps_rdma.empty).")
    ] = "plain",
    device: Annotated[str, typer.Option(help="cpu or cuda. Ranks share a GPU where there are fewer.")] = "cpu",
    memory_limit: Annotated[
        float | None,
        typer.Option(min=0.001, help="Memory in GB that a run may use. Default: nine tenths of the free memory."),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help=f"Unless given otherwise, measure {_QUICK_SIZES} on {_QUICK_RANKS} ranks for {_QUICK_SECONDS:g} s.",
        ),
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all results to this file; - for stdout.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Plot bandwidth over size into this file (png, svg, pdf).")] = None,
) -> None:
    """Sweep all-reduce over sizes, numbers of ranks and libraries on this machine; every result is checked."""
    if inside_a_job():
        raise InvalidArgumentError("allreduce_bench starts its own ranks", "start it outside of any job")
    baselines = _baselines("bps" if device == "cuda" and backends is None else backends)
    plan = Plan(
        cases=make_cases(sizes or (_QUICK_SIZES if quick else _SIZES), dtype, "push_pull", 1),
        iterations=iters,
        warmup=warmup,
        seconds=seconds or (_QUICK_SECONDS if quick else _SECONDS),
        memory=parse_memory(memory_kind, device, baselines),
        compare=baselines,
        bound=False,
    )
    worlds = _numbers((_QUICK_RANKS if quick else _RANKS) if ranks is None else ranks)
    require_modules(plan, plot)
    check_outputs(json_file, plot)
    limit = memory.available() * 0.9 if memory_limit is None else memory_limit * 1e9
    outcomes: list[Outcome] = []
    skipped: list[Skip] = []
    try:
        with signals_raise(), progress_of(plan, len(worlds)) as listener:
            for number, world in enumerate(worlds):

                def tell(case: Case, rounds: int, share: float, number: int = number) -> None:
                    listener(case, rounds, (number + share) / len(worlds))

                fitting, left_out = _split_by_memory(plan, world, limit)
                skipped += left_out
                if fitting:
                    job = LocalJob(world, None, transport)
                    outcomes.append(run_bench(replace(plan, cases=fitting), job, tell))
    except Interrupted as interrupted:
        raise typer.Exit(128 + interrupted.signum) from None
    _show(outcomes, skipped, json_file, plot)


def main() -> None:
    """Entry point of the command `allreduce_bench`."""
    from bps_rdma.terminal import run_app

    run_app(app, "allreduce_bench")


def _baselines(backends: str | None) -> tuple[str, ...]:
    """The baselines to measure."""
    if backends is not None:
        named = parse_choices(backends, _BACKENDS, "backend")
        if "bps" not in named:
            raise InvalidArgumentError("--backends does not include bps", "add bps: the others are compared with it")
        return tuple(name for name in named if name != "bps")
    installed = ["gloo"] if extras.is_installed("torch") else []
    installed += [name for name in MPI_BASELINES if (environments.folder(name) / "bin" / "mpiexec").exists()]
    return tuple(installed)


def _numbers(text: str) -> list[int]:
    try:
        found = list(dict.fromkeys(int(word) for word in text.split(",")))
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise InvalidArgumentError(f"--ranks {text!r} is not a list of positive numbers", "write it as 2,4,6")
    return found


def _split_by_memory(plan: Plan, world: int, limit: float) -> tuple[tuple[Case, ...], list[Skip]]:
    fitting: list[Case] = []
    skipped: list[Skip] = []
    for case in plan.cases:
        before = fitting[-1].round_bytes if fitting else 0
        need = memory.needed(case.round_bytes, before, world, 1 + len(plan.compare))
        if need <= limit:
            fitting.append(case)
        else:
            reason = f"need about {need / 1e9:.1f} GB of memory, the limit is {limit / 1e9:.1f} GB"
            skipped.append(Skip(world, case.nbytes, reason))
    return tuple(fitting), skipped


def _show(outcomes: list[Outcome], skipped: list[Skip], json_file: Path | None, plot: Path | None) -> None:
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "runs": [to_json(outcome) for outcome in outcomes],
        "skipped": [asdict(skip) for skip in skipped],
    }
    if json_file is not None and str(json_file) == "-":
        print(json.dumps(found))
    else:
        from bps_rdma.tools.bench.report import print_sweep

        print_sweep(outcomes, [(skip.ranks, skip.nbytes, skip.reason) for skip in skipped], wide_console())
        if json_file is not None:
            with output(json_file) as out:
                out.write(json.dumps(found).encode() + b"\n")
            wrote(json_file)
    if plot is not None and outcomes:
        from bps_rdma.tools.bench.plot import save_plot

        save_plot(outcomes, plot)
        wrote(plot)
