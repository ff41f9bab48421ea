# SPDX-License-Identifier: Apache-2.0
"""push_pull and its relatives on torch tensors, under BytePS's names; gradients flow through push_pull().

Names are optional here: without one, a call is identified by the function that makes it and by the tensor's dtype and
size. If ranks call from different functions their names differ, and the operation fails with DeadlineError, which gives
the name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import bps_rdma
from bps_rdma import (
    arrays,
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
from bps_rdma.errors import InvalidArgumentError
from bps_rdma.operations import OperationOptions, ReduceOp
from bps_rdma.operations.begun import whole
from bps_rdma.operations.options import AnyCompression, reducing, text_of
from bps_rdma.positions import Unpack, keywords_of, keywords_since
from bps_rdma.torch import transfer
from bps_rdma.torch.arguments import Reducing, by_name, call_site, for_core, name_here, ours, required_name
from bps_rdma.torch.checks import check_tensor
from bps_rdma.torch.compression import Compression
from bps_rdma.torch.membership import AnyGroup, init, resume, suspend
from bps_rdma.torch.transfer import AnyHandle

__all__ = [
    "Compression", "byteps_torch_set_num_grads", "declare", "declare_many", "get_pushpull_speed", "init", "local_rank",
    "local_size", "poll", "push_pull", "push_pull_async", "push_pull_async_inplace", "push_pull_group_sync_inplace",
    "push_pull_inplace", "rank", "resume", "shutdown", "size", "suspend", "synchronize",
]  # fmt: skip

_in_the_order_of_byteps = keywords_since("average", "name", "version", "priority", "group")


@keywords_since("average", "name", "version", "priority", "compression", "group", "exact")
@keywords_of(bps_rdma.push_pull_inplace, group="AnyGroup")
def push_pull(
    tensor: torch.Tensor, name: str | None = None, *, version: int = 0, **options: Unpack[Reducing]
) -> torch.Tensor:
    """The sum (or mean) over all ranks, as a new tensor through which gradients flow.

    The gradient of the result is push_pulled in the same way during backward, so every rank must run backward.

    Args:
        tensor: any shape, contiguous, on the CPU or a CUDA device; dtypes as for bps_rdma.push_pull_inplace().
        name: the same on all ranks. None: made from the calling function, the dtype and the size.
        average: divide by the size of the group. The mean of integers is rounded down, and is an integer.
        op: "sum", "average", "min", "max" or "product"; overrides `average`.
        version: accepted for compatibility with BytePS and ignored.
        priority: operations with a higher priority are sent first.
        group: a group of bps_rdma or of torch.distributed; default: all workers.
        timeout: seconds; default BPS_TIMEOUT.
        compression: how the tensor travels between hosts, as in BFloat16(); see docs/compression.md.
        exact: True: the sum (or mean) is exact, and rounded once (see docs/exact.md). Default: what BPS_EXACT says.

    Raises:
        InvalidArgumentError: the result of this `op` has no gradient here, and the tensor requires one.
        InvalidTensorError, MismatchError, PeerLostError, DeadlineError: as bps_rdma.push_pull_inplace().
    """
    found = by_name(name, reducing(name_here(name, tensor), True, **for_core(options)))
    if tensor.requires_grad and torch.is_grad_enabled():
        if found.op not in (ReduceOp.sum, ReduceOp.average):
            raise InvalidArgumentError(f"no gradient flows through op={found.op.name!r}", "pass tensor.detach()")
        result: torch.Tensor = _PushPull.apply(tensor, found)  # type: ignore[no-untyped-call]
        return result
    return _push_pull(tensor, found)


def _push_pull(tensor: torch.Tensor, options: OperationOptions) -> torch.Tensor:
    data = tensor.detach()
    result: torch.Tensor = transfer.all_reduce(data, options, torch.empty_like(data)).wait()
    return result


class _PushPull(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, options: OperationOptions) -> torch.Tensor:
        context.options = options._replace(name=f"{options.name}.backward")
        return _push_pull(tensor, options)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        # It has a gradient itself, where the backward has one (create_graph=True).
        given = gradients[0].contiguous().resolve_neg()
        return _PushPull.apply(given, context.options), None  # type: ignore[no-untyped-call]


@_in_the_order_of_byteps
@keywords_of(bps_rdma.push_pull_inplace, group="AnyGroup")
def push_pull_inplace(
    tensor: torch.Tensor, name: str | None = None, *, version: int = 0, **options: Unpack[Reducing]
) -> torch.Tensor:
    """Replaces the tensor by its sum (or mean) over all ranks, and returns it. No gradient flows through this.

    Args:
        tensor, name, average, op, version, priority, group, timeout, compression, exact: as for push_pull().
    """
    found = by_name(name, reducing(name_here(name, tensor), True, **for_core(options)))
    transfer.all_reduce(tensor.detach(), found).wait()
    arrays.note_change(tensor)
    return tensor


@whole
@_in_the_order_of_byteps
@keywords_of(bps_rdma.push_pull_inplace, group="AnyGroup")
def push_pull_async(
    tensor: torch.Tensor, name: str | None = None, *, version: int = 0, **options: Unpack[Reducing]
) -> AnyHandle:
    """Starts push_pull() without gradients; synchronize() gives the new tensor."""
    found = by_name(name, reducing(name_here(name, tensor), False, **for_core(options)))
    data = tensor.detach()
    return transfer.all_reduce(data, found, torch.empty_like(data))


@whole
@_in_the_order_of_byteps
@keywords_of(bps_rdma.push_pull_inplace, group="AnyGroup")
def push_pull_async_inplace(
    tensor: torch.Tensor, name: str | None = None, *, version: int = 0, **options: Unpack[Reducing]
) -> AnyHandle:
    """Starts push_pull_inplace(); the tensor must neither be read nor written until synchronize() returns it."""
    handle = transfer.all_reduce(tensor, by_name(name, reducing(name_here(name, tensor), False, **for_core(options))))
    arrays.note_change(tensor)
    return handle


def declare(
    name: str,
    like: Any = None,
    *,
    shape: Any = None,
    dtype: Any = None,
    group: AnyGroup = None,
    compression: AnyCompression | None = None,
    exact: bool | None = None,
) -> None:
    """Announces a name, so that its first use needs no round trip of its own. Optional.

    With the name alone, as in BytePS, this has no effect: a name is declared with its shape and dtype.

    Args:
        name: as for push_pull().
        like: a tensor of the shape and dtype and on the device that will be used; instead of `shape` and `dtype`.
        shape: of CPU tensors.
        dtype: torch's or numpy's.
        group, compression, exact: as for push_pull(), of all operations of this name.
    """
    required_name(name)
    if like is not None or shape is not None:
        found = like if like is not None else (shape, dtype)
        declare_many({name: found}, group=group, compression=compression, exact=exact)


def declare_many(
    tensors: Mapping[str, Any],
    *,
    group: AnyGroup = None,
    compression: AnyCompression | None = None,
    exact: bool | None = None,
) -> None:
    """Announces any number of names in one round trip; see declare().

    Args:
        tensors: name -> a tensor of the shape and dtype and on the device that will be used, or (shape, dtype).
        group, compression, exact: as for push_pull(), of all operations of these names.

    Raises:
        InvalidArgumentError, MismatchError: as bps_rdma.declare_many().
    """
    if not isinstance(tensors, Mapping):
        raise InvalidArgumentError(f"{type(tensors).__name__} is not a dict", "pass {name: tensor or (shape, dtype)}")
    found = {required_name(name): like for name, like in tensors.items()}
    transfer.declare_many(found, ours(group), text_of(compression, exact))


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
    check_tensor(tensor)
    own = name or call_site(tensor)
    handle = push_pull_async_inplace(tensor, name=own, average=average, version=version, priority=priority)
    batch = job.current().part(_Batch)
    batch.started.append(handle)
    count = len(batch.started)
    if count == batch.expected:
        complete, batch.started = batch.started, []
        bps_rdma.wait(complete)
    return handle, count
