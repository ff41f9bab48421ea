# SPDX-License-Identifier: Apache-2.0
"""Ranks that a cluster's own launcher started: its variables become those that torchrun sets.

Torchrun's variables (RANK, WORLD_SIZE, ...) and BytePS's roles go before Slurm's. So a process that torchrun or
`bps run` started inside a step of Slurm is the rank that those say, and takes from Slurm only what is still open: the
name of the job, and the secret.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, MutableMapping

from bps_rdma.errors import InvalidArgumentError
from bps_rdma.launch.key_file import shared_key_file
from bps_rdma.launch.slurm import Step, is_step, job_id, step_of, tasks_of_nodes

# Any of them says which rank this is, or that something else than Slurm does.
_RANKS = ("RANK", "WORLD_SIZE", "BPS_RANK", "BYTEPS_GLOBAL_RANK", "BPS_WORLD_SIZE", "DMLC_ROLE", "BPS_ROLE")


def is_rank_of_slurm(env: Mapping[str, str]) -> bool:
    """Whether this process is one of several tasks of a step, and nothing else says which rank it is."""
    if _says_ranks(env, {}) or _is_of_ray(env) or not is_step(env):
        return False
    step = step_of(env)
    return step is not None and step.tasks > 1


def _is_of_ray(env: Mapping[str, str]) -> bool:
    """Whether a raylet started this process, which then has the variables of the task that the raylet is."""
    return bool(env.get("RAY_RAYLET_PID"))


def _says_ranks(env: Mapping[str, str], arguments: Mapping[str, object]) -> bool:
    return any(env.get(name) for name in _RANKS) or bool({"rank", "world_size"} & set(arguments))


def adopt(env: MutableMapping[str, str], arguments: Mapping[str, object]) -> None:
    """Adds to `env` what Slurm says about this rank, and its variables do not.

    Args:
        env: os.environ, in which torch looks for ranks as well.
        arguments: of init(); ranks given there are left alone.

    Raises:
        InvalidArgumentError: Slurm's variables cannot be used, or there is no safe place for the secret.
    """
    if _is_of_ray(env):
        return
    if is_rank_of_slurm(env) and not _says_ranks(env, arguments):
        step = step_of(env)
        assert step is not None
        env.update(variables(step, env))
    elif is_step(env):
        if _has_several_hosts(env):
            env.update(_several_hosts(env))
    elif env.get("SLURM_JOB_ID") and (tasks := env.get("SLURM_NTASKS", "1")) != "1" and not _says_ranks(env, arguments):
        warnings.warn(
            f"this Slurm job has {tasks} tasks, but this process was not started by srun, and is a job of one rank: "
            "put srun before the command",
            RuntimeWarning,
            stacklevel=3,
        )


def variables(step: Step, env: Mapping[str, str], per_task: int = 1, index: int = 0) -> dict[str, str]:
    """The variables of rank `index` of the `per_task` ranks that this task consists of; those in `env` are kept.

    Raises:
        InvalidArgumentError: there is no safe place for the secret, or it is not known where rank 0 runs.
    """
    address = env.get("MASTER_ADDR") or step.first_host
    if address is None:
        raise InvalidArgumentError(
            "with the distribution `arbitrary` Slurm does not tell where task 0 runs", "set MASTER_ADDR to its host"
        )
    world = step.tasks * per_task
    here = step.tasks_here * per_task
    found = {
        "RANK": str(step.task * per_task + index),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(step.local_task * per_task + index),
        "LOCAL_WORLD_SIZE": str(here),
        "MASTER_ADDR": address,
        "MASTER_PORT": env.get("MASTER_PORT") or str(step.port),
        "BPS_JOB_ID": env.get("BPS_JOB_ID") or job_id(env),
    }
    return found | (_several_hosts(env) if here < world else {})


def _several_hosts(env: Mapping[str, str]) -> dict[str, str]:
    """The name of the job and where its secret is, as far as `env` does not say it."""
    found = {} if env.get("BPS_JOB_ID") else {"BPS_JOB_ID": job_id(env)}
    insecure = env.get("BPS_INSECURE", "") not in ("", "0")
    if not (env.get("BPS_SECRET") or env.get("BPS_SECRET_FILE") or insecure):
        found["BPS_SECRET_FILE"] = str(shared_key_file())
    return found


def _has_several_hosts(env: Mapping[str, str]) -> bool:
    world, here = env.get("WORLD_SIZE", ""), env.get("LOCAL_WORLD_SIZE", "")
    if world.isdecimal() and here.isdecimal():
        return int(here) < int(world)
    return len(tasks_of_nodes(env.get("SLURM_STEP_TASKS_PER_NODE") or "1")) > 1
