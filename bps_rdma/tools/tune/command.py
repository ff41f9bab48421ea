# SPDX-License-Identifier: Apache-2.0
"""The command `bps tune`."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

import bps_rdma
from bps_rdma import extras
from bps_rdma.errors import InvalidArgumentError
from bps_rdma.launch.environment import LocalJob, inside_a_job
from bps_rdma.launch.run import run_job
from bps_rdma.terminal import wide_console
from bps_rdma.tools.bench.plan import format_size, parse_size
from bps_rdma.tools.outputs import check_outputs, progress, wrote
from bps_rdma.tools.tune.copies import Copies, best_chunk, partition_for
from bps_rdma.tools.tune.hosts import Predicted, cluster_of, predict, speeds_of
from bps_rdma.tools.tune.measure import Found, Tell, Trial, has_servers_of_its_own, measure


def tune(
    gradients: Annotated[str, typer.Option(help="Bytes of all gradients of a step, for example 100M.")] = "64M",
    processes: Annotated[
        int, typer.Option("--nproc", "--np", "-np", "-n", min=1, help="Ranks to start, outside of a job.")
    ] = 2,
    transport: Annotated[str | None, typer.Option(help="auto, shm, tcp or rdma; see BPS_TRANSPORT.")] = None,
    backward_ms: Annotated[
        float | None,
        typer.Option(min=0.0, help="Length of the backward pass. Default: as long as sending all gradients."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=1.0, help="Time for measuring.")] = 30.0,
    hosts: Annotated[
        int | None, typer.Option(min=1, help="Also predict a step on so many hosts, and what spare hosts would bring.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="With --hosts: ranks on each.")] = 1,
    gbit: Annotated[
        str | None,
        typer.Option(
            help="With --hosts: speed of their links, Gbit/s; one number, or one for each host. "
            "Default: as in this job, where it has several hosts, else 100."
        ),
    ] = None,
    spare_gbit: Annotated[
        float | None,
        typer.Option(min=0.001, help="With --hosts: speed of a spare host's link. Default: as their slowest."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Plot what was measured into this file (png, svg, pdf).")] = None,
) -> int:
    """Find the sizes of partitions and buckets for this machine, or for a job's links.

    Measures what an operation costs, derives the best size of buckets from that, tries the sizes around it, and prints
    settings. Outside of a job it starts ranks on this machine; inside (torchrun, srun, bps run) it measures that job.
    """
    nbytes = parse_size(gradients)
    if nbytes < 1 << 14:
        raise InvalidArgumentError(f"--gradients {gradients} is too small to cut into buckets", "give at least 16K")
    if hosts is not None and gbit is not None:
        speeds_of(gbit, hosts)
    check_outputs(None, plot)
    if plot is not None and not extras.is_installed("matplotlib"):
        raise InvalidArgumentError("matplotlib is not installed", extras.install_command("matplotlib"))
    if not inside_a_job():
        return run_job(LocalJob(processes, None, transport), [*_this_command(), *sys.argv[1:]])
    if transport is not None:
        os.environ["BPS_TRANSPORT"] = transport
    if has_servers_of_its_own() and os.environ.get("BPS_ROLE", os.environ.get("DMLC_ROLE", "worker")) != "worker":
        raise InvalidArgumentError("this process is no worker", "run `bps tune` in place of the training program")
    shows = int(os.environ.get("RANK") or os.environ.get("DMLC_WORKER_ID") or os.environ.get("SLURM_PROCID") or 0) == 0
    with _progress(seconds, shown=shows) as tell:
        found = measure(nbytes, seconds, None if backward_ms is None else backward_ms / 1e3, tell)
    if shows:
        predicted = None if hosts is None else predict(found, cluster_of(found, hosts, ranks, gbit, spare_gbit))
        _show(found, predicted, as_json=as_json, plot=plot)
    return 0


def _this_command() -> list[str]:
    # Not -m, which searches the current folder first: in a checkout that is the package without its native part.
    root = str(Path(bps_rdma.__file__).parent.parent)
    code = f"import sys; sys.path = [p for p in sys.path if p] + [{root!r}]; from bps_rdma.cli import main; main()"
    return [sys.executable, "-c", code]


@contextlib.contextmanager
def _progress(seconds: float, *, shown: bool) -> Iterator[Tell]:
    if not shown:
        yield lambda _what, _share: None
        return
    with progress(f"measuring for about {seconds:.0f} s") as tell:
        yield tell


def settings_of(found: Found) -> dict[str, str]:
    """The variables that the best sizes need; none where the defaults are as good."""
    settings = {} if found.partition is None else {"BPS_PARTITION_BYTES": str(found.partition)}
    if found.copies is not None and (chunk := best_chunk(found.copies, found.costs, found.bucket)) is not None:
        settings["BPS_GPU_CHUNK_BYTES"] = str(chunk)
    return settings


def settings_of_route(found: Found) -> dict[str, str]:
    """The same for BPS_DEVICE_ROUTE=1; the job needs a GPU."""
    assert found.copies is not None
    partition = partition_for(found.copies, found.costs, found.partition)
    return {"BPS_DEVICE_ROUTE": "1"} | ({} if partition is None else {"BPS_PARTITION_BYTES": str(partition)})


def to_json(found: Found, predicted: Predicted | None) -> dict[str, Any]:
    """All figures, in bytes and seconds."""
    text = asdict(found) | {"settings": settings_of(found), "bucket_mb": found.bucket / (1 << 20)}
    text["step"] = {"predicted_s": found.costs.step(found.nbytes, found.bucket, found.backward_s)}
    text["step"]["measured_s"] = found.backward_s + shown_s(found)
    if found.copies is not None:
        text["settings_of_route"] = settings_of_route(found)
    if predicted is not None:
        cluster, without = predicted.cluster, predicted.without
        text["predicted"] = {
            "hosts": len(cluster.links),
            "ranks": cluster.ranks,
            "gbit": list(cluster.links),
            "spare_gbit": cluster.spare_link,
            "seconds": without.seconds,
            "step_seconds": without.step_seconds,
            "enough_spares": predicted.enough,
            "spare_hosts": [
                asdict(one)
                | {"bytes_per_s": found.nbytes / one.seconds, "of_line_rate": predicted.of_line_rate(one.seconds)}
                for one in predicted.counts
            ],
        }
    return text


def shown_s(found: Found) -> float:
    """The seconds of a step with the best sizes."""
    for pair in found.pairs:
        if (pair.partition, pair.bucket) == (found.partition, found.bucket):
            return pair.seconds
    return next(trial.seconds for trial in found.buckets if trial.nbytes == found.bucket)


def _show(found: Found, predicted: Predicted | None, *, as_json: bool, plot: Path | None) -> None:
    if as_json:
        print(json.dumps(to_json(found, predicted)))
    else:
        _print(found, predicted)
    if plot is not None:
        from bps_rdma.tools.tune.plot import save_plot

        save_plot(found, plot, predicted)
        wrote(plot)


def _print(found: Found, predicted: Predicted | None) -> None:
    console = wide_console()
    routes = "+".join(sorted(set(found.routes)))
    costs = found.costs
    console.print(f"{found.workers} ranks, {routes}, {format_size(found.nbytes)} of gradients")
    console.print(
        f"an operation takes {costs.overhead_s * 1e6:.0f} us and {costs.bytes_per_s / 1e9:.2f} GB/s "
        f"(this describes what was measured within {costs.error:.0%})"
    )
    title = f"partitions of a push_pull of {format_size(found.nbytes)}"
    _print_trials(console, title, "time", found.partitions)
    best = format_size(costs.best_bucket(found.nbytes))
    title = f"buckets, behind a backward pass of {found.backward_s * 1e3:.1f} ms; by the model {best}"
    model = {size: costs.visible(found.nbytes, size) for size in (one.nbytes for one in found.buckets) if size}
    _print_trials(console, title, "what shows", found.buckets, model)
    _print_pairs(console, found)
    _print_copies(console, found.copies)
    if not found.partitions:
        print("# partitions: not tried, because this job has servers of its own")
    for name, value in settings_of(found).items():
        print(f"export {name}={value}")
    if found.copies is not None:
        print(
            "# with the core's own route: "
            + " ".join(f"{name}={value}" for name, value in settings_of_route(found).items())
        )
    if found.partitions and found.partition is None:
        print("# BPS_PARTITION_BYTES: the default is as good as any")
    step_s = found.costs.step(found.nbytes, found.bucket, found.backward_s)
    measured_s = found.backward_s + shown_s(found)
    print(f"# a step: {measured_s * 1e3:.1f} ms measured, {step_s * 1e3:.1f} ms by the model")
    print(f"# bps_rdma.torch.DistributedDataParallel(model, bucket_mb={found.bucket / (1 << 20):g})")
    if predicted is not None:
        _print_predicted(console, predicted)


def _print_predicted(console: Any, predicted: Predicted) -> None:
    cluster, without = predicted.cluster, predicted.without
    hosts = len(cluster.links)
    links = ", ".join(f"{gbit:g}" for gbit in (cluster.links if len(set(cluster.links)) > 1 else cluster.links[:1]))
    print(
        f"# predicted for {hosts} hosts with {cluster.ranks} {'rank' if cluster.ranks == 1 else 'ranks'} "
        f"and {links} Gbit/s each: "
        f"{without.seconds * 1e3:.1f} ms to sum all gradients, {without.step_seconds * 1e3:.1f} ms for a step"
    )
    if hosts == 1:
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    print(f"\nwith spare hosts of {cluster.spare_link:g} Gbit/s")
    table = Table(box=SIMPLE_HEAD)
    headings = (
        "spare hosts",
        "they sum",
        "goodput / line rate",
        "best",
        "all gradients, ms",
        "a step, ms",
        "times faster",
    )
    for heading in headings:
        table.add_column(heading, justify="right", overflow="fold")
    for one in predicted.counts:
        table.add_row(
            str(one.spares),
            f"{one.share:.0%}",
            f"{predicted.of_line_rate(one.seconds):.2f}",
            f"{predicted.of_line_rate(one.best_seconds):.2f}",
            f"{one.seconds * 1e3:.1f}",
            f"{one.step_seconds * 1e3:.1f}",
            f"{without.step_seconds / one.step_seconds:.2f}",
        )
    console.print(table)
    more = f"more than {predicted.enough} spare hosts bring" if predicted.enough else "spare hosts bring"
    print(f"# {more} nothing: the workers' links are then full of their own bytes")


def _print_trials(
    console: Any,
    title: str,
    what: str,
    trials: list[Trial],
    predicted: dict[int, float] | None = None,
) -> None:
    if not trials:
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    print(f"\n{title}")
    table = Table(box=SIMPLE_HEAD)
    for heading in ("size", f"{what}, ms", "quartiles", *(["model, ms"] if predicted else [])):
        table.add_column(heading, justify="right", overflow="fold")
    for trial in trials:
        size = _size_of(trial.nbytes)
        model = [f"{predicted[trial.nbytes] * 1e3:.2f}"] if predicted and trial.nbytes else []
        quartiles = f"{trial.lower * 1e3:.2f} - {trial.upper * 1e3:.2f}"
        table.add_row(size, f"{trial.seconds * 1e3:.2f}", quartiles, *model)
    console.print(table)


def _print_pairs(console: Any, found: Found) -> None:
    if not found.pairs:
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    print("\nthe best of both together")
    table = Table(box=SIMPLE_HEAD)
    for heading in ("partitions", "buckets", "what shows, ms", "quartiles", ""):
        table.add_column(heading, justify="right", overflow="fold")
    for pair in found.pairs:
        is_best = (pair.partition, pair.bucket) == (found.partition, found.bucket)
        quartiles = f"{pair.lower * 1e3:.2f} - {pair.upper * 1e3:.2f}"
        sizes = _size_of(pair.partition), format_size(pair.bucket)
        table.add_row(*sizes, f"{pair.seconds * 1e3:.2f}", quartiles, "best" if is_best else "")
    console.print(table)


def _print_copies(console: Any, copies: Copies | None) -> None:
    if copies is None:
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    print(f"\ncopies of GPU {copies.gpu}, from and to pinned memory, one after the other")
    table = Table(box=SIMPLE_HEAD)
    for heading in ("size", "from it, ms", "GB/s", "to it, ms", "GB/s"):
        table.add_column(heading, justify="right", overflow="fold")
    for one in copies.points:
        times = (f"{part:.{digits}f}" for time in (one.down_s, one.up_s) for part, digits in
                 ((time * 1e3, 3), (one.nbytes / time / 1e9, 1)))  # fmt: skip
        table.add_row(format_size(one.nbytes), *times)
    console.print(table)


def _size_of(nbytes: int | None) -> str:
    return "default" if nbytes is None else format_size(nbytes)
