# SPDX-License-Identifier: Apache-2.0
"""Heterogeneous jobs of Slurm: what the ranks and the dedicated servers have to agree on.

The batch script exports it before it starts any of them, so that hosts with servers need neither Python nor Slurm's
variables.
"""

from __future__ import annotations

from collections.abc import Mapping

from bps_rdma.errors import InvalidArgumentError
from bps_rdma.launch.key_file import shared_key_file
from bps_rdma.launch.slurm import first_host, tasks_of_nodes

_RANKS, _SERVERS = "0", "1"  # components
_PORTS = 12000, 8000  # of schedulers; those of MASTER_PORT begin above


def component_variables(env: Mapping[str, str], per_task: int = 1) -> dict[str, str]:
    """The variables for all members of the job.

    Args:
        env: that of the batch script.
        per_task: ranks that each task of component 0 starts (`bps run -np`).

    Raises:
        InvalidArgumentError: this is no heterogeneous job of two components; names the missing variable.
    """
    job = _text(env, "SLURM_JOB_ID")
    if not job.isdecimal():
        raise InvalidArgumentError(f"SLURM_JOB_ID={job!r} is not a number", "run it in the batch script")
    lowest, count = _PORTS
    return {
        "BPS_JOB_ID": f"slurm-{job}-{env.get('SLURM_RESTART_COUNT') or 0}",
        "BPS_ROOT_URI": first_host(_text(env, f"SLURM_JOB_NODELIST_HET_GROUP_{_SERVERS}")),
        "BPS_ROOT_PORT": str(lowest + int(job) % count),
        "BPS_NUM_WORKERS": str(_tasks(env, _RANKS) * per_task),
        "BPS_NUM_SERVERS": str(_tasks(env, _SERVERS)),
    } | ({} if env.get("BPS_SECRET") or env.get("BPS_SECRET_FILE") else {"BPS_SECRET_FILE": str(shared_key_file())})


def _tasks(env: Mapping[str, str], component: str) -> int:
    return sum(tasks_of_nodes(_text(env, f"SLURM_TASKS_PER_NODE_HET_GROUP_{component}")))


def _text(env: Mapping[str, str], name: str) -> str:
    if text := env.get(name):
        return text
    raise InvalidArgumentError(
        f"{name} is not set",
        "run `bps env` in the batch script of a heterogeneous job: a component with the ranks, `#SBATCH hetjob`, and "
        "a component with the servers",
    )
