# SPDX-License-Identifier: Apache-2.0
"""push_pull and its relatives on torch tensors, under BytePS's names; gradients flow through push_pull().

Names are optional here: without one, a call is identified by the function that makes it and by the tensor's dtype and
size. If ranks call from different functions their names differ, and the operation fails with DeadlineError, which gives
the name.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

import bps_rdma
from bps_rdma import (
    argument_types,
    get_pushpull_speed,
    job,
    local_rank,
    local_size,
    poll,
    rank,
    shutdown,
    size,
    synchronize,
)
from bps_rdma.operations import OperationOptions, ReduceOp
from bps_rdma.torch import transfer
from bps_rdma.torch.checks import check_tensor
from bps_rdma.torch.compression import AnyCompression, Compression, Compressor, compressor_of
from bps_rdma.torch.membership import AnyGroup, group_of, init, resume, suspend
from bps_rdma.torch.transfer import AnyHandle

__all__ = [
    "Compression",
    "byteps_torch_set_num_grads",
    "declare",
    "get_pushpull_speed",
    "init",
    "local_rank",
    "local_size",
    "poll",
    "push_pull",
    "push_pull_async",
    "push_pull_async_inplace",
    "push_pull_group_sync_inplace",
    "push_pull_inplace",
    "rank",
    "resume",
    "shutdown",
    "size",
    "suspend",
    "synchronize",
]


def push_pull(
    tensor: torch.Tensor,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
    compression: AnyCompression = Compression.none,
    group: AnyGroup = None,
    exact: bool | None = None,
) -> torch.Tensor:
    """The sum (or mean) over all ranks, as a new tensor through which gradients flow.

    The gradient of the result is push_pulled in the same way during backward, so every rank must run backward.

    Args:
        tensor: any shape, contiguous, on the CPU or a CUDA device; dtypes as for bps_rdma.push_pull_inplace().
        average: divide by the size of the group. The mean of integers is rounded down, and is an integer.
        name: the same on all ranks. None: made from the calling function, the dtype and the size.
        version: accepted for compatibility with BytePS and ignored.
        priority: operations with a higher priority are sent first.
        compression: the dtype that is sent, e.g. Compression.bf16 for a float32 tensor, or how one travels between
            hosts, e.g. "int8"; see docs/compression.md.
        group: a group of bps_rdma or of torch.distributed; default: all workers.
        exact: True: the sum (or mean) is exact, and rounded once (see docs/exact.md). Default: what BPS_EXACT says.

    Raises:
        InvalidTensorError, MismatchError, PeerLostError, DeadlineError: as bps_rdma.push_pull_inplace().
    """
    options = _options(average, _full_name(name, tensor), priority, group, awaited=True)
    how = compressor_of(compression, exact)
    options = options._replace(compression=how.method)
    if tensor.requires_grad and torch.is_grad_enabled():
        result: torch.Tensor = _PushPull.apply(tensor, options, how)  # type: ignore[no-untyped-call]
        return result
    return _push_pull(tensor, options, how)


def _push_pull(tensor: torch.Tensor, options: OperationOptions, compression: Compressor) -> torch.Tensor:
    wire, context = compression.compress(tensor.detach())
    if wire.dtype != tensor.dtype:
        options = options._replace(name=f"{options.name}.{wire.dtype}")  # one name stands for one dtype
    own = wire.data_ptr() == tensor.data_ptr()
    summed = transfer.all_reduce(wire, options, torch.empty_like(wire) if own else None).wait()
    return compression.decompress(summed, context)


class _PushPull(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, options: OperationOptions, compression: Compressor) -> torch.Tensor:
        context.call = options._replace(name=f"{options.name}.backward"), compression
        return _push_pull(tensor, options, compression)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        return _push_pull(gradients[0].contiguous(), *context.call), None, None


def push_pull_inplace(
    tensor: torch.Tensor,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
    group: AnyGroup = None,
) -> torch.Tensor:
    """Replaces the tensor by its sum (or mean) over all ranks, and returns it. Autograd does not record this."""
    options = _options(average, _full_name(name, tensor), priority, group, awaited=True)
    transfer.all_reduce(tensor.detach(), options).wait()
    return tensor


def push_pull_async(
    tensor: torch.Tensor,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
    group: AnyGroup = None,
) -> AnyHandle:
    """Starts push_pull() without gradients; synchronize() gives the new tensor."""
    options = _options(average, _full_name(name, tensor), priority, group)
    data = tensor.detach()
    return transfer.all_reduce(data, options, torch.empty_like(data))


def push_pull_async_inplace(
    tensor: torch.Tensor,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
    group: AnyGroup = None,
) -> AnyHandle:
    """Starts push_pull_inplace(); the tensor must neither be read nor written until synchronize() returns it."""
    options = _options(average, _full_name(name, tensor), priority, group)
    return transfer.all_reduce(tensor.detach(), options)


def _options(average: bool, name: str, priority: int, group: AnyGroup, *, awaited: bool = False) -> OperationOptions:
    op = ReduceOp.average if average else ReduceOp.sum
    return OperationOptions(op, name, priority, None if group is None else group_of(group), None, awaited)


def declare(name: str, like: Any = None, *, shape: Any = None, dtype: Any = None, group: AnyGroup = None) -> None:
    """Announces a name, so that its first use needs no round trip of its own. Optional.

    With the name alone, as in BytePS, this has no effect: a name is declared with its shape and dtype.

    Args:
        name: as for push_pull().
        like: a tensor of the shape and dtype and on the device that will be used; instead of `shape` and `dtype`.
        shape: of CPU tensors.
        dtype: torch's or numpy's.
        group: as for push_pull().
    """
    if like is None and shape is None:
        return
    name = _full_name(name)
    if isinstance(like, torch.Tensor):
        transfer.declare_many({name: like}, group_of(group))
        return
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    bps_rdma.declare(name, like, shape=shape, dtype=dtype, group=group_of(group))


# ---- BytePS's way to wait once for many gradients: byteps_torch_set_num_grads(n), then n calls of
# push_pull_group_sync_inplace(); the last call waits for all.


class _Batch:
    def __init__(self) -> None:
        self.expected = 0
        self.started: list[AnyHandle] = []


def byteps_torch_set_num_grads(number: int) -> None:
    """Sets how many calls of push_pull_group_sync_inplace() form a group. The job must run."""
    job.current().part(_Batch).expected = number


def push_pull_group_sync_inplace(
    tensor: torch.Tensor,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
) -> tuple[AnyHandle, int]:
    """Starts push_pull_inplace(); the last call of a group, see byteps_torch_set_num_grads(), waits for all of them.

    Returns:
        (handle, calls of this group so far); the handles of a complete group need not be synchronised.
    """
    handle = push_pull_async_inplace(tensor, average, name or _call_site(tensor), version, priority)
    batch = job.current().part(_Batch)
    batch.started.append(handle)
    count = len(batch.started)
    if count == batch.expected:
        complete, batch.started = batch.started, []
        bps_rdma.wait(complete)
    return handle, count


def _full_name(name: str | None, tensor: torch.Tensor | None = None) -> str:
    """The name for the core, of a call's `name`; without one it is made from the tensor and the calling function."""
    argument_types.explain(name=name)  # in the caller's words: formatted, any object would be a text
    if tensor is not None:
        check_tensor(tensor)
    return f"byteps.{_call_site(tensor) if tensor is not None and not name else name}"


def _call_site(tensor: torch.Tensor) -> str:
    """Names a call by function, dtype and size; not by its line, since ranks may call from different branches."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    place = f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"
    return f"{place}.{str(tensor.dtype).removeprefix('torch.')}.{tensor.numel()}"
