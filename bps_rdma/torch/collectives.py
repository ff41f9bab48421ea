# SPDX-License-Identifier: Apache-2.0
"""reduce_scatter, all_gather and broadcast of torch tensors on the CPU or a CUDA device. No gradient flows.

Without a name, calls are matched by their order per operation, dtype and size.
"""

from __future__ import annotations

import torch

import bps_rdma
from bps_rdma import argument_types, arrays
from bps_rdma.handle import PythonHandle
from bps_rdma.operations import OperationOptions, start
from bps_rdma.operations.begun import whole
from bps_rdma.operations.messages import Together
from bps_rdma.operations.options import moving, reducing
from bps_rdma.operations.uneven import UnevenGather
from bps_rdma.positions import Unpack, keywords_of, keywords_since
from bps_rdma.torch import transfer
from bps_rdma.torch.arguments import Moving, Reducing, check_out, for_core, full_name
from bps_rdma.torch.checks import check_tensor
from bps_rdma.torch.transfer import AnyHandle, members_of


@keywords_since("average", "name", "priority", "group", "out", "op", "timeout", "compression", "exact")
@keywords_of(bps_rdma.reduce_scatter, group="AnyGroup")
def reduce_scatter(
    tensor: torch.Tensor, name: str | None = None, *, out: torch.Tensor | None = None, **options: Unpack[Reducing]
) -> torch.Tensor:
    """Sums (or averages) the tensor over the group and returns this rank's part.

    Args:
        tensor: n elements on every rank, any shape; taken as flat. Of one on a device n must divide by the size of the
            group, unless the core takes it (BPS_DEVICE_ROUTE).
        out: receives the part: its size must fit `shard_bounds(n, group size, place in the group)`. Default: a new flat
            tensor.
        name, average, op, priority, group, timeout, compression, exact: as for push_pull().

    Raises:
        InvalidTensorError: `out` has another size, dtype or device. Otherwise as push_pull().
    """
    found = reducing(full_name(name), True, **for_core(options))
    result: torch.Tensor = _scatter(tensor, out, found).wait()
    return result


@whole
@keywords_since("average", "name", "priority", "group", "out", "op", "timeout", "compression", "exact")
@keywords_of(bps_rdma.reduce_scatter, group="AnyGroup")
def reduce_scatter_async(
    tensor: torch.Tensor, name: str | None = None, *, out: torch.Tensor | None = None, **options: Unpack[Reducing]
) -> AnyHandle:
    """Starts reduce_scatter(); the handle gives the part. Neither tensor may be used until then."""
    return _scatter(tensor, out, reducing(full_name(name), False, **for_core(options)))


def _scatter(tensor: torch.Tensor, out: torch.Tensor | None, options: OperationOptions) -> AnyHandle:
    check_tensor(tensor)
    if out is not None:
        check_out(out, tensor)
    if transfer.staged_from(tensor) is None:
        handle: AnyHandle = start.reduce_scatter(tensor.detach(), out, options)
    else:
        count = tensor.numel() // members_of(options.group).size
        part = torch.empty(count, dtype=tensor.dtype, device=tensor.device) if out is None else out
        handle = transfer.reduce_scatter(part, tensor, options)
    arrays.note_change(out)
    return handle


@keywords_since("name", "priority", "group", "out", "timeout")
@keywords_of(bps_rdma.all_gather, group="AnyGroup")
def all_gather(
    tensor: torch.Tensor,
    name: str | None = None,
    *,
    uneven: bool = False,
    out: torch.Tensor | None = None,
    **options: Unpack[Moving],
) -> torch.Tensor:
    """Gathers one part of every rank into one tensor on all ranks. Each rank pushes only its own part.

    Args:
        tensor: this rank's part, contiguous, of any dtype of torch.
        uneven: the first dimensions of the parts differ; the ranks tell each other first. The same on all ranks. For
            dtypes that push_pull() takes.
        out: n elements for the whole; this rank's part is `shard_bounds(n, group size, place)`, unless `uneven`.
            Default: a new tensor whose first dimension is the sum of those of all parts. Without `uneven` these are
            equal if there is no `out`, on a device, and in dtypes that push_pull() does not take.
        name, priority, group, timeout: as for push_pull().

    Raises:
        InvalidTensorError: `tensor` has another size, dtype or device than this rank's part of `out`. MismatchError:
            with `uneven`, parts differ in more than their first dimension. Otherwise as push_pull().
    """
    found = moving(full_name(name), True, **for_core(options))
    result: torch.Tensor = _gather(tensor, out, uneven, found).wait()
    return result


@whole
@keywords_since("name", "priority", "group", "out", "timeout")
@keywords_of(bps_rdma.all_gather, group="AnyGroup")
def all_gather_async(
    tensor: torch.Tensor,
    name: str | None = None,
    *,
    uneven: bool = False,
    out: torch.Tensor | None = None,
    **options: Unpack[Moving],
) -> AnyHandle | PythonHandle[torch.Tensor]:
    """Starts all_gather(); the handle gives the whole. `tensor` may not be changed until then."""
    return _gather(tensor, out, uneven, moving(full_name(name), False, **for_core(options)))


def _gather(
    tensor: torch.Tensor, out: torch.Tensor | None, uneven: bool, options: OperationOptions
) -> AnyHandle | PythonHandle[torch.Tensor]:
    check_tensor(tensor)
    if out is not None:
        check_out(out, tensor)
    if uneven is not False and argument_types.truth("uneven", uneven):
        return _gather_uneven(tensor, out, options)
    first, rest = (tensor.shape[0], tensor.shape[1:]) if tensor.shape else (1, ())
    size = members_of(options.group).size
    whole = torch.empty((size * first, *rest), dtype=tensor.dtype, device=tensor.device) if out is None else out
    handle = transfer.all_gather(whole, tensor, options)
    arrays.note_change(out)
    return handle


def _gather_uneven(
    tensor: torch.Tensor, out: torch.Tensor | None, options: OperationOptions
) -> PythonHandle[torch.Tensor]:
    arrays.note_change(out)
    if transfer.device_of(tensor) is None:
        return UnevenGather(tensor, out, options)
    if options.awaited and transfer.staged_from(tensor) is None:
        return UnevenGather(tensor, out, options, lambda part, own: part.copy_(own.detach().view(-1)))
    gathered = UnevenGather(tensor.detach().cpu(), None, options)

    def finish() -> torch.Tensor:
        whole: torch.Tensor = gathered.wait()
        return whole.to(tensor.device) if out is None else out.detach().copy_(whole.view(out.shape))

    return Together([gathered], finish)


@keywords_since("root", "name", "priority", "group", "timeout")
@keywords_of(bps_rdma.broadcast, group="AnyGroup")
def broadcast(
    tensor: torch.Tensor, name: str | None = None, *, root: int = 0, **options: Unpack[Moving]
) -> torch.Tensor:
    """Replaces the tensor on every rank by the one of worker rank `root`, and returns it.

    Args:
        tensor: contiguous, of the same size and dtype on all ranks, of any dtype of torch.
        root: worker rank whose tensor is taken; of a group its rank in the job.
        name, priority, group, timeout: as for push_pull().

    Raises:
        InvalidArgumentError: `root` is not in the group. Otherwise as push_pull().
    """
    _broadcast(tensor, root, moving(full_name(name), True, **for_core(options))).wait()
    return tensor


@whole
@keywords_since("root", "name", "priority", "group", "timeout")
@keywords_of(bps_rdma.broadcast, group="AnyGroup")
def broadcast_async(
    tensor: torch.Tensor, name: str | None = None, *, root: int = 0, **options: Unpack[Moving]
) -> AnyHandle:
    """Starts broadcast(); the tensor must neither be read nor written until the handle is done."""
    return _broadcast(tensor, root, moving(full_name(name), False, **for_core(options)))


def _broadcast(tensor: torch.Tensor, root: int, options: OperationOptions) -> AnyHandle:
    check_tensor(tensor)
    handle = transfer.broadcast(tensor, root, options)
    arrays.note_change(tensor)
    return handle
