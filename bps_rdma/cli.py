# SPDX-License-Identifier: Apache-2.0
"""The command `bps`."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
from typing import Annotated

import typer

import bps_rdma
from bps_rdma import _core
from bps_rdma.bench.cli import pushpull_bench
from bps_rdma.doctor import doctor as examine_machine
from bps_rdma.launch.hosts import job_on
from bps_rdma.launch.run import run_job
from bps_rdma.launch.slurm_components import component_variables
from bps_rdma.terminal import run_app, wide_console

app = typer.Typer(
    help="Gradient push/pull for PyTorch and Megatron.",
    add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True,
)  # fmt: skip


def main() -> None:
    """Entry point."""
    run_app(app, "bps")


app.command("bench")(pushpull_bench)
app.command("doctor")(examine_machine)


# Options after the command belong to that command.
@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="The command that every rank runs.")],
    processes: Annotated[
        int | None,
        typer.Option("--nproc", "-np", "-n", min=1, help="Ranks to start here. Default in a Slurm step: 1 per task."),
    ] = None,
    servers: Annotated[
        int | None, typer.Option(min=1, help="Number of dedicated server processes. Default: servers inside the ranks.")
    ] = None,
    least: Annotated[
        int | None, typer.Option("--min-np", min=1, help="Go on without lost ranks while that many are left.")
    ] = None,
    transport: Annotated[str | None, typer.Option(help="auto, shm, tcp or rdma; see BPS_TRANSPORT.")] = None,
    prefix: Annotated[bool, typer.Option(help="Start each line of output with its rank.")] = False,
    grace: Annotated[
        float, typer.Option(min=0.0, help="Seconds for ranks to end after one failed, and after SIGTERM.")
    ] = 3.0,
    hosts: Annotated[int | None, typer.Option("--nnodes", min=1, help="Hosts of the job, each with a bps run.")] = None,
    host: Annotated[
        int | None, typer.Option("--node-rank", min=0, help="Which host this is. Default: JOB_COMPLETION_INDEX.")
    ] = None,
    address: Annotated[str | None, typer.Option("--master-addr", help="Host 0. Default: MASTER_ADDR.")] = None,
    port: Annotated[
        int | None, typer.Option("--master-port", min=1, max=65535, help="Default: MASTER_PORT, or 29500.")
    ] = None,
) -> int:
    """Run a command as several ranks on this machine: bps run -np 2 train.py --its options.

    For a job on several hosts, start it on each: by `srun`, whose variables it understands, or with --nnodes,
    --node-rank and --master-addr. SIGUSR1 and SIGUSR2 are passed on to the ranks.

    The exit status is that of the first rank that fails. No process is left running, whatever happens.
    """
    job = job_on(processes, servers, transport, hosts=hosts, host=host, address=address, port=port, least=least)
    return run_job(job, command, prefixed=prefix, grace=grace)


@app.command("env")
def print_environment(
    processes: Annotated[int, typer.Option("--nproc", "-np", "-n", min=1, help="Ranks of each task.")] = 1,
) -> None:
    """Print what the parts of a heterogeneous Slurm job have in common: eval "$(bps env)" in the batch script.

    Component 0 has the ranks, component 1 the dedicated servers. docs/slurm.md has an example.
    """
    for name, value in component_variables(os.environ, processes).items():
        print(f"export {name}={shlex.quote(value)}")


@app.command()
def config(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/settings.md.")] = False,
) -> None:
    """Show every setting with its value, the source of the value, and its meaning.

    Secrets are shown as set or unset. The exit status is 2 when a value is invalid.
    """
    settings = bps_rdma.config()
    if not as_markdown:
        for _, text, is_warning in _core.check_environment():
            print(f"{'warning' if is_warning else 'note'}: {text}", file=sys.stderr)
        _core.Config().check()
    if as_json:
        print(json.dumps([dataclasses.asdict(setting) for setting in settings], indent=1))
    elif as_markdown:
        print(_markdown(settings), end="")
    else:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        table = Table("setting", "value", "source", "meaning", box=SIMPLE_HEAD)
        for setting in settings:
            source = setting.source if setting.source == "default" else f"[bold]{setting.source}[/bold]"
            table.add_row(setting.name, setting.value or "-", source, setting.help)
        wide_console().print(table)


@app.command()
def version() -> None:
    """Show the version."""
    print(f"bps_rdma {bps_rdma.__version__}")


def _markdown(settings: list[bps_rdma.SettingValue]) -> str:
    lines = [
        "# Settings",
        "",
        "<!-- Generated by `bps config --markdown`; ci/test fails when it is out of date. -->",
        "",
        "A value comes from, in this order: the arguments of `init()` (without `BPS_`, in lower case), the variable",
        "itself, the other names from left to right, the default. An empty variable counts as unset.",
        "`bps config` shows the values in force and where each comes from.",
        "",
        "| setting | also read from | default | meaning |",
        "|---|---|---|---|",
    ]
    for setting in settings:
        aliases = " ".join(f"`{alias}`" for alias in setting.aliases)
        default = f"`{setting.default}`" if setting.default else ""
        lines.append(f"| `{setting.name}` | {aliases} | {default} | {setting.help.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"
