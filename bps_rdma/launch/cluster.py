# SPDX-License-Identifier: Apache-2.0
"""Ranks that another launcher started than ours and torchrun: its variables become those that torchrun sets.

Torchrun's variables (RANK, WORLD_SIZE, ...) and BytePS's roles go before all others. So a process that torchrun or
`bps run` started inside a step of Slurm is the rank that those say, and takes from Slurm only what is still open: the
name of the job, and the secret. A process that mpirun started inside a step is the rank that mpirun says.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, MutableMapping

from bps_rdma.errors import InvalidArgumentError
from bps_rdma.launch.key_file import shared_key_file
from bps_rdma.launch.mpi import LaunchedRank, place_in_mpi, place_in_others
from bps_rdma.launch.slurm import Step, is_step, job_id, step_of, tasks_of_nodes

# Any of them says which rank this is, or that something else than a launcher does.
_RANKS = ("RANK", "WORLD_SIZE", "BPS_RANK", "BYTEPS_GLOBAL_RANK", "BPS_WORLD_SIZE", "DMLC_ROLE", "BPS_ROLE")
_LOCALHOST = "127.0.0.1"
_PORTS = 20000, 12768  # below the range that the kernel uses for outgoing connections


def place_of(env: Mapping[str, str]) -> LaunchedRank | None:
    """The rank of several that a launcher made of this process, if nothing else says which rank it is.

    Raises:
        InvalidArgumentError: variables are missing or contradict each other; names them.
    """
    if _says_ranks(env, {}) or _is_of_ray(env):
        return None
    place = place_in_mpi(env) or _place_in_slurm(env) or place_in_others(env)
    return place if place is not None and place.size > 1 else None


def is_rank(env: Mapping[str, str]) -> bool:
    """Returns whether a launcher started this process as one of several, and nothing else says which rank it is."""
    return place_of(env) is not None


def _place_in_slurm(env: Mapping[str, str]) -> LaunchedRank | None:
    step = step_of(env)
    return None if step is None else _place_of_step(step, env)


def _place_of_step(step: Step, env: Mapping[str, str]) -> LaunchedRank:
    return LaunchedRank(
        "srun", step.task, step.tasks, step.local_task, step.tasks_here, job_id(env), step.first_host, step.port
    )


def _is_of_ray(env: Mapping[str, str]) -> bool:
    """Returns whether a raylet started this process, which then has the variables of the raylet's task."""
    return bool(env.get("RAY_RAYLET_PID"))


def _says_ranks(env: Mapping[str, str], arguments: Mapping[str, object]) -> bool:
    return any(env.get(name) for name in _RANKS) or bool({"rank", "world_size"} & set(arguments))


def adopt(env: MutableMapping[str, str], arguments: Mapping[str, object]) -> None:
    """Adds to `env` what a launcher says about this rank, and its variables do not.

    Args:
        env: os.environ, in which torch looks for ranks as well.
        arguments: of init(); ranks given there are left alone.

    Raises:
        InvalidArgumentError: the launcher's variables cannot be used, or there is no safe place for the secret.
    """
    if _is_of_ray(env):
        return
    place = None if _says_ranks(env, arguments) else place_of(env)
    if place is not None:
        env.update(variables(place, env))
    elif is_step(env):
        if _has_several_hosts(env):
            env.update(_several_hosts(env, job_id(env)))
    elif env.get("SLURM_JOB_ID") and (tasks := env.get("SLURM_NTASKS", "1")) != "1" and not _says_ranks(env, arguments):
        warnings.warn(
            f"this Slurm job has {tasks} tasks, but this process was not started by srun, and is a job of one rank: "
            "put srun before the command",
            RuntimeWarning,
            stacklevel=3,
        )


def variables(place: LaunchedRank, env: Mapping[str, str], per_task: int = 1, index: int = 0) -> dict[str, str]:
    """The variables of rank `index` of the `per_task` ranks that this task consists of; those in `env` are kept.

    Raises:
        InvalidArgumentError: there is no safe place for the secret, or it is not known where rank 0 runs.
    """
    found = {
        "RANK": str(place.rank * per_task + index),
        "WORLD_SIZE": str(place.size * per_task),
        "MASTER_ADDR": env.get("MASTER_ADDR") or _address(place),
        "MASTER_PORT": env.get("MASTER_PORT") or _port(place, env),
    }
    if place.local_rank is not None and place.local_size is not None:
        found["LOCAL_RANK"] = str(place.local_rank * per_task + index)
        found["LOCAL_WORLD_SIZE"] = str(place.local_size * per_task)
    if name := env.get("BPS_JOB_ID") or place.job:
        found["BPS_JOB_ID"] = name
    return found | ({} if place.is_on_one_host else _several_hosts(env, name))


def _address(place: LaunchedRank) -> str:
    if place.is_on_one_host:
        return _LOCALHOST
    if place.address is not None:
        return place.address
    if place.launcher == "srun":
        raise InvalidArgumentError(
            "with the distribution `arbitrary` Slurm does not tell where task 0 runs", "set MASTER_ADDR to its host"
        )
    raise InvalidArgumentError(
        f"{place.launcher} started this process as rank {place.rank} of {place.size} on several hosts, and does not "
        "tell where rank 0 runs: MASTER_ADDR is not set",
        "pass it on to all ranks: mpirun -x MASTER_ADDR=HOST with Open MPI, -genv MASTER_ADDR HOST with MPICH and "
        "Intel MPI",
    )


def _port(place: LaunchedRank, env: Mapping[str, str]) -> str:
    lowest, count = _PORTS
    if place.port is not None:
        return str(place.port)
    if not (name := place.job or env.get("BPS_JOB_ID", "")):
        raise InvalidArgumentError(
            f"{place.launcher} started this process, but nothing tells its job from others: MASTER_PORT is not set",
            "set MASTER_PORT to a free port, the same for all ranks, as MASTER_ADDR",
        )
    return str(lowest + int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % count)


def _several_hosts(env: Mapping[str, str], name: str) -> dict[str, str]:
    """The name of the job and where its secret is, as far as `env` does not say it."""
    found = {} if env.get("BPS_JOB_ID") or not name else {"BPS_JOB_ID": name}
    insecure = env.get("BPS_INSECURE", "") not in ("", "0")
    if not (env.get("BPS_SECRET") or env.get("BPS_SECRET_FILE") or insecure):
        found["BPS_SECRET_FILE"] = str(shared_key_file())
    return found


def _has_several_hosts(env: Mapping[str, str]) -> bool:
    world, here = env.get("WORLD_SIZE", ""), env.get("LOCAL_WORLD_SIZE", "")
    if world.isdecimal() and here.isdecimal():
        return int(here) < int(world)
    return len(tasks_of_nodes(env.get("SLURM_STEP_TASKS_PER_NODE") or "1")) > 1
