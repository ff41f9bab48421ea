# SPDX-License-Identifier: Apache-2.0
"""Reads which rank of how many this process is from the variables of MPI's launchers and of batch systems.

One table has them all but Slurm, which slurm.py reads. MPI itself is neither used nor needed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bps_rdma.errors import InvalidArgumentError

_INSTEAD = "or set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each rank"


@dataclass(frozen=True)
class LaunchedRank:
    """The rank that a launcher has made of this process.

    Attributes:
        launcher: what messages call it.
        local_rank, local_size: None where the launcher does not tell.
        job: no other job of this launcher has this name at the same time; empty: nothing tells them apart.
        address: of rank 0; None: not told.
        port: for MASTER_PORT; None: not told.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    job: str
    address: str | None = None
    port: int | None = None

    @property
    def is_on_one_host(self) -> bool:
        """True if all ranks are known to be on this host."""
        return self.local_size == self.size


@dataclass(frozen=True)
class _Launcher:
    """The names of its variables. It has started this process if all of `marks` are set (default: `rank`)."""

    name: str
    rank: str
    size: str
    local_rank: str = ""
    local_size: str = ""
    job: tuple[str, ...] = ()
    nodes: str = ""  # their number: of one node, all ranks are there
    marks: tuple[str, ...] = ()


_PMI = "PMI_RANK", "PMI_SIZE"
_NAMESPACE = ("PMIX_NAMESPACE",)
# Those that use another one's variables as well stand before it.
_LAUNCHERS = (
    _Launcher(
        "jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE",
        _NAMESPACE,
    ),
    _Launcher(
        "mpirun of Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE", (*_NAMESPACE, "OMPI_MCA_ess_base_jobid"),
    ),
    _Launcher(
        "mpirun of MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    _Launcher("PALS", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE", ("PALS_APID",)),
    _Launcher(
        "flux run", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "", ("FLUX_JOB_ID",), "FLUX_JOB_NNODES"
    ),
    # MPICH and Intel MPI.
    _Launcher("mpirun", *_PMI, "MPI_LOCALRANKID", "MPI_LOCALNRANKS", marks=("PMI_RANK", "MPI_LOCALRANKID")),
)  # fmt: skip
# After Slurm, whose srun sets them for each of its tasks.
_OTHERS = (
    _Launcher("a launcher with PMI", *_PMI, "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE", ("PMI_JOBID",)),
    _Launcher("a launcher with PMIx", "PMIX_RANK", "", job=_NAMESPACE, marks=("PMIX_RANK", "PMIX_SERVER_URI2")),
)


def place_in_mpi(env: Mapping[str, str]) -> LaunchedRank | None:
    """The rank that mpirun, jsrun, PALS or Flux has made of this process; None: none of them has started it.

    Raises:
        InvalidArgumentError: variables are missing, or have values that cannot be; names them.
    """
    return _place(_LAUNCHERS, env)


def place_in_others(env: Mapping[str, str]) -> LaunchedRank | None:
    """The same for a launcher that only speaks PMI or PMIx, as srun does as well."""
    return _place(_OTHERS, env)


def _place(launchers: tuple[_Launcher, ...], env: Mapping[str, str]) -> LaunchedRank | None:
    for one in launchers:
        if all(env.get(mark) for mark in one.marks or (one.rank,)):
            return _place_by(one, env)
    return None


def _place_by(one: _Launcher, env: Mapping[str, str]) -> LaunchedRank:
    if not env.get(one.size):
        raise InvalidArgumentError(
            f"{one.name} has started this process ({one.rank}={env[one.rank]}), but nothing says how many ranks there "
            f"are{': ' + one.size + ' is not set' if one.size else ''}",
            f"pass all variables of the launcher on, in containers, too, {_INSTEAD}",
        )
    rank, size = _number(env, one.rank), _number(env, one.size)
    local_rank = _number(env, one.local_rank) if env.get(one.local_rank) else None
    local_size = _number(env, one.local_size) if env.get(one.local_size) else None
    if env.get(one.nodes) == "1" or size == 1:
        local_size = size
    if local_size == size and local_rank is None:
        local_rank = rank
    if rank >= size or (local_rank is not None and local_size is not None and local_rank >= local_size):
        where = "" if local_size is None else f", and {local_rank} of {local_size} on this host"
        raise InvalidArgumentError(
            f"the variables of {one.name} contradict each other: this is rank {rank} of {size}{where}",
            f"unset those of another launcher (env | grep -E 'OMPI|PMI|MPI'), {_INSTEAD}",
        )
    return LaunchedRank(one.name, rank, size, local_rank, local_size, _job(one, env, on_one_host=local_size == size))


def _number(env: Mapping[str, str], name: str) -> int:
    if not env[name].isdecimal():
        raise InvalidArgumentError(f"{name}={env[name]!r} is not a number", "use the value that the launcher sets")
    return int(env[name])


def _job(one: _Launcher, env: Mapping[str, str], *, on_one_host: bool) -> str:
    for name in one.job:
        if env.get(name):
            return f"{one.rank.partition('_')[0].lower()}-{env[name]}"
    starter = _starter(one.rank) if on_one_host else ""
    return f"mpi-{starter}" if starter else ""


def _starter(rank: str) -> str:
    """The process that has started the ranks of this host; empty where it cannot be seen.

    It is the nearest one above this process that is no rank itself: between the two may be shells and wrappers.
    """
    pid = os.getppid()
    while pid > 1:
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # it belongs to another user: the daemon of a batch system
            variables = []
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            return ""
        if not any(variable.startswith(f"{rank}=".encode()) for variable in variables):
            return f"{pid}-{stat[19]}"  # with the moment when it started: a number is used again
        pid = int(stat[1])
    return ""
