# SPDX-License-Identifier: Apache-2.0
"""The role of this process in the job: turns the variables that launchers set into a `_core.Startup`.

Three ways to start (architecture: Start-up), after launch/cluster.py has turned Slurm's variables into torchrun's:

* classic: DMLC_ROLE, DMLC_NUM_WORKER, DMLC_NUM_SERVER, ... with separate scheduler and server processes;
* launched with separate servers: `bps run --servers K` sets BPS_NUM_SERVERS beside torchrun's variables;
* embedded: torchrun's variables, or none at all; rank 0 hosts the scheduler and every rank is also a server. With
  BPS_ROLE=joint and BPS_NUM_SERVERS, which is then the number of ranks, the scheduler is a process of its own.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import sys
from collections.abc import Sequence
from typing import Any

from bps_rdma import _core
from bps_rdma.errors import InvalidArgumentError

_PORT_CANDIDATES = 16
_PORTS = 12000, 20000  # the lowest, and how many
_LONGEST_COMMAND = 800  # characters; with the marks of each piece it is longer, see kMostOriginBytes


def from_config(config: Any) -> Any:
    """The Startup of this process.

    Raises:
        InvalidArgumentError: variables contradict each other, are missing, or name no compression; names them.
    """
    if compression := config.text("BPS_COMPRESSION"):
        _core.Codec(compression)
    role = config.text("BPS_ROLE") or "joint"
    if role not in ("worker", "joint"):
        raise InvalidArgumentError(
            f"init() starts workers, but BPS_ROLE (or DMLC_ROLE) is {role!r}",
            "start servers with bps-server and the scheduler with bps-scheduler (or bpslaunch)",
        )
    startup = _core.Startup()
    rank, world = _rank_and_world(config)
    if not 0 <= rank < world:
        raise InvalidArgumentError(f"rank {rank} is not in 0..{world - 1}", "check RANK and WORLD_SIZE")
    startup.worker_rank = rank
    startup.workers = world
    startup.processes_on_host = _integer(config, "BPS_LOCAL_SIZE", default=1)
    startup.scheduler_host = config.text("BPS_ROOT_URI")
    if config.text("BPS_NUM_SERVERS"):
        _separate(config, startup)
        if role == "joint" and config.text("BPS_ROLE"):
            _servers_inside(startup)
    else:
        _embedded(config, startup)
    return startup


def port_range(config: Any) -> tuple[int, int]:
    """The lowest port that a process may listen on for other hosts, and how many from there on.

    Raises:
        InvalidArgumentError: a setting, such as BPS_PORTS, has no usable value.
    """
    if not (text := config.text("BPS_PORTS")):
        return _PORTS
    config.check()
    first, last = map(int, text.split("-"))
    return first, last - first + 1


def _integer(config: Any, name: str, default: int) -> int:
    if not config.text(name):
        return default
    return int(config.integer(name))


def _rank_and_world(config: Any) -> tuple[int, int]:
    local_size = _integer(config, "BPS_LOCAL_SIZE", default=1)
    local_rank = _integer(config, "BPS_LOCAL_RANK", default=0)
    if config.text("BPS_ROLE") and config.text("BPS_NUM_WORKERS"):
        # BytePS counts machines, and every local process of a machine is a worker.
        machines = _integer(config, "BPS_NUM_WORKERS", default=1)
        if config.source("BPS_RANK") in ("argument", "BPS_RANK", "BYTEPS_GLOBAL_RANK"):
            return _integer(config, "BPS_RANK", default=0), machines * local_size
        if machines > 1:
            _require(config, "BPS_WORKER_ID", "DMLC_WORKER_ID", "BPS_NUM_WORKERS")
        if local_size > 1:
            _require(config, "BPS_LOCAL_RANK", "BYTEPS_LOCAL_RANK", "BPS_LOCAL_SIZE")
        return _integer(config, "BPS_WORKER_ID", default=0) * local_size + local_rank, machines * local_size
    if config.text("BPS_WORLD_SIZE"):
        _require(config, "BPS_RANK", "RANK", "BPS_WORLD_SIZE")
        return _integer(config, "BPS_RANK", default=0), _integer(config, "BPS_WORLD_SIZE", default=1)
    # None of them makes sense for a job of one process: with each process as a job of its own, nothing would be summed.
    for name, missing in _HALVES:
        if config.text(name) and not (name == "BPS_LOCAL_SIZE" and local_size == 1):
            raise InvalidArgumentError(
                f"{_told(config, name)}, but {missing} is not set: nothing says which of how many ranks this is",
                "start with torchrun, `bps run`, mpirun, srun or bpslaunch, or set all of the variables that they set; "
                "for a job of one rank unset it",
            )
    return 0, 1


_HALVES = (
    ("BPS_RANK", "WORLD_SIZE"),
    ("BPS_LOCAL_RANK", "WORLD_SIZE"),
    ("BPS_LOCAL_SIZE", "WORLD_SIZE"),
    ("BPS_NUM_WORKERS", "DMLC_ROLE"),
    ("BPS_WORKER_ID", "DMLC_ROLE"),
    ("BPS_ROLE", "DMLC_NUM_WORKER"),
)


def _require(config: Any, name: str, usual: str, because: str) -> None:
    if not config.text(name):
        raise InvalidArgumentError(
            f"{_told(config, because)}, but {usual} is not set",
            f"set it to a number of its own in each process ({name} says the same), or start with torchrun, `bps run`, "
            "mpirun, srun or bpslaunch",
        )


def _told(config: Any, name: str) -> str:
    """Names a setting as the user has given it: RANK=1, or rank=1 for an argument of init()."""
    source = config.source(name)
    return f"{name[4:].lower() if source == 'argument' else source}={config.text(name)}"


def _separate(config: Any, startup: Any) -> None:
    startup.servers = config.integer("BPS_NUM_SERVERS")
    if not config.text("BPS_ROOT_PORT"):
        raise InvalidArgumentError(
            "separate servers need a scheduler, and its port is not set",
            "set BPS_ROOT_URI and BPS_ROOT_PORT (or DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT) on all members",
        )
    startup.scheduler_ports = [config.integer("BPS_ROOT_PORT")]
    startup.job = config.text("BPS_JOB_ID")
    host = config.source("BPS_ROOT_URI")
    startup.scheduler_hint = (
        f"start the scheduler, or check {'BPS_ROOT_URI' if host == 'default' else host} and "
        f"{config.source('BPS_ROOT_PORT')}, and that no firewall is between"
    )


def _servers_inside(startup: Any) -> None:
    if startup.servers != startup.workers:
        raise InvalidArgumentError(
            f"with BPS_ROLE=joint each of the {startup.workers} ranks is a server, but BPS_NUM_SERVERS is "
            f"{startup.servers}",
            f"set it to {startup.workers}, or leave BPS_ROLE out for dedicated servers",
        )
    startup.joint = True
    startup.server_rank = startup.worker_rank


def _embedded(config: Any, startup: Any) -> None:
    startup.servers = startup.workers
    _servers_inside(startup)
    startup.hosts_scheduler = startup.worker_rank == 0
    if startup.workers == 1:
        startup.job = secrets.token_hex(16)
        startup.scheduler_host = "127.0.0.1"
        startup.scheduler_ports = [0]
        return
    # The same on all ranks: how they spell the address of rank 0, which user they are, and how often a launcher has
    # started them again may differ. The secret comes from elsewhere (csrc/node/job_secret.h): what is derived from
    # variables, others can derive as well.
    port = os.environ.get("MASTER_PORT", "")
    startup.job = config.text("BPS_JOB_ID")
    if not startup.job:
        launch = os.environ.get("TORCHELASTIC_RUN_ID", "")
        startup.job = f"{launch and f'TORCHELASTIC_RUN_ID={launch} '}MASTER_PORT={port}"
        if not launch:  # the agent of torchrun has the port for itself
            startup.command = command_line([startup.worker_rank, *_numbers_on_host(config)])
    is_here = _all_on_this_host(config, startup.workers)
    if config.source("BPS_ROOT_URI") in ("default", "MASTER_ADDR") and is_here:
        startup.scheduler_host = "127.0.0.1"  # closed to the network
    if config.text("BPS_ROOT_PORT"):
        startup.scheduler_ports = [config.integer("BPS_ROOT_PORT")]
        startup.scheduler_hint = _hint(config, config.source("BPS_ROOT_PORT"))
        return
    # Below the range of the system's ephemeral ports (32768 and up). Rank 0 takes the first free one; the other ranks
    # find it because only the scheduler of this job accepts them. Of two jobs with one MASTER_PORT and different names
    # each finds the other's, and can say so.
    pool = hashlib.sha256(f"bps_rdma|{port or startup.job}".encode()).digest()
    lowest, count = _PORTS if is_here else port_range(config)
    startup.scheduler_ports = [
        lowest + int.from_bytes(pool[2 * i : 2 * i + 2], "big") % count for i in range(_PORT_CANDIDATES)
    ]
    startup.scheduler_hint = _hint(config, "MASTER_PORT" if port else "BPS_JOB_ID")


def _hint(config: Any, port: str) -> str:
    """Says what to check when rank 0 is not found, in terms of the variables that say where it is."""
    host = config.source("BPS_ROOT_URI")
    host = "MASTER_ADDR" if host == "default" else host
    return f"start rank 0, with the same {host} and {port} as this rank; {host} must lead to its host, past no firewall"


def _numbers_on_host(config: Any) -> list[int]:
    """The local rank and the machine of this process, if they are known."""
    return [int(config.integer(name)) for name in ("BPS_LOCAL_RANK", "BPS_WORKER_ID") if config.text(name)]


def command_line(own: Sequence[int]) -> str:
    """Describes the start of this process, for csrc/van/origin.h; `own`: numbers that it shares with no other rank."""
    words = [os.path.basename(sys.argv[0]), *sys.argv[1:]] if sys.argv else []  # noqa: PTH119  # may be no path
    pieces = re.findall(r"[0-9]+|[^0-9]+", " ".join(words).replace("\x1f", " ")[:_LONGEST_COMMAND])
    marked = ("#" if piece.isdecimal() and int(piece) in own else "=" for piece in pieces)
    return "\x1f".join(mark + piece for mark, piece in zip(marked, pieces, strict=True))


def _all_on_this_host(config: Any, workers: int) -> bool:
    return config.source("BPS_LOCAL_SIZE") != "default" and _integer(config, "BPS_LOCAL_SIZE", default=1) == workers
