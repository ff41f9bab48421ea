# SPDX-License-Identifier: Apache-2.0
"""The options of `python -m bps_rdma.tools.compare`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import torch
import typer

from bps_rdma import extras
from bps_rdma.errors import InvalidArgumentError
from bps_rdma.files import output
from bps_rdma.launch.environment import LocalJob
from bps_rdma.launch.run import Interrupted, signals_raise
from bps_rdma.terminal import closing, wide_console
from bps_rdma.tools.bench.plan import parse_choices
from bps_rdma.tools.compare.baselines import KINDS, OPTIMIZERS, USUAL, methods_of
from bps_rdma.tools.compare.figures import to_json
from bps_rdma.tools.compare.launch import WARMUP, Comparison, Times, run_comparison
from bps_rdma.tools.compare.models import MODELS
from bps_rdma.tools.compare.report import print_memory, print_report, save_plot
from bps_rdma.tools.outputs import check_outputs, progress, wrote

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(
    epilog=closing(
        "bps ddp-bench --model mlp --rounds 2",
        "bps ddp-bench --strategies bucketed,ddp-gloo --buckets 25 --json -",
        "bps ddp-bench --strategies bucketed,sharded --optimizer adamw --memory",
        status="a rank failed, or two methods reached different weights.",
    )
)
def compare(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.")] = "gpt-25m",
    strategies: Annotated[str, typer.Option(help=f"Comma-separated, of {','.join(KINDS)}.")] = ",".join(USUAL),
    buckets: Annotated[str, typer.Option(help="Comma-separated bucket sizes in MB.")] = "1,10,100,1000",
    ranks: Annotated[int, typer.Option(min=1, help="Number of worker processes to start.")] = 2,
    servers: Annotated[
        int | None,
        typer.Option(min=1, help="Dedicated server processes. Default: servers inside the workers."),
    ] = None,
    transport: Annotated[str | None, typer.Option(help="auto, shm, tcp or rdma; see BPS_TRANSPORT.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples per rank in a batch.")] = 1,
    length: Annotated[int, typer.Option(min=2, help="Tokens per sample.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of every method.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps per turn, after three warm-up steps.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch per rank.")] = 1,
    device: Annotated[str, typer.Option(help="cpu or cuda. Ranks share a GPU where there are fewer.")] = "cpu",
    optimizer: Annotated[str, typer.Option(help=f"One of {', '.join(OPTIMIZERS)}.")] = "sgd",
    memory: Annotated[bool, typer.Option("--memory", help="Show what each training holds in memory.")] = False,
    profile: Annotated[
        Path | None,
        typer.Option(help="Write a trace of each method and rank, by torch's profiler, into this folder."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all results to this file; - for stdout.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Plot the times of steps into this file (png, svg, pdf).")] = None,
) -> None:
    """Train one model with each method in turns, and show the time of a step and how much of it is spent waiting.

    All methods start from the same weights and must reach the same weights.
    """
    _check_choice("model", model, tuple(MODELS))
    _check_choice("optimizer", optimizer, tuple(OPTIMIZERS))
    if device not in ("cpu", "cuda"):
        raise InvalidArgumentError(f"--device {device!r} is neither cpu nor cuda", "use one of them")
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidArgumentError("--device cuda: torch finds no GPU on this machine", "leave out --device")
    check_outputs(json_file, plot)
    if profile is not None:
        _make_folder(profile)
    if plot is not None and not extras.is_installed("matplotlib"):
        raise InvalidArgumentError("matplotlib is not installed", extras.install_command("matplotlib"))
    kinds = parse_choices(strategies, KINDS, "strategy")
    sizes = _sizes(buckets)
    methods = tuple(methods_of(kinds, sizes))
    plan = Comparison(model, samples, length, ranks, rounds, steps, threads, methods, kinds, device, optimizer, profile)
    try:
        with signals_raise():
            times = _run(plan, LocalJob(ranks, servers, transport))
    except Interrupted as interrupted:
        raise typer.Exit(128 + interrupted.signum) from None
    if json_file == Path("-"):
        print(json.dumps(to_json(times)))
    else:
        print_report(times, wide_console())
        if memory:
            print_memory(times, wide_console())
    _write_files(times, json_file, plot)
    if profile is not None:
        wrote(profile)


def _write_files(times: Times, json_file: Path | None, plot: Path | None) -> None:
    if json_file is not None and json_file != Path("-"):
        with output(json_file) as out:
            out.write(json.dumps(to_json(times), indent=1).encode() + b"\n")
        wrote(json_file)
    if plot is not None:
        save_plot(times, plot)
        wrote(plot)


def _check_choice(what: str, chosen: str, choices: tuple[str, ...]) -> None:
    if chosen not in choices:
        raise InvalidArgumentError(f"unknown {what} {chosen!r}", f"use one of {', '.join(choices)}")


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgumentError(f"--profile {path}: {error.strerror}", "name a folder that you may write") from None


def _sizes(text: str) -> tuple[float, ...]:
    try:
        sizes = tuple(float(word) for word in text.split(","))
    except ValueError:
        sizes = (0.0,)
    if not all(0 < size < math.inf for size in sizes):
        raise InvalidArgumentError(f"--buckets {text!r} is not a list of positive numbers", "write it as 1,10,100")
    return sizes


def _run(plan: Comparison, job: LocalJob) -> Times:
    turns = plan.rounds * len(plan.methods)
    announcement = (
        f"training {plan.model} on {plan.ranks} ranks with {len(plan.methods)} methods in turns: "
        f"{turns * (plan.steps + WARMUP)} steps in all; the first round shows how long they take"
    )
    with progress(announcement) as tell:
        return run_comparison(plan, job, tell)
