# SPDX-License-Identifier: Apache-2.0
"""The environment variables of each process of a local job, and the location of the plain binaries."""

from __future__ import annotations

import os
import random
import secrets
import shutil
import socket
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

from bps_rdma.errors import BpsError
from bps_rdma.launch.cluster import is_rank

LOCALHOST = "127.0.0.1"

# Variables that identify a process. A launcher inside another job must not pass on that job's values.
IDENTITY = (
    "BPS_ROLE", "BPS_NUM_WORKERS", "BPS_NUM_SERVERS", "BPS_WORKER_ID", "BPS_LOCAL_RANK", "BPS_LOCAL_SIZE", "BPS_RANK",
    "BPS_WORLD_SIZE", "BPS_MIN_WORKERS", "BPS_ROOT_URI", "BPS_ROOT_PORT", "BPS_JOB_ID", "BPS_SECRET",
    "BPS_SECRET_FILE", "BPS_SCHEDULER_STATE",
    "DMLC_ROLE", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER", "DMLC_WORKER_ID", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT",
    "BYTEPS_LOCAL_RANK", "BYTEPS_LOCAL_SIZE", "BYTEPS_GLOBAL_RANK",
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RESTART_COUNT",
)  # fmt: skip


def inside_a_job() -> bool:
    """Returns whether torchrun, `bps run`, srun, mpirun or BytePS started this process as one rank of a job."""
    named = any(os.environ.get(name) for name in ("RANK", "BPS_RANK", "DMLC_ROLE", "BPS_ROLE"))
    return named or is_rank(os.environ)


def outer_environment() -> dict[str, str]:
    """The environment of this process without what would tell a rank who it is."""
    return {name: value for name, value in os.environ.items() if name not in IDENTITY}


def free_port(address: str = LOCALHOST) -> int:
    """A free TCP port of this machine, below the range that the kernel uses for outgoing connections.

    Args:
        address: where it must be free; empty: at all addresses.
    """
    for _ in range(1000):
        port = random.randrange(20000, 32768)  # noqa: S311  # not a secret
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
            return port
    raise BpsError("no TCP port between 20000 and 32767 is free", "stop processes that listen there (`ss -ltn`)")


def find_binary(name: str) -> str:
    """Path of `bps-server` or `bps-scheduler`: installed with this package, or on PATH.

    Raises BpsError when it is not found.
    """
    # `pip install --target DIR` installs commands into DIR/bin, everything else next to the interpreter.
    beside_package = Path(__file__).parents[2] / "bin"
    folders = [beside_package, Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))]
    for folder in folders:
        if os.access(folder / name, os.X_OK):
            return str(folder / name)
    if found := shutil.which(name):
        return found
    raise BpsError(
        f"{name} is not found next to {sys.executable}, in {beside_package}, or on PATH",
        "install it with `pip install .`",
    )


def new_name() -> str:
    """A name for a job that no other one has."""
    return f"run-{os.getpid()}-{secrets.token_hex(4)}"


def _metrics_port(offset: int) -> dict[str, str]:
    """The metrics port of a member that is no worker. It follows those of the workers, which add their local ranks."""
    port = os.environ.get("BPS_METRICS_PORT", "")
    return {"BPS_METRICS_PORT": str(int(port) + offset)} if port.isdecimal() else {}


@dataclass(frozen=True)
class LocalJob:
    """A job on this machine: `workers` processes, and `servers` dedicated ones (None: servers inside the workers).

    `lent` more servers run elsewhere, and find the scheduler at `address`. Every object describes a different job, with
    a name, a secret and ports of its own. With `least` the job goes on while that many workers are left; its scheduler
    is then a process of its own, so that every rank may be lost.
    """

    workers: int
    servers: int | None = None
    transport: str | None = None
    least: int | None = None
    name: str = field(default_factory=new_name)
    secret: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    scheduler_port: int = field(default_factory=free_port)
    master_port: int = field(default_factory=free_port)
    lent: int = 0
    address: str = LOCALHOST

    @property
    def dedicated(self) -> int:
        """The number of its servers that are not inside workers."""
        return (self.servers or 0) + self.lent

    def placed(self, label: str, command: list[str]) -> list[str]:
        """The command that starts `command` for the member `label`. On this machine it is `command` itself."""
        del label
        return command

    def binary(self, name: str) -> str:
        """The path of a plain binary on the host where it is to run. Raises BpsError when it is not found."""
        return find_binary(name)

    def label(self, index: int) -> str:
        """The name of worker number `index` of this machine in messages."""
        return f"rank {index}"

    def worker(self, rank: int) -> dict[str, str]:
        """The complete environment of worker `rank`."""
        return self._common() | {"RANK": str(rank), "LOCAL_RANK": str(rank)}

    def role(self, label: str) -> dict[str, str]:
        """The complete environment of the dedicated member `label`, such as "server 0" or "scheduler"."""
        kind, _, index = label.partition(" ")
        place = int(index) if index else self.servers or 0
        return self._common() | {"BPS_ROLE": kind} | _metrics_port(self.workers + place)

    def _common(self) -> dict[str, str]:
        env = outer_environment()
        env |= {
            "WORLD_SIZE": str(self.workers),
            "LOCAL_WORLD_SIZE": str(self.workers),
            "BPS_NUM_WORKERS": "1",  # machines
            "MASTER_ADDR": LOCALHOST,
            "MASTER_PORT": str(self.master_port),
            "BPS_JOB_ID": self.name,
            "BPS_SECRET": self.secret,
            "BPS_ROOT_URI": self.address,
            "BPS_ROOT_PORT": str(self.scheduler_port),
        }
        return env | self._settings()

    def _settings(self) -> dict[str, str]:
        env = {}
        if self.dedicated:
            env["BPS_NUM_SERVERS"] = str(self.dedicated)
        elif self.least is not None:
            env |= {"BPS_ROLE": "joint", "BPS_NUM_SERVERS": str(self.workers)}
        if self.least is not None:
            patience = os.environ.get("BPS_SCHEDULER_PATIENCE", "30")
            env |= {"BPS_MIN_WORKERS": str(self.least), "BPS_SCHEDULER_PATIENCE": patience}
        if self.transport is not None:
            env["BPS_TRANSPORT"] = self.transport
        return env
