# SPDX-License-Identifier: Apache-2.0
"""Saves a training and resumes it in another job, by Megatron's own functions; for dense models."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import Training

from bps_rdma.errors import InvalidArgumentError

_LAST = "last"


def save(training: Training, folder: Path) -> None:
    """Save a checkpoint between two steps; a collective call. Removes the previous one when this one is complete."""
    from megatron.core import parallel_state

    training.gather()
    new = folder / f"step-{training.steps}"
    new.mkdir(parents=True, exist_ok=True)
    if parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0:  # the other ranks have the same state
        state = {
            "steps": training.steps,
            "in_order": _in_order(training),
            "model": [chunk.module.state_dict() for chunk in training.model],
            "optimizer": training.optimizer.state_dict(),
        }
        torch.save(state, new / f"{_part()}.pt")
    if training.setup.distributed_optimizer:  # every rank has a part; rank 0 gathers and writes all parts
        training.optimizer.save_parameter_state(str(new / f"{_part()}-optimizer.pt"))
    dist.barrier()
    if dist.get_rank() == 0:
        marker = folder / f"{_LAST}.new"
        marker.write_text(new.name, encoding="ascii")
        marker.replace(folder / _LAST)
        for old in folder.glob("step-*"):
            if old != new:
                shutil.rmtree(old, ignore_errors=True)


def load(training: Training, folder: Path) -> int:
    """Load the last checkpoint before the first step; a collective call. Returns its number of steps, or 0.

    Raises:
        InvalidArgumentError: the checkpoint was made with parameters in another order.
    """
    if not (folder / _LAST).is_file():
        return 0
    last = folder / (folder / _LAST).read_text(encoding="ascii")
    state = torch.load(last / f"{_part()}.pt", weights_only=False)
    if state.get("in_order", False) != _in_order(training):  # the optimizer's state goes by the order
        raise InvalidArgumentError(
            f"the checkpoint {last} was made with parameters in another order",
            f"use in_order={not _in_order(training)}, as the run that made it",
        )
    for chunk, weights in zip(training.model, state["model"], strict=True):
        chunk.module.load_state_dict(weights)
    training.optimizer.load_state_dict(state["optimizer"])
    if training.setup.distributed_optimizer:
        _load_shards(training, str(last / f"{_part()}-optimizer.pt"))
    training.skip(state["steps"])
    return int(state["steps"])


def _in_order(training: Training) -> bool:
    return training.setup.overlap_gather and training.setup.in_order


def _load_shards(training: Training, file: str) -> None:
    # The file lacks the step counters that torch's Adam keeps for each parameter. load_state_dict() has loaded them as
    # one tensor that all parameters share, and each parameter would increment it.
    one = training.optimizer
    states = [state for inner in getattr(one, "chained_optimizers", [one]) for state in inner.optimizer.state.values()]
    counters = [state.pop("step") for state in states]
    with torch.no_grad():  # float32 parameters are those of the optimizer
        one.load_parameter_state(file)
    for state, counter in zip(states, counters, strict=True):
        state["step"] = counter.clone()


def _part() -> str:
    """Name of the part of the model that this rank has."""
    from megatron.core import parallel_state

    tensor = parallel_state.get_tensor_model_parallel_rank()
    return f"tensor-{tensor}-stage-{parallel_state.get_pipeline_model_parallel_rank()}"
