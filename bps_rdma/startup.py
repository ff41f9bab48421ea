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
import secrets
from typing import Any

from bps_rdma import _core
from bps_rdma.errors import InvalidArgumentError

_PORT_CANDIDATES = 16


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
    """As the user has said it: RANK=1, or rank=1 for an argument of init()."""
    source = config.source(name)
    return f"{name[4:].lower() if source == 'argument' else source}={config.text(name)}"


def _separate(config: Any, startup: Any) -> None:
    startup.servers = config.integer("BPS_NUM_SERVERS")
    if not config.text("BPS_ROOT_PORT"):
        raise InvalidArgumentError(
            "separate servers need a scheduler, and its port is not set",
            "set DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT (or BPS_ROOT_URI and BPS_ROOT_PORT) on all members",
        )
    startup.scheduler_ports = [config.integer("BPS_ROOT_PORT")]
    startup.job = config.text("BPS_JOB_ID")


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
    # All ranks have the same variables, so all derive the same job and ports. The secret comes from elsewhere
    # (csrc/node/job_secret.h): what is derived from variables, others can derive as well.
    parts = [config.text("BPS_JOB_ID")]
    if config.source("BPS_JOB_ID") != "argument":  # an argument identifies the job by itself; see torch/start.py
        parts += [
            config.text("BPS_ROOT_URI"),
            os.environ.get("MASTER_PORT", ""),
            os.environ.get("TORCHELASTIC_RESTART_COUNT", ""),
        ]
    startup.job = "|".join(parts)
    if config.source("BPS_ROOT_URI") in ("default", "MASTER_ADDR") and _all_on_this_host(config, startup.workers):
        startup.scheduler_host = "127.0.0.1"  # closed to the network
    if config.text("BPS_ROOT_PORT"):
        startup.scheduler_ports = [config.integer("BPS_ROOT_PORT")]
        return
    # Below the range of the system's ephemeral ports (32768 and up). Rank 0 takes the first free one; the other ranks
    # find it because only the scheduler of this job accepts them.
    pool = hashlib.sha256(f"bps_rdma|{startup.job}|{os.getuid()}".encode()).digest()
    startup.scheduler_ports = [
        12000 + int.from_bytes(pool[2 * i : 2 * i + 2], "big") % 20000 for i in range(_PORT_CANDIDATES)
    ]


def _all_on_this_host(config: Any, workers: int) -> bool:
    return config.source("BPS_LOCAL_SIZE") != "default" and _integer(config, "BPS_LOCAL_SIZE", default=1) == workers
