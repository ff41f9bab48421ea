# SPDX-License-Identifier: Apache-2.0
"""The command `bps`."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

import bps_rdma
from bps_rdma import _core
from bps_rdma.errors import InvalidArgumentError
from bps_rdma.launch.bpslaunch import main as bpslaunch
from bps_rdma.launch.hosts import job_on
from bps_rdma.launch.pools import parse_pools, pools_of
from bps_rdma.launch.remote.run import GRACE_S as HOSTS_GRACE_S
from bps_rdma.launch.remote.run import run_on_hosts, wanted
from bps_rdma.launch.run import GRACE_S, run_job
from bps_rdma.launch.slurm import component_variables
from bps_rdma.terminal import closing, run_app, wide_console
from bps_rdma.tools.bench.allreduce import CLOSING as ALLREDUCE_CLOSING
from bps_rdma.tools.bench.allreduce import allreduce_bench
from bps_rdma.tools.bench.cli import CLOSING as BENCH_CLOSING
from bps_rdma.tools.bench.cli import pushpull_bench
from bps_rdma.tools.compare import main as compare_training
from bps_rdma.tools.doctor import doctor as examine_machine
from bps_rdma.tools.inspection.commands import dump, why
from bps_rdma.tools.inspection.top import top
from bps_rdma.tools.pool import pool as show_pools
from bps_rdma.tools.trace.cli import app as trace_app
from bps_rdma.tools.tune.command import tune

app = typer.Typer(
    help="Gradient push/pull for PyTorch and Megatron.",
    epilog="`bps COMMAND --help` has examples of each command, and its exit status.",
    pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True,
)  # fmt: skip
# The words that follow belong to a program whose options this one does not know.
_PASS_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def main() -> None:
    """Entry point."""
    run_app(app, "bps")


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


class _Run(typer.core.TyperCommand):
    """Understands -np2 and -np=2, as mpirun's users write it, before the command that is run."""

    def parse_args(self, context: Any, args: list[str]) -> list[str]:
        """Rewrites them to -np 2."""
        flags = {
            word for one in self.params if getattr(one, "is_flag", False) for word in (*one.opts, *one.secondary_opts)
        }
        found: list[str] = []
        left = list(args)
        while left and left[0].startswith("-") and left[0] != "--":
            word = left.pop(0)
            number = re.fullmatch(r"-np=?(\d+)", word)
            found += ["-np", number[1]] if number else [word]
            if not number and word not in flags and "=" not in word and left:
                found.append(left.pop(0))
        return super().parse_args(context, found + left)


# Options after the command belong to that command.
@app.command(
    cls=_Run, context_settings={"allow_interspersed_args": False}, short_help="Start a command as several ranks.",
    epilog=closing(
        "bps run -np 2 train.py --epochs 3", "bps run -np 2 -m package.train", "bps run -np 4 --servers 2 ./program",
        "bps run -H host1:8,host2:8 train.py", "bps run --hostfile hosts --server-hosts dpu1,dpu2 python train.py",
        "bps run -H host1:8,host2:8 --pool dpu1,dpu2 train.py",
        "bps run --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 -np 8 train.py",
        status="the job did not start; otherwise, that of the rank that failed first.",
    ),
)  # fmt: skip
def run(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="The command that every rank runs.")],
    processes: Annotated[
        int | None,
        typer.Option(
            "--nproc",
            "--np",
            "-np",
            "-n",
            min=1,
            help="Ranks to start here. Default in a Slurm step: 1 per task; with -H: as many as there are slots.",
        ),
    ] = None,
    is_module: Annotated[bool, typer.Option("-m", help="COMMAND is a Python module, as in python -m.")] = False,
    servers: Annotated[
        int | None, typer.Option(min=1, help="Number of dedicated server processes. Default: servers inside the ranks.")
    ] = None,
    least: Annotated[
        int | None, typer.Option("--min-np", min=1, help="Go on without lost ranks while that many are left.")
    ] = None,
    restarts: Annotated[
        int, typer.Option(min=0, help="With --min-np: how often lost ranks and servers are started again, in all.")
    ] = 0,
    transport: Annotated[str | None, typer.Option(help="auto, shm, tcp or rdma; see BPS_TRANSPORT.")] = None,
    prefix: Annotated[bool, typer.Option(help="Start each line of output with its rank.")] = False,
    grace: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Seconds for ranks to end after one failed, and after SIGTERM. Default: 3, on several hosts 2.",
        ),
    ] = None,
    hosts: Annotated[int | None, typer.Option("--nnodes", min=1, help="Hosts of the job, each with a bps run.")] = None,
    host: Annotated[
        int | None, typer.Option("--node-rank", min=0, help="Which host this is. Default: JOB_COMPLETION_INDEX.")
    ] = None,
    address: Annotated[str | None, typer.Option("--master-addr", help="Host 0. Default: MASTER_ADDR.")] = None,
    port: Annotated[
        int | None, typer.Option("--master-port", min=1, max=65535, help="Default: MASTER_PORT, or 29500.")
    ] = None,
    on: Annotated[
        str | None,
        typer.Option("-H", "--host", metavar="HOST:SLOTS", help="Start ranks on these hosts, as in: host1:8,host2:8"),
    ] = None,
    hostfile: Annotated[Path | None, typer.Option(help="A file with a host in each line, as in: host1 slots=8")] = None,
    server_hosts: Annotated[
        str | None, typer.Option(metavar="HOST:N", help="Start dedicated servers on these hosts, one each, or N.")
    ] = None,
    pool: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Ask these pools for a server each (bps-server --pool). See BPS_POOL."),
    ] = None,
    exported: Annotated[
        list[str] | None,
        typer.Option("-x", metavar="NAME[=VALUE]", help="With -H: a variable that the ranks get as well."),
    ] = None,
    rsh: Annotated[str | None, typer.Option(help="The program that leads to hosts. Default: BPS_RSH, or ssh.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Ask the hosts, say what would run where, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --check: print JSON.")] = False,
) -> int:
    """Run a command as several ranks on this machine, or on several hosts.

    With -H or --hostfile it starts them on each host by ssh, in this folder and with this Python. BPS_* variables and
    their aliases (BYTEPS_*, DMLC_*, NCCL_*) go with them. Without -H, start one bps run on each host: by `srun`, whose
    variables it understands, or with --nnodes, --node-rank and --master-addr. SIGUSR1 and SIGUSR2 are passed on to the
    ranks.

    However it ends, no process is left running.
    """
    if is_module:
        command = [sys.executable, "-m", *command]
    if restarts and least is None:
        raise InvalidArgumentError(
            "--restarts is for jobs that go on without lost ranks", "add --min-np, or leave it out"
        )
    where = wanted(on, hostfile, server_hosts, exported or [], rsh)
    if where is not None:
        if (hosts, host, address, port) != (None, None, None, None):
            what = "--nnodes, --node-rank, --master-addr and --master-port are for a bps run on each host"
            raise InvalidArgumentError(what, "leave them out, or -H and --hostfile")
        return run_on_hosts(
            where, command, ranks=processes, servers=servers, least=least, transport=transport, prefixed=prefix,
            grace=HOSTS_GRACE_S if grace is None else grace, restarts=restarts, only_check=check, as_json=as_json,
            pools=parse_pools(_core.Config().text("BPS_POOL") if pool is None else pool),
        )  # fmt: skip
    if check or as_json:
        raise InvalidArgumentError("--check and --json are for a job on several hosts", "add -H host1:8,host2:8")
    job = job_on(processes, servers, transport, hosts=hosts, host=host, address=address, port=port, least=least)
    return run_job(
        job, command, prefixed=prefix, grace=GRACE_S if grace is None else grace, restarts=restarts,
        pools=pools_of(job, pool),
    )  # fmt: skip


app.command("doctor", short_help="Check this machine, and transfers on it.", epilog=closing(
    "bps doctor", "BPS_TRANSPORT=rdma bps doctor --json", "bps doctor --serve",
    status="the settings ask for something that does not work here.",
))(examine_machine)  # fmt: skip
app.command("why", short_help="Say whom a running or stuck job waits for.", epilog=closing(
    "bps why", "bps why 10.0.0.1:9010", "bps why --json", "bps why dumps/",
    status="no job was found, or its scheduler does not answer.",
))(why)  # fmt: skip
app.command("top", short_help="Show the members of a running job.", epilog=closing(
    "bps top", "bps top 10.0.0.1:9010 --once", "bps top --json",
    status="no job was found, or its scheduler does not answer.",
))(top)  # fmt: skip
app.command("dump", short_help="Print what every process of a job does.", epilog=closing(
    "bps dump -o job.json", "bps dump --stacks", status="no job was found.",
))(dump)  # fmt: skip
app.command("pool", short_help="Show pools of servers, and the jobs there.", epilog=closing(
    "bps pool", "bps pool dpu1,dpu2:9031 --json", "bps pool --end run-4711-1b2c3d4e",
    status="a pool does not answer, or does not know this user.",
))(show_pools)  # fmt: skip
app.command("tune", short_help="Find the sizes of partitions and buckets that suit.", epilog=closing(
    "bps tune --gradients 100M", "bps tune --transport tcp --plot tune.png", "bps run -np 4 bps tune --json",
    "bps tune --hosts 16 --ranks 8 --gbit 200", status="a result was wrong, or a rank failed.",
))(tune)  # fmt: skip
app.command("bench", short_help="Measure push_pull (pushpull_bench).", epilog=BENCH_CLOSING)(pushpull_bench)
app.command("allreduce", short_help="Measure over numbers of ranks (allreduce_bench).", epilog=ALLREDUCE_CLOSING)(
    allreduce_bench
)


@app.command("ddp-bench", context_settings=_PASS_ON, short_help="Compare ways to train a model (ddp_bench).")
def ddp_bench(context: typer.Context) -> None:
    """Compare strategies of data-parallel training with torch's DDP."""
    compare_training("bps ddp-bench", context.args)


app.add_typer(trace_app, name="trace", short_help="Read traces: merge, summary.")


@app.command("launch", context_settings=_PASS_ON, short_help="Start what DMLC_ROLE says (bpslaunch).")
def launch_role(context: typer.Context) -> None:
    """Start what BytePS's variables ask for."""
    bpslaunch(context.args)


@app.command("env", short_help="Print variables for parts of a Slurm job.", epilog=closing('eval "$(bps env -np 8)"'))
def print_environment(
    processes: Annotated[int, typer.Option("--nproc", "--np", "-np", "-n", min=1, help="Ranks of each task.")] = 1,
) -> None:
    """Print what the parts of a heterogeneous Slurm job have in common: eval "$(bps env)" in the batch script.

    Component 0 has the ranks, component 1 the dedicated servers. docs/slurm.md has an example.
    """
    for name, value in component_variables(os.environ, processes).items():
        print(f"export {name}={shlex.quote(value)}")


@app.command(
    short_help="Show the settings, their values and sources.",
    epilog=closing("bps config", "BPS_TIMEOUT=10 bps config --json", status="it failed."),
)
def config(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/settings.md.")] = False,
) -> None:
    """Show every setting with its value, the source of the value, and its meaning.

    Secrets are shown as set or unset.
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
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text

        console = wide_console()
        if console.width < 60:  # columns would be a letter wide
            for setting in settings:
                console.print(f"{setting.name}={setting.value} ({setting.source})", highlight=False)
                console.print(Padding(setting.help, (0, 0, 0, 2)))
            return
        table = Table(box=SIMPLE_HEAD)
        for heading in ("setting", "value", "source", "meaning"):
            # Both are copied: a name is never broken, and a value never cut.
            table.add_column(heading, overflow="fold", no_wrap=heading == "setting")
        for setting in settings:
            source = Text(setting.source, "" if setting.source == "default" else "bold")
            table.add_row(setting.name, setting.value or "-", source, setting.help)
        console.print(table)


@app.command(short_help="Show the version.", epilog=closing("bps version --json"))
def version(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show the version; as JSON, also those of what it runs on, and whether RDMA was compiled in."""
    if as_json:
        versions = {"bps_rdma": bps_rdma.__version__, "rdma": _core.with_rdma, "python": platform.python_version()}
        print(json.dumps(versions | {"numpy": metadata.version("numpy"), "system": platform.platform()}))
    else:
        print(f"bps_rdma {bps_rdma.__version__}" + ", built without RDMA" * (not _core.with_rdma))


# The settings in the order of the core's table, each group with its first one.
_GROUPS = {
    "BPS_ROLE": "Who takes part",
    "BPS_MIN_WORKERS": "Losses, and which servers sum",
    "BPS_TRANSPORT": "Network",
    "BPS_RDMA_HCA": "RDMA",
    "BPS_PARTITION_BYTES": "Tensors",
    "BPS_SERVER_ENGINE_THREAD": "Servers",
    "BPS_POOL": "Pools of servers",
    "BPS_TIMEOUT": "Time limits",
    "BPS_LOG_LEVEL": "Seeing what a job does",
}
_INTRODUCTION = """\
# Settings

<!-- Generated by `bps config --markdown`; ci/test fails when it is out of date. -->

Set these as environment variables, or pass them to `init()`, without `BPS_` and in lower case. You seldom need one: a
job on one machine needs none, and a job on several machines [a secret](start.md#with-a-command-on-each-machine).

The column "also read from" has the aliases: names of BytePS, NCCL and torchrun. If a value is given in several ways,
the argument of `init()` counts, then the variable, then its aliases from left to right. An empty variable counts as
unset. `bps config` shows each value, and where it comes from. "Dedicated" servers are
[processes of their own](servers.md).
"""


def _markdown(settings: list[bps_rdma.SettingValue]) -> str:
    lines = [_INTRODUCTION.rstrip()]
    for setting in settings:
        if setting.name in _GROUPS:
            lines += ["", f"## {_GROUPS[setting.name]}", "", "| setting | also read from | default | meaning |"]
            lines += ["|---|---|---|---|"]
        aliases = " ".join(f"`{alias}`" for alias in setting.aliases)
        default = f"`{setting.default}`" if setting.default else ""
        lines.append(f"| `{setting.name}` | {aliases} | {default} | {setting.help.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"
