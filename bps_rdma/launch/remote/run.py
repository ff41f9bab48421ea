# SPDX-License-Identifier: Apache-2.0
"""`bps run -H`: asks the hosts, decides where everything runs, and runs it."""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bps_rdma
from bps_rdma import _core
from bps_rdma.errors import BpsError, InvalidArgumentError, UnreachableError
from bps_rdma.launch.environment import new_name
from bps_rdma.launch.pools import Lent, PoolName, lent_to
from bps_rdma.launch.process import Child
from bps_rdma.launch.remote.agents import Agents
from bps_rdma.launch.remote.cluster_job import ClusterJob, forwarded
from bps_rdma.launch.remote.hostfile import Slots, parse_hosts, read_hostfile
from bps_rdma.launch.remote.plan import HERE, SCHEDULER, Plan, make_plan
from bps_rdma.launch.remote.remote_children import RemoteChildren
from bps_rdma.launch.remote.routes import Address, Routes, choose
from bps_rdma.launch.run import Interrupted, signals_raise, supervise, told, words_of

GRACE_S = 2.0
"""So that a job is over everywhere within three seconds."""


@dataclass(frozen=True)
class Wanted:
    """What the options of `bps run` say about hosts; see there."""

    hosts: Sequence[Slots]
    server_hosts: Sequence[Slots]
    exported: Sequence[str]
    rsh: Sequence[str]


def wanted(
    hosts: str | None, hostfile: Path | None, server_hosts: str | None, exported: Sequence[str], rsh: str | None
) -> Wanted | None:
    """What the options say; None: nothing about hosts.

    Raises:
        InvalidArgumentError: an option is not of its form, or makes no sense with or without another.
    """
    if hosts is None and hostfile is None:
        for option, value in (("--server-hosts", server_hosts), ("-x", exported), ("--rsh", rsh)):
            if value:
                raise InvalidArgumentError(f"{option} is for a job on several hosts", "add -H host1:8,host2:8")
        return None
    if hosts is not None and hostfile is not None:
        raise InvalidArgumentError("-H and --hostfile both name hosts", "leave one of them out")
    program = rsh or _core.Config().text("BPS_RSH")
    try:
        words = shlex.split(program)
    except ValueError as error:
        raise InvalidArgumentError(
            f"BPS_RSH or --rsh {program!r}: {error}", "write a command, as in 'ssh -p 22'"
        ) from None
    return Wanted(
        parse_hosts(hosts) if hosts is not None else read_hostfile(hostfile or Path()),
        parse_hosts(server_hosts, "--server-hosts") if server_hosts else [],
        exported, words,
    )  # fmt: skip


def run_on_hosts(
    where: Wanted,
    command: Sequence[str],
    *,
    ranks: int | None,
    servers: int | None,
    least: int | None,
    transport: str | None,
    prefixed: bool,
    grace: float,
    restarts: int,
    only_check: bool,
    as_json: bool,
    pools: Sequence[PoolName] = (),
) -> int:
    """Run `command` as the ranks of a job on several hosts; the exit status is as that of run_job().

    Raises:
        InvalidArgumentError: the options contradict each other.
        BpsError: hosts cannot take part; says of all of them why.
    """
    plan = make_plan(where.hosts, ranks, where.server_hosts, servers, goes_on=least is not None)
    workers = sum(name.startswith("rank") for name in plan.places)
    if least is not None and least > workers:
        raise InvalidArgumentError(f"--min-np {least} is more than the {workers} ranks", "give at most as many")
    env = forwarded(os.environ, where.exported)
    _core.Config().check()
    words = words_of(command)
    status = 0
    failed: Child | None = None
    name = new_name()
    with signals_raise():
        try:
            signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # a launcher that is stopped would be taken for dead
            with (
                lent_to(name, pools, env) as lent,
                Agents(_hosts_of(plan, lent, least, restarts), where.rsh) as agents,
            ):
                answers = _ask(agents, plan, words, env, prefixed=prefixed)
                routes = _routes(agents, plan, answers, env, lent)
                servers_now = sum(name.startswith("server") for name in plan.places) or None
                ports = answers[plan.root]["ports"][0], answers[plan.places["rank 0"]]["ports"][1]
                job = ClusterJob(
                    workers, servers_now, transport, least, plan=plan, routes=routes, name=name, lent=lent.count,
                    scheduler_port=ports[0], master_port=ports[1],
                )  # fmt: skip
                if only_check:
                    print(_shown(job, answers, as_json=as_json))
                    return 0
                for connection in agents.connections.values():
                    connection.send({"do": "job", "secret": job.secret})
                lent.begin(job, env)
                state = Path(answers[plan.root]["folder"], "scheduler") if least is not None else None
                children = RemoteChildren(agents, plan)
                failed, status = supervise(children, job, words, state, grace=grace, restarts=restarts)
                if failed is not None or status:
                    lent.end()
        except Interrupted as interrupted:
            return 128 + interrupted.signum
        finally:
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    return told(failed, status)


def _hosts_of(plan: Plan, lent: Lent, least: int | None, restarts: int) -> list[str]:
    """The hosts that have something to do, or are there for processes that are started again."""
    if lent.count:
        plan.places.setdefault(SCHEDULER, plan.first_host)
    spare = least is not None and restarts > 0
    return [host for host in plan.hosts if spare or host in plan.places.values()]


def _ask(agents: Agents, plan: Plan, words: Sequence[str], env: dict[str, str], *, prefixed: bool) -> dict[str, Any]:
    """Asks each host whether the job can run there. Raises BpsError that says of each why not."""
    unfit = agents.greet()
    joined = _is_one_file(1, 2)
    coloured = os.isatty(1) and not os.environ.get("NO_COLOR")
    orders: dict[str, dict[str, Any]] = {}
    for one in agents.connections.values():
        if one.host in unfit:
            continue
        has_servers = one.host in plan.server_hosts
        needed = {
            "bps-server": has_servers,
            "bps-scheduler": SCHEDULER in plan.places and one.host in (plan.places[SCHEDULER], plan.first_host),
        }
        orders[one.host] = {
            "do": "ask", "folder": str(Path.cwd()), "command": list(words) if one.host in plan.slots else [],
            "ports": 2 + sum(place == one.host for name, place in plan.places.items() if name != SCHEDULER),
            "binaries": [name for name, is_needed in needed.items() if is_needed], "env": env,
            "token": secrets.token_hex(16), "prefixed": prefixed, "joined": joined, "coloured": coloured,
        }  # fmt: skip
    answers = agents.ask("asking", orders)
    problems = list(unfit.values())
    for host, answer in answers.items():
        answer["token"] = orders[host]["token"]
        problems += [f"{problem} on {host}" for problem in answer["problems"]]
    if problems:
        shown = problems[0] if len(problems) == 1 else "\n  ".join(["the job cannot start:", *problems])
        raise BpsError(
            shown,
            f"each host needs bps_rdma {bps_rdma.__version__} in {sys.executable}, the folder of the job, and to let "
            "you in without a question (`ssh HOST true`)",
        )
    return answers


def _routes(agents: Agents, plan: Plan, answers: dict[str, Any], env: dict[str, str], lent: Lent) -> Routes:
    """Has the hosts find out how they reach each other. Raises UnreachableError when they do not."""
    known = {host: [Address(**one) for one in answer["addresses"]] for host, answer in answers.items()}
    if len(known) == 1 and lent.count:
        return Routes({plan.root: lent.address if plan.root == HERE else known[plan.root][0].address})
    if len(known) == 1:
        return choose(plan.root, known, {})
    called = {
        host: [(other, one.address) for other in known if other != host for one in known[other]] for host in known
    }
    targets = {
        host: [
            {"address": address, "port": answers[other]["port"], "token": answers[other]["token"]}
            for other, address in called[host]
        ]
        for host in known
    }
    found = agents.ask("calling", {host: {"do": "reach", "targets": targets[host]} for host in known})
    reached: dict[str, dict[str, dict[str, str]]] = {}
    for host, answer in found.items():
        for (other, address), source in zip(called[host], answer["reached"], strict=True):
            if source is not None:
                reached.setdefault(host, {}).setdefault(other, {})[address] = source
    only = _interfaces(env)
    if plan.places.get(SCHEDULER) != HERE or HERE in plan.slots:
        return choose(plan.root, known, reached, only)
    try:
        return choose(HERE, known, reached, only)
    except UnreachableError:
        plan.places[SCHEDULER] = plan.first_host
        print(
            f"note: not all hosts reach this one, so the scheduler runs on {plan.root}, and the job ends with it",
            file=sys.stderr,
        )
        del known[HERE]
        return choose(plan.root, known, reached, only)


def _interfaces(env: dict[str, str]) -> list[str]:
    names = next(filter(None, map(env.get, ("BPS_INTERFACE", "DMLC_INTERFACE", "NCCL_SOCKET_IFNAME"))), "")
    return [] if names.startswith("^") else [name for name in re.split("[=,]", names) if name]


def _is_one_file(one: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(one, other)
    except OSError:  # one of them is closed
        return False


def _shown(job: ClusterJob, answers: dict[str, Any], *, as_json: bool) -> str:
    """What was found out, for `bps run --check`."""
    hosts = [
        {
            "host": host,
            "address": job.routes.addresses[host],
            "processes": [name for name, place in job.plan.places.items() if place == host],
            "python": answer["python"],
            "folder": answer["path"],
        }
        for host, answer in answers.items()
        if host in job.routes.addresses
    ]
    if as_json:
        ports = {"scheduler": job.scheduler_port, "master": job.master_port}
        return json.dumps(
            {"version": bps_rdma.__version__, "executable": sys.executable, "ports": ports, "hosts": hosts}, indent=1
        )
    width = shutil.get_terminal_size().columns
    lines = [f"{one['host']} at {one['address']}: {', '.join(one['processes']) or 'spare'}" for one in hosts]
    return "\n".join(line if len(line) <= width else line[: width - 4] + " ..." for line in lines)
