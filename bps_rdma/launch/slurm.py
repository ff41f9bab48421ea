# SPDX-License-Identifier: Apache-2.0
"""Reads from Slurm's variables which task of which step this process is, and where task 0 runs.

`srun` sets them for each task of a step. A batch script has some of them as well (SLURM_PROCID is 0 there), but is no
task of a step: only SLURM_STEP_ID tells the two apart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from bps_rdma.errors import InvalidArgumentError
from bps_rdma.launch.key_file import shared_key_file

# Slurm numbers the steps of a job from 0. From here on ids stand for the batch script, an interactive shell, and such.
_LEAST_SPECIAL_STEP = 0xFFFFFFF0
_PORTS = 20000, 12768  # below the range that the kernel uses for outgoing connections
_STEPS_PER_JOB = 16  # ports kept apart for concurrent steps of a job, before those of the next job begin
_NEEDED = (
    "SLURM_JOB_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NODELIST",
    "SLURM_STEP_TASKS_PER_NODE",
)  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One task of a Slurm step."""

    job: int
    step: int
    task: int
    tasks: int
    local_task: int
    tasks_of_nodes: tuple[int, ...]
    node: int
    first_host: str | None
    """Where task 0 runs, as Slurm names it; None where that cannot be told."""

    @property
    def port(self) -> int:
        """The port for MASTER_PORT: another one for each of the steps that run at the same time."""
        lowest, count = _PORTS
        return lowest + (self.job * _STEPS_PER_JOB + self.step) % count

    @property
    def tasks_here(self) -> int:
        """The number of tasks on this node."""
        return self.tasks_of_nodes[self.node]


def is_step(env: Mapping[str, str]) -> bool:
    """Returns whether this process belongs to a step, which means that srun started it."""
    step = env.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) < _LEAST_SPECIAL_STEP


def step_of(env: Mapping[str, str]) -> Step | None:
    """The task that this process is, or None outside of steps.

    Raises:
        InvalidArgumentError: variables are missing or contradict each other; names them.
    """
    if not is_step(env):
        return None
    if missing := [name for name in _NEEDED if not env.get(name)]:
        raise InvalidArgumentError(
            f"this is a step of Slurm (SLURM_STEP_ID={env['SLURM_STEP_ID']}), but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set",
            "start ranks with srun and pass its variables on (in containers, too), or set RANK, WORLD_SIZE, "
            "LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
        )
    found = Step(
        job=_number(env, "SLURM_JOB_ID"),
        step=_number(env, "SLURM_STEP_ID"),
        task=_number(env, "SLURM_PROCID"),
        tasks=_number(env, "SLURM_STEP_NUM_TASKS"),
        local_task=_number(env, "SLURM_LOCALID"),
        tasks_of_nodes=tasks_of_nodes(env["SLURM_STEP_TASKS_PER_NODE"]),
        node=_number(env, "SLURM_NODEID"),
        # With this distribution the first node of the list need not be that of task 0.
        first_host=None if env.get("SLURM_DISTRIBUTION") == "arbitrary" else first_host(env["SLURM_STEP_NODELIST"]),
    )
    _check(found, env)
    return found


def job_id(env: Mapping[str, str]) -> str:
    """A name that no other step, and no earlier run of a requeued job, has.

    Raises:
        InvalidArgumentError: a variable is missing or no number; names it.
    """
    job, step = _number(env, "SLURM_JOB_ID"), _number(env, "SLURM_STEP_ID")
    return f"slurm-{job}.{step}-{_number(env, 'SLURM_RESTART_COUNT', default='0')}"


def tasks_of_nodes(text: str) -> tuple[int, ...]:
    """`2(x3),1` is 2, 2, 2, 1.

    Raises:
        InvalidArgumentError: it is not of this form.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise InvalidArgumentError(f"{text!r} is not a list of tasks per node like 2(x3),1", "use srun's own")
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def first_host(nodes: str) -> str:
    """The first host of a list such as `rack[1-2]n[03-05,09],login`: rack1n03."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None  # matches the empty string, too
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])


def _number(env: Mapping[str, str], name: str, default: str = "") -> int:
    text = env.get(name) or default
    if not text.isdecimal():
        raise InvalidArgumentError(f"{name}={text!r} is not a number", "use the value that srun sets")
    return int(text)


def _check(step: Step, env: Mapping[str, str]) -> None:
    if step.task >= step.tasks or step.node >= len(step.tasks_of_nodes) or sum(step.tasks_of_nodes) != step.tasks:
        raise InvalidArgumentError(
            f"Slurm's variables contradict each other: task {step.task} of SLURM_STEP_NUM_TASKS={step.tasks} "
            f"on node {step.node}, with SLURM_STEP_TASKS_PER_NODE={env['SLURM_STEP_TASKS_PER_NODE']}",
            "ranks must be tasks of one component: give each component of a heterogeneous job an srun of its own "
            "(--het-group=0)",
        )
    told = env.get("PMI_RANK", ""), env.get("PMI_SIZE", "")
    if all(told) and told != (str(step.task), str(step.tasks)):
        raise InvalidArgumentError(
            f"PMI_RANK={told[0]} of {told[1]}, but this is task {step.task} of {step.tasks} of a Slurm step: another "
            "launcher started this process inside of it",
            "start ranks with srun alone, or set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and "
            "MASTER_PORT",
        )


# Heterogeneous jobs: the batch script exports what ranks and dedicated servers have to agree on before it starts any of
# them, so that hosts with servers need neither Python nor Slurm's variables.
_RANKS, _SERVERS = "0", "1"  # components
_SCHEDULER_PORTS = 12000, 8000  # those of MASTER_PORT begin above


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
    lowest, count = _SCHEDULER_PORTS
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
