# SPDX-License-Identifier: Apache-2.0
"""Puts Megatron's buffers into memory that the host's other processes can map, and follows them when they move."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import bps_rdma
from bps_rdma.torch.transfer import mapped

_SMALLEST = 1 << 16  # bytes; a mapping costs some system calls, a copy of less costs no more


class MappedBuffers(TorchFunctionMode):
    """While a DistributedDataParallel is made, flat tensors of zeros on the CPU are made in memory that others can map.

    Its buffers are such tensors, and all gradients and parameters are views of them: synchronising them then copies
    nothing. Buffers on a GPU stay where they are.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Makes the tensor, or one like it."""
        made = function(*args, **(kwargs or {}))
        if function is torch.zeros and made.is_cpu and made.dim() == 1 and made.nbytes >= _SMALLEST:
            return mapped(made.numel(), made.dtype)
        return made


def follow_moves(ddp: Any) -> None:
    """Follows gradient buffers that Megatron >= 0.16 frees and allocates anew, perhaps at the same address."""
    if not hasattr(ddp, "restore_grad_buffers"):
        return
    gradients = [buffer.grad_data for buffer in ddp.buffers + ddp.expert_parallel_buffers]
    restore = ddp.restore_grad_buffers

    @functools.wraps(restore)
    def restore_and_forget(*args: Any, **options: Any) -> Any:
        result = restore(*args, **options)
        for gradient in gradients:
            if gradient.is_cpu:  # a GPU's memory is staged, and never registered
                bps_rdma.forget(gradient)
        return result

    def keep(*_: Any, **__: Any) -> None:
        """Keeps memory that other processes map: freeing is meant for a GPU's memory."""

    def zero(*_: Any, **__: Any) -> None:
        """Zeroes the gradients, as restoring them does."""
        for gradient in gradients:
            gradient.zero_()

    if all(gradient.untyped_storage().resizable() for gradient in gradients):
        ddp.restore_grad_buffers = restore_and_forget
    else:
        ddp.offload_grad_buffers, ddp.restore_grad_buffers = keep, zero
