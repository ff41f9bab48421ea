# SPDX-License-Identifier: Apache-2.0
"""The variables that tell members of a job on Ray who they are.

An actor inherits the environment of its raylet, which is that of `ray start`, or of the driver. Who an outer job took
that process to be must not reach the actor; settings such as BPS_INTERFACE may.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field

from bps_rdma.launch.environment import IDENTITY
from bps_rdma.ray.placement import RankPlace

_PREFIXES = ("DMLC_", "TORCHELASTIC_", "SLURM_", "PMI_", "PMIX_", "OMPI_")


def identity(environ: Mapping[str, str]) -> list[str]:
    """Names of the variables that say which member of which job a process is."""
    return [name for name in environ if name in IDENTITY or name.startswith(_PREFIXES) or name == "NODE_RANK"]


def adopt(env: Mapping[str, str]) -> None:
    """Make this process the member that `env` describes, and nothing else."""
    for name in identity(os.environ):
        del os.environ[name]
    os.environ.update(env)
    if "BPS_MIN_WORKERS" in env:  # the driver starts another scheduler in the place of a lost one
        os.environ.setdefault("BPS_SCHEDULER_PATIENCE", "30")


@contextlib.contextmanager
def without_identity(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Hide who this process is taken to be, while it joins a job in which it is somebody else."""
    hidden = {name: environ.pop(name) for name in identity(environ)}
    try:
        yield
    finally:
        environ.update(hidden)


@dataclass(frozen=True)
class Address:
    """A free port of a host."""

    host: str
    port: int


@dataclass(frozen=True)
class Identity:
    """One attempt of a job. Each has a name and a secret of its own, so that no member of an earlier one can join.

    Args:
        workers: number of ranks.
        servers: number of dedicated servers; 0: servers inside the ranks.
        master: for torch.distributed.
        scheduler: of the scheduler; None: inside rank 0.
        attempt: from 0.
        least: the job goes on while that many ranks are left; 0: it ends when a member is lost.
    """

    workers: int
    servers: int
    master: Address
    scheduler: Address | None
    attempt: int
    least: int = 0
    name: str = field(default_factory=lambda: f"ray-{secrets.token_hex(8)}")
    secret: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)

    def rank(self, place: RankPlace) -> dict[str, str]:
        """The variables of a rank, which are torchrun's and ours."""
        env = self._common() | {
            "RANK": str(place.rank),
            "WORLD_SIZE": str(self.workers),
            "LOCAL_RANK": str(place.local_rank),
            "LOCAL_WORLD_SIZE": str(place.local_size),
            "GROUP_RANK": str(place.node_rank),
            "MASTER_ADDR": self.master.host,
            "MASTER_PORT": str(self.master.port),
            "TORCHELASTIC_RESTART_COUNT": str(self.attempt),
        }
        if self.scheduler is not None and not self.servers:
            env["BPS_ROLE"] = "joint"
        return env

    def server(self) -> dict[str, str]:
        """The variables of a server and of the scheduler."""
        return self._common() | {"BPS_NUM_WORKERS": str(self.workers)}

    def _common(self) -> dict[str, str]:
        env = {"BPS_JOB_ID": self.name, "BPS_SECRET": self.secret}
        if self.scheduler is not None:
            env |= {
                "BPS_NUM_SERVERS": str(self.servers or self.workers),
                "BPS_ROOT_URI": self.scheduler.host,
                "BPS_ROOT_PORT": str(self.scheduler.port),
            }
        if self.least:
            env["BPS_MIN_WORKERS"] = str(self.least)
        return env
