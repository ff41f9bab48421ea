"""push_pull and its relatives on torch tensors, under BytePS's names; gradients flow through push_pull().

Names are optional here: without one, a call is known by the function that makes it and by the tensor's dtype and size.
Ranks that do not meet under a name are told so at the deadline, with that name.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

import bps_rdma
from bps_rdma import Handle, get_pushpull_speed, poll, synchronize
from bps_rdma.torch.compression import Compression, Compressor
from bps_rdma.torch.start import group_of

__all__ = [
    "byteps_torch_set_num_grads",
    "declare",
    "get_pushpull_speed",
    "poll",
    "push_pull",
    "push_pull_async",
    "push_pull_async_inplace",
    "push_pull_group_sync_inplace",
    "push_pull_inplace",
    "synchronize",
]


def push_pull(
    tensor: torch.Tensor,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
    compression: Compressor = Compression.none,
    group: Any = None,
) -> torch.Tensor:
    """The sum (or mean) over all ranks, as a new tensor through which gradients flow.

    The gradient of what comes out is push_pulled in the same way on its way back: every rank must then run backward.

    Args:
        tensor: any shape, contiguous, on the CPU; dtypes as for bps_rdma.push_pull_inplace().
        average: divide by the size of the group. Integers are floor-divided, and stay integers.
        name: the same on all ranks. None: made from the calling function, the dtype and the size.
        version: accepted for BytePS's sake.
        priority: higher goes first.
        compression: what travels, e.g. Compression.bf16 for a float32 tensor.
        group: a group of bps_rdma or of torch.distributed; default: all workers.

    Raises:
        InvalidTensorError, MismatchError, PeerLostError, DeadlineError: as bps_rdma.push_pull_inplace().
    """
    name = name or _call_site(tensor)
    if tensor.requires_grad and torch.is_grad_enabled():
        result: torch.Tensor = _PushPull.apply(tensor, average, name, priority, compression, group)  # type: ignore[no-untyped-call]
        return result
    return _push_pull(tensor, average, name, priority, compression, group)


def _push_pull(
    tensor: torch.Tensor, average: bool, name: str, priority: int, compression: Compressor, group: Any
) -> torch.Tensor:
    wire, context = compression.compress(tensor.detach())
    reduce = bps_rdma.push_pull if wire.data_ptr() == tensor.data_ptr() else bps_rdma.push_pull_inplace
    if wire.dtype != tensor.dtype:
        name = f"{name}.{wire.dtype}"  # one name stands for one dtype
    summed = reduce(wire, average, f"byteps.{name}", priority=priority, group=group_of(group))
    return compression.decompress(summed, context)


class _PushPull(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, *call: Any) -> torch.Tensor:
        context.call = call
        return _push_pull(tensor, *call)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        average, name, priority, compression, group = context.call
        back = f"{name}.backward"
        return _push_pull(gradients[0].contiguous(), average, back, priority, compression, group), *[None] * 5


def push_pull_inplace(
    tensor: torch.Tensor,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
    group: Any = None,
) -> torch.Tensor:
    """Replaces the tensor by its sum (or mean) over all ranks, and returns it. Autograd does not see it."""
    data = tensor.detach()
    bps_rdma.push_pull_inplace(data, average, _named(name, tensor), version, priority, group_of(group))
    return tensor


def push_pull_async(
    tensor: torch.Tensor,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
    group: Any = None,
) -> Handle:
    """Starts push_pull() without gradients; synchronize() gives the new tensor."""
    data = tensor.detach()
    return bps_rdma.push_pull_async(data, average, _named(name, tensor), version, priority, group_of(group))


def push_pull_async_inplace(
    tensor: torch.Tensor,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
    group: Any = None,
) -> Handle:
    """Starts push_pull_inplace(); the tensor must neither be read nor written until synchronize() gives it back."""
    data = tensor.detach()
    return bps_rdma.push_pull_async_inplace(data, average, _named(name, tensor), version, priority, group_of(group))


def declare(name: str, like: Any = None, *, shape: Any = None, dtype: Any = None, group: Any = None) -> None:
    """Makes a name known before its first use, in which case that use takes no round trip of its own.

    Only a name, as BytePS has it: does nothing, since a name is declared with its shape and dtype at its first use.
    """
    if like is None and shape is None:
        return
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    bps_rdma.declare(f"byteps.{name}", like, shape=shape, dtype=dtype, group=group_of(group))


# ---- BytePS's way to wait once for many gradients: byteps_torch_set_num_grads(n), then n calls of
# push_pull_group_sync_inplace(); the last one waits for all of them.

_expected = 0
_started: list[Handle] = []


def byteps_torch_set_num_grads(number: int) -> None:
    """How many calls of push_pull_group_sync_inplace() make a group."""
    global _expected
    _expected = number


def push_pull_group_sync_inplace(
    tensor: torch.Tensor,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
) -> tuple[Handle, int]:
    """Starts push_pull_inplace(); the last call of a group, see byteps_torch_set_num_grads(), waits for all of them.

    Returns:
        (handle, calls of this group so far); the handles of a complete group need not be synchronised.
    """
    handle = push_pull_async_inplace(tensor, average, name or _call_site(tensor), version, priority)
    _started.append(handle)
    count = len(_started)
    if count == _expected:
        complete, _started[:] = list(_started), []
        bps_rdma.wait(complete)
    return handle, count


# ---- Names


def _named(name: str | None, tensor: torch.Tensor) -> str:
    return f"byteps.{name or _call_site(tensor)}"


def _call_site(tensor: torch.Tensor) -> str:
    """Where the call comes from: not the line, for ranks may well call from different branches of one function."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    place = f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"
    return f"{place}.{str(tensor.dtype).removeprefix('torch.')}.{tensor.numel()}"
