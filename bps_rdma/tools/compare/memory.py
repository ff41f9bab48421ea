# SPDX-License-Identifier: Apache-2.0
"""Counts what a training holds in the memory of one rank."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

Bytes = dict[str, int]


def held_by(model: nn.Module, optimizer: torch.optim.Optimizer) -> Bytes:
    """Bytes of the model's parameters and buffers, of their gradients, and of the optimizer's state on this rank."""
    parameters = list(model.parameters())
    return {
        "model": sum(one.nbytes for one in [*parameters, *model.buffers()]),
        "gradients": sum(one.grad.nbytes for one in parameters if one.grad is not None),
        "state": sum(
            value.nbytes
            for values in optimizer.state.values()
            for value in values.values()
            if isinstance(value, torch.Tensor)
        ),
    }


def peaks_on_gpu(step: Callable[[], None], optimizer: torch.optim.Optimizer) -> Bytes:
    """Takes a step. Bytes that torch had on the GPU before it, and at most until its update and during that."""
    found = {"before the step": torch.cuda.memory_allocated()}
    torch.cuda.reset_peak_memory_stats()

    def before_update(*_: object) -> None:
        torch.cuda.synchronize()
        found["before the update"] = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()

    hook = optimizer.register_step_pre_hook(before_update)
    try:
        step()
    finally:
        hook.remove()
    torch.cuda.synchronize()
    return found | {"in the update": torch.cuda.max_memory_allocated()}
