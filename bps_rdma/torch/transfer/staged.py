# SPDX-License-Identifier: Apache-2.0
"""all_reduce, reduce_scatter, all_gather and broadcast of one tensor per rank: by the core alone, or staged.

collectives.py says what they take; there the GPUs of a host may come first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import bps_rdma
from bps_rdma import Group, Handle, arrays, devices, job
from bps_rdma.agreement import group_of
from bps_rdma.argument_types import check_root
from bps_rdma.errors import InvalidTensorError
from bps_rdma.operations import OperationOptions, ReduceOp, start
from bps_rdma.operations.unnamed import unnamed
from bps_rdma.spans import spans
from bps_rdma.torch.transfer.device import Device, device_of
from bps_rdma.torch.transfer.operation import Layout, StagedOperation
from bps_rdma.torch.transfer.pipeline import CopyPipeline

AnyHandle = Handle[torch.Tensor] | StagedOperation
_MOMENT = 1.0  # seconds; threads that take longer to end are left alone


class _Pipelines:
    """The copy pipelines of a job, by device and group."""

    def __init__(self) -> None:
        self._made: dict[tuple[torch.device, int], CopyPipeline] = {}

    def find(self, device: Device, place: torch.device, members: Group) -> CopyPipeline:
        """The pipeline of this device and group; made at first use."""
        found = self._made.get((place, members.id))
        if found is None:
            config = job.current().config
            chunk_bytes = config.integer("BPS_GPU_CHUNK_BYTES")
            buffers = config.integer("BPS_GPU_CHUNKS")
            found = CopyPipeline(device, members.size, chunk_bytes, buffers, spans())
            self._made[place, members.id] = found
        return found

    def close(self) -> None:
        """Ends all of them."""
        for pipeline in self._made.values():
            pipeline.stop(_MOMENT)


def members_of(group: Group | None) -> Group:
    """The group itself, or that of all workers for None."""
    return group_of(job.current(), group)


def staged_from(tensor: torch.Tensor) -> Device | None:
    """The device from which the copy pipeline stages a tensor; None: the core takes it where it lies.

    The core takes CPU memory and, with BPS_DEVICE_ROUTE, that of CUDA devices. Ranks that go different ways would wait
    for each other, and so this depends only on what is the same on all of them.

    Args:
        tensor: on the CPU or on a CUDA device.
    """
    device = device_of(tensor)
    return None if device is None or devices.are_carried() else device


def all_reduce(tensor: torch.Tensor, options: OperationOptions, out: torch.Tensor | None = None) -> AnyHandle:
    """Starts the reduction over all ranks."""
    result = tensor if out is None else out
    device = staged_from(tensor)
    if device is None:
        return start.reduce(tensor, result, options)
    check_reducible(tensor, options)
    options = options if options.name else unnamed(options)  # its pieces have names
    source = flat(tensor)
    target = source if out is None else flat(out)
    layout = Layout(1, source.numel(), [(0, source)], [(0, target)], source.dtype)

    def send(chunk: torch.Tensor, each: OperationOptions) -> Handle[Any]:
        return start.reduce(chunk, chunk, each)

    return _stage(device, layout, "all_reduce", send, options, result)


def reduce_scatter(part: torch.Tensor, whole: torch.Tensor, options: OperationOptions) -> AnyHandle:
    """Starts the reduction of `whole` over all ranks; this rank gets its part of it."""
    device = staged_from(whole)
    if device is None:
        return start.reduce_scatter(whole.detach(), part, options)
    check_reducible(whole, options)
    options = options if options.name else unnamed(options)
    members = members_of(options.group)
    mine = members.rank
    rows = rows_of(whole, part, members.size)
    layout = Layout(members.size, part.numel(), list(enumerate(rows)), [(mine, flat(part))], part.dtype)

    def send(chunk: torch.Tensor, each: OperationOptions) -> Handle[Any]:
        return start.reduce_scatter(chunk, chunk.view(members.size, -1)[mine], each)

    return _stage(device, layout, "reduce_scatter", send, options, part)


def all_gather(whole: torch.Tensor, part: torch.Tensor, options: OperationOptions, result: torch.Tensor) -> AnyHandle:
    """Starts gathering all ranks' parts into `whole`, both of a dtype of the core; the handle gives `result`."""
    device = staged_from(whole)
    if device is None:
        return start.all_gather(part, whole, options, result)
    members = members_of(options.group)
    mine = members.rank
    rows = rows_of(whole, part, members.size)
    in_place = rows[mine].data_ptr() == part.data_ptr()
    targets = [(number, row) for number, row in enumerate(rows) if not (in_place and number == mine)]
    layout = Layout(members.size, part.numel(), [(mine, flat(part))], targets, part.dtype)

    def send(chunk: torch.Tensor, each: OperationOptions) -> Handle[Any]:
        return start.all_gather(chunk.view(members.size, -1)[mine], chunk, each)

    return _stage(device, layout, "all_gather", send, options, result)


def broadcast(tensor: torch.Tensor, root: int, options: OperationOptions, result: torch.Tensor) -> AnyHandle:
    """Starts replacing the tensor, of a dtype of the core, by that of rank `root`; the handle gives `result`."""
    device = staged_from(tensor)
    if device is None:
        return start.broadcast(tensor, root, options, result)
    sends = check_root(root, members_of(options.group).ranks) == bps_rdma.rank()
    moved = [(0, flat(tensor))]
    layout = Layout(1, tensor.numel(), moved if sends else [], [] if sends else moved, tensor.dtype)

    def send(chunk: torch.Tensor, each: OperationOptions) -> Handle[Any]:
        return start.broadcast(chunk, root, each)

    return _stage(device, layout, "broadcast", send, options, result)


def _stage(
    device: Device,
    layout: Layout,
    kind: str,
    send: Callable[[torch.Tensor, OperationOptions], Handle[Any]],
    options: OperationOptions,
    result: torch.Tensor,
) -> StagedOperation:
    running = job.current()
    name = options.name or name_of(kind, layout.dtype, layout.rows * layout.columns)
    pipeline = running.part(_Pipelines).find(device, result.device, members_of(options.group))
    patience = running.process.timeout_s if options.timeout is None else options.timeout
    each = options._replace(awaited=False)

    def send_chunk(chunk: torch.Tensor, number: int) -> Handle[Any]:
        return send(chunk, each._replace(name=f"{name} {number}"))

    operation = StagedOperation(device, layout, send_chunk, name, result, patience, lambda: pipeline.completed)
    pipeline.start(operation)
    return operation


def name_of(kind: str, dtype: torch.dtype, elements: int) -> str:
    """That of operations without a name, which are matched by their order per kind, dtype and size."""
    return f"~{kind}.{str(dtype).removeprefix('torch.')}.{elements}"


def check_reducible(tensor: torch.Tensor, options: OperationOptions) -> None:
    """Raises the errors of the tensor that all_reduce() raises: InvalidTensorError."""
    device_of(tensor)
    arrays.check_dense(tensor)
    arrays.check_values(tensor)
    if tensor.dtype == torch.bool and options.op is ReduceOp.average:
        raise InvalidTensorError("bool tensors have no mean", "pass average=False: the sum of bools is 'any'")


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in one dimension; InvalidTensorError: it is not contiguous."""
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise InvalidTensorError(
            f"the tensor of shape {tuple(tensor.shape)} is not contiguous", "pass tensor.contiguous()"
        )
    arrays.check_values(tensor)
    return tensor.detach().view(-1)


def rows_of(whole: torch.Tensor, part: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """The parts of all ranks in `whole`; InvalidTensorError: `part` is none of them."""
    if part.numel() * ranks != whole.numel() or part.dtype != whole.dtype:
        raise InvalidTensorError(
            f"a part of {part.numel()} elements of {part.dtype} is not one of {ranks} of {whole.numel()} elements of "
            f"{whole.dtype}",
            "pass a whole that divides by the size of the group, and a part of the same dtype",
        )
    return list(flat(whole).view(ranks, -1).unbind(0))
