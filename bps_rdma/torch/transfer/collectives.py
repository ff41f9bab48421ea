# SPDX-License-Identifier: Apache-2.0
"""all_reduce, reduce_scatter, all_gather and broadcast of torch tensors: on the GPUs of a host first, or staged.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from bps_rdma import Group, arrays, job
from bps_rdma.argument_types import check_root
from bps_rdma.operations import OperationOptions
from bps_rdma.operations.declare import declare_with, declared_compression
from bps_rdma.torch.transfer import hosts, staged
from bps_rdma.torch.transfer.dense import as_bytes
from bps_rdma.torch.transfer.device import device_of
from bps_rdma.torch.transfer.operation import Layout
from bps_rdma.torch.transfer.staged import AnyHandle, members_of, staged_from


def all_reduce(
    tensor: torch.Tensor, options: OperationOptions, out: torch.Tensor | None = None, *, in_order: bool = False
) -> AnyHandle:
    """Starts the reduction over all ranks.

    Args:
        tensor: contiguous, of a dtype of bps_rdma.push_pull_inplace(). On a device it is read once the caller's stream
            has reached this call.
        options: of the operation; chunks of a staged tensor append their number to the name.
        out: receives the result, as large as `tensor`; None: in place.
        in_order: all ranks of the group start those of its operations, of all kinds, for which this is True in the same
            order, and so the GPUs of a host may come first, among themselves (hosts.on_hosts()).

    Returns:
        A handle; its result is `out`, or `tensor`.

    Raises:
        InvalidTensorError: of the tensor's dtype, layout or device. MismatchError: as bps_rdma.push_pull_inplace().
    """
    queue = _queue_of_sums(tensor, options) if in_order else None
    if queue is None:
        return staged.all_reduce(tensor, options, out)
    staged.check_reducible(tensor, options)
    source = staged.flat(tensor)
    target = source if out is None else staged.flat(out)
    return queue.start(hosts.AllReduce(source, target), options, tensor if out is None else out)


def reduce_scatter(
    part: torch.Tensor, whole: torch.Tensor, options: OperationOptions, *, in_order: bool = False
) -> AnyHandle:
    """Starts the reduction of `whole` over all ranks; this rank gets its part of it.

    Args:
        part: 1/size of the group of `whole`; may be this rank's part of it.
        whole, options, in_order: as for all_reduce(); `whole` divides by the size of the group.
    """
    queue = _queue_of_sums(whole, options) if in_order else None
    if queue is None or not queue.takes_parts:
        return staged.reduce_scatter(part, whole, options)
    staged.check_reducible(whole, options)
    rows = staged.rows_of(whole, part, queue.size)
    return queue.start(hosts.ReduceScatter(staged.flat(whole), staged.flat(part), len(rows)), options, part)


def all_gather(
    whole: torch.Tensor, part: torch.Tensor, options: OperationOptions, *, in_order: bool = False
) -> AnyHandle:
    """Starts gathering all ranks' parts into `whole`.

    Args:
        whole, part: contiguous, of any dtype and of the sizes that reduce_scatter() takes.
        options, in_order: as for all_reduce().
    """
    result, whole, part = whole, as_bytes(whole), as_bytes(part)
    queue = _queue(whole, options) if in_order else None
    if queue is None or not queue.takes_parts:
        return staged.all_gather(whole, part, options, result)
    rows = staged.rows_of(whole, part, queue.size)
    return queue.start(hosts.AllGather(staged.flat(part), staged.flat(whole), len(rows)), options, result)


def broadcast(tensor: torch.Tensor, root: int, options: OperationOptions, *, in_order: bool = False) -> AnyHandle:
    """Starts replacing the tensor on all ranks by that of worker rank `root`.

    Args:
        tensor: contiguous, of any dtype.
        root: a worker rank of the group.
        options, in_order: as for all_reduce().

    Raises:
        InvalidArgumentError: `root` is not in the group.
    """
    data = as_bytes(tensor)
    queue = _queue(data, options) if in_order else None
    if queue is None:
        return staged.broadcast(data, root, options, tensor)
    root = check_root(root, members_of(options.group).ranks)
    return queue.start(hosts.Broadcast(staged.flat(data), root), options, tensor)


def _queue_of_sums(tensor: torch.Tensor, options: OperationOptions) -> hosts.HostQueue | None:
    """What sums the tensor on the GPUs of a host first; None: nothing does."""
    if device_of(tensor) is None or not hosts.on_hosts() or not hosts.is_summed(tensor, options.op):
        return None
    if _declared(tensor, options) != "":  # it is compressed or exact
        return None
    return _queue(tensor, options)


def _queue(tensor: torch.Tensor, options: OperationOptions) -> hosts.HostQueue | None:
    """What moves the tensor by the GPUs of a host; None: nothing does."""
    device = device_of(tensor)
    if device is None or not hosts.on_hosts() or tensor.numel() == 0:
        return None
    return job.current().part(hosts.HostQueues).find(device, tensor.device, members_of(options.group))


def _declared(tensor: torch.Tensor, options: OperationOptions) -> str:
    """How the core would compress a sum, or that it is exact; "": neither."""
    running, wanted = job.current(), options.compression
    if options.name is not None:
        wanted = declared_compression(running, members_of(options.group), options.name, wanted)
    return running.compression(arrays.core_dtype(tensor.dtype), tensor.numel(), wanted)


def declare_many(tensors: Mapping[str, Any], group: Group | None, compression: str | None = None) -> None:
    """Announces the names of all_reduce operations in one round trip, with the chunks of staged ones.

    Args:
        tensors: name -> a tensor of the shape and dtype and on the device that will be used, or (shape, dtype).
        group: who takes part; None: all workers.
        compression: of all of them; see bps_rdma.declare_many().
    """
    found: dict[str, object] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or device_of(tensor) is None:
            found[name] = tensor
            continue
        if staged_from(tensor) is None:
            found[name] = tuple(tensor.shape), tensor.dtype
            continue
        for piece, elements in core_operations(name, tensor):
            found[piece] = ((elements,), str(tensor.dtype).removeprefix("torch."))
    declare_with(found, group, compression)


def declare_each(tensors: Iterable[tuple[str, torch.Tensor, str | None]], group: Group | None) -> None:
    """declare_many() of (name, tensor, compression) that differ in their compression."""
    by_method: dict[str | None, dict[str, Any]] = {}
    for name, tensor, compression in tensors:
        by_method.setdefault(compression, {})[name] = tensor
    for compression, alike in by_method.items():
        declare_many(alike, group, compression)


def core_operations(name: str, tensor: torch.Tensor) -> list[tuple[str, int]]:
    """(name, elements) of each operation of the core that an all_reduce of this name and tensor consists of."""
    if staged_from(tensor) is None:
        return [(name, tensor.numel())]
    layout = Layout(1, tensor.numel(), [], [], tensor.dtype)
    cuts = layout.cut(job.current().config.integer("BPS_GPU_CHUNK_BYTES"))
    return [(f"{name} {number}", end - begin) for number, (begin, end) in enumerate(cuts)]
