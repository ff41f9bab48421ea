# SPDX-License-Identifier: Apache-2.0
"""The ranks that `bps run` starts on this host for a job on several hosts."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from bps_rdma.errors import InvalidArgumentError
from bps_rdma.launch import cluster
from bps_rdma.launch.environment import LocalJob, inside_a_job, outer_environment
from bps_rdma.launch.mpi import LaunchedRank

DEFAULT_PORT = 29500  # torchrun's

# These describe the job, not a process of it. They are the same for every `bps run` of the job.
_OF_THE_JOB = (
    "MASTER_ADDR", "MASTER_PORT", "BPS_JOB_ID", "BPS_SECRET", "BPS_SECRET_FILE", "BPS_ROOT_URI", "BPS_ROOT_PORT",
    "BPS_NUM_SERVERS",
)  # fmt: skip


@dataclass(frozen=True)
class Part(LocalJob):
    """`workers` ranks of a job on `hosts` hosts, on the host number `host`.

    Every host has the same number of ranks; servers are inside the ranks, or started by others.
    """

    hosts: int = 1
    host: int = 0
    address: str = ""
    port: int = DEFAULT_PORT

    def label(self, index: int) -> str:
        """The rank among all, which is what its messages call it."""
        return f"rank {self.host * self.workers + index}"

    def worker(self, rank: int) -> dict[str, str]:
        """The complete environment of the rank number `rank` of this host."""
        ranks = {
            "RANK": str(self.host * self.workers + rank),
            "WORLD_SIZE": str(self.hosts * self.workers),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(self.workers),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }
        return _inherited(self.transport) | ranks


@dataclass(frozen=True)
class Task(LocalJob):
    """`workers` ranks for each process that a launcher (srun, mpirun, ...) has started; this process is one of them."""

    def label(self, index: int) -> str:
        """The rank among all, which is what its messages call it."""
        return f"rank {self._place.rank * self.workers + index}"

    def worker(self, rank: int) -> dict[str, str]:
        """The complete environment of the rank number `rank` of this task."""
        return _inherited(self.transport) | cluster.variables(self._place, os.environ, self.workers, rank)

    @property
    def _place(self) -> LaunchedRank:
        place = cluster.place_of(os.environ)
        assert place is not None
        return place


def _inherited(transport: str | None) -> dict[str, str]:
    env = outer_environment() | {name: os.environ[name] for name in _OF_THE_JOB if name in os.environ}
    return env if transport is None else env | {"BPS_TRANSPORT": transport}


def job_on(
    processes: int | None,
    servers: int | None,
    transport: str | None,
    *,
    hosts: int | None,
    host: int | None,
    address: str | None,
    port: int | None,
    least: int | None = None,
) -> LocalJob:
    """The job that the options of `bps run` describe: of this machine, of a launcher's processes, or of several hosts.

    Raises:
        InvalidArgumentError: an option is missing, or contradicts others or the launcher.
    """
    if least is not None and (hosts is not None or cluster.is_rank(os.environ)):
        what = "--min-np is for the ranks of one machine"
        raise InvalidArgumentError(what, "start bps-scheduler by itself, and set BPS_MIN_WORKERS for it")
    if least is not None and processes is not None and least > processes:
        raise InvalidArgumentError(f"--min-np {least} is more than --nproc {processes}", "give at most as many")
    if hosts is None:
        if not (host is None and address is None and port is None):
            what = "--node-rank, --master-addr and --master-port are for jobs on several hosts"
            raise InvalidArgumentError(what, "add --nnodes, or leave them out")
        if not cluster.is_rank(os.environ):
            if processes is None:
                raise InvalidArgumentError("--nproc is missing", "say how many ranks to start: bps run -np 2 train.py")
            if _completion_index() is not None and not os.environ.get("RANK"):
                print(
                    "note: this pod is one of an Indexed Job; without --nnodes it is a job by itself", file=sys.stderr
                )
            _note_without_effect(least)
            return LocalJob(processes, servers, transport, least)
        _no_servers(servers)
        return Task(processes or 1, None, transport)
    _no_servers(servers)
    found = host if host is not None else _completion_index()
    if found is None:
        raise InvalidArgumentError("--node-rank is missing", f"say which of the {hosts} hosts this is, from 0")
    if not 0 <= found < hosts:
        raise InvalidArgumentError(f"--node-rank {found} is not in 0..{hosts - 1}", "hosts count from 0")
    address = address or os.environ.get("MASTER_ADDR")
    if not address:
        raise InvalidArgumentError("--master-addr is missing", "give the address of host 0, the same on all hosts")
    if processes is None:
        raise InvalidArgumentError("--nproc is missing", "say how many ranks each host has")
    text = os.environ.get("MASTER_PORT", "")
    if port is None and text and not text.isdecimal():
        raise InvalidArgumentError(f"MASTER_PORT={text!r} is not a port", "set it to a number")
    port = port or int(text or DEFAULT_PORT)
    return Part(processes, None, transport, hosts=hosts, host=found, address=address, port=port)


def _note_without_effect(least: int | None) -> None:
    """Says that a variable which the user, and not a job around this one, has set is not passed on."""
    wanted = os.environ.get("BPS_MIN_WORKERS", "0")
    if least is None and wanted not in ("", "0") and not inside_a_job():
        print(f"note: BPS_MIN_WORKERS has no effect here; pass --min-np {wanted}", file=sys.stderr)


def _completion_index() -> int | None:
    """The number of this pod in an Indexed Job of Kubernetes."""
    text = os.environ.get("JOB_COMPLETION_INDEX", "")
    return int(text) if text.isdecimal() else None


def _no_servers(servers: int | None) -> None:
    if servers is not None:
        raise InvalidArgumentError(
            "--servers starts servers on one machine, and this job has several hosts",
            "start bps-scheduler and bps-server by themselves: see docs/slurm.md and docs/kubernetes.md",
        )
