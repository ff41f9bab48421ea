# SPDX-License-Identifier: Apache-2.0
"""all_reduce, reduce_scatter, all_gather and broadcast of torch tensors: by the core alone, or staged from a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

import bps_rdma
from bps_rdma import Group, Handle, arrays, devices, job
from bps_rdma.agreement import group_of
from bps_rdma.argument_types import check_root
from bps_rdma.errors import InvalidTensorError
from bps_rdma.operations import OperationOptions, ReduceOp, start
from bps_rdma.operations.declare import declare_with, declared_compression
from bps_rdma.spans import spans
from bps_rdma.torch.transfer.dense import as_bytes
from bps_rdma.torch.transfer.device import Device, device_of
from bps_rdma.torch.transfer.host_sums import HostSums
from bps_rdma.torch.transfer.on_hosts import OnHosts, is_summed, sums_on_hosts
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


def _declared(tensor: torch.Tensor, options: OperationOptions) -> str:
    """How the core would compress a sum, or that it is exact; "": neither."""
    running, wanted = job.current(), options.compression
    if options.name is not None:
        wanted = declared_compression(running, members_of(options.group), options.name, wanted)
    return running.compression(arrays.core_dtype(tensor.dtype), tensor.numel(), wanted)


def all_reduce(
    tensor: torch.Tensor, options: OperationOptions, out: torch.Tensor | None = None, *, in_order: bool = False
) -> AnyHandle:
    """Starts the reduction over all ranks.

    Args:
        tensor: contiguous, of a dtype of bps_rdma.push_pull_inplace(). On a device it is read once the caller's stream
            has reached this call.
        options: of the operation; chunks of a staged tensor append their number to the name.
        out: receives the result, as large as `tensor`; None: in place.
        in_order: all ranks of the group start those of its operations for which this is True in the same order, and so
            the GPUs of a host may sum first, among themselves (sums_on_hosts()).

    Returns:
        A handle; its result is `out`, or `tensor`.

    Raises:
        InvalidTensorError: of the tensor's dtype, layout or device. MismatchError: as bps_rdma.push_pull_inplace().
    """
    result = tensor if out is None else out
    if in_order and (on_hosts := _on_hosts(tensor, options)) is not None:
        check_reducible(tensor, options)
        source = _flat(tensor)
        named = options._replace(name=options.name or _name_of("all_reduce", source.dtype, source.numel()))
        return on_hosts.start(source, source if out is None else _flat(out), named, result)
    device = staged_from(tensor)
    if device is None:
        return start.reduce(tensor, result, options)
    check_reducible(tensor, options)
    source = _flat(tensor)
    target = source if out is None else _flat(out)
    layout = Layout(1, source.numel(), [(0, source)], [(0, target)], source.dtype)

    def send(chunk: torch.Tensor, each: OperationOptions) -> Handle[Any]:
        return start.reduce(chunk, chunk, each)

    return _stage(device, layout, "all_reduce", send, options, result)


def _on_hosts(tensor: torch.Tensor, options: OperationOptions) -> HostSums | None:
    """What sums the tensor on the GPUs of a host first; None: nothing does."""
    device = device_of(tensor)
    if device is None or not sums_on_hosts() or not is_summed(tensor, options.op):
        return None
    if _declared(tensor, options) != "":  # it is compressed or exact
        return None
    return job.current().part(OnHosts).find(device, tensor.device, members_of(options.group), all_reduce)


def reduce_scatter(part: torch.Tensor, whole: torch.Tensor, options: OperationOptions) -> AnyHandle:
    """Starts the reduction of `whole` over all ranks; this rank gets its part of it.

    Args:
        part: 1/size of the group of `whole`; may be this rank's part of it.
        whole, options: as for all_reduce(); `whole` divides by the size of the group.
    """
    device = staged_from(whole)
    if device is None:
        return start.reduce_scatter(whole.detach(), part, options)
    check_reducible(whole, options)
    members = members_of(options.group)
    mine = members.ranks.index(bps_rdma.rank())
    rows = _rows(whole, part, members.size)
    layout = Layout(members.size, part.numel(), list(enumerate(rows)), [(mine, _flat(part))], part.dtype)

    def send(chunk: torch.Tensor, each: OperationOptions) -> Handle[Any]:
        return start.reduce_scatter(chunk, chunk.view(members.size, -1)[mine], each)

    return _stage(device, layout, "reduce_scatter", send, options, part)


def all_gather(whole: torch.Tensor, part: torch.Tensor, options: OperationOptions) -> AnyHandle:
    """Starts gathering all ranks' parts into `whole`.

    Args:
        whole, part: contiguous, of any dtype and of the sizes that reduce_scatter() takes.
        options: as for all_reduce().
    """
    device = staged_from(whole)
    result, whole, part = whole, as_bytes(whole), as_bytes(part)
    if device is None:
        return start.all_gather(part, whole, options, result)
    members = members_of(options.group)
    mine = members.ranks.index(bps_rdma.rank())
    rows = _rows(whole, part, members.size)
    in_place = rows[mine].data_ptr() == part.data_ptr()
    targets = [(number, row) for number, row in enumerate(rows) if not (in_place and number == mine)]
    layout = Layout(members.size, part.numel(), [(mine, _flat(part))], targets, part.dtype)

    def send(chunk: torch.Tensor, each: OperationOptions) -> Handle[Any]:
        return start.all_gather(chunk.view(members.size, -1)[mine], chunk, each)

    return _stage(device, layout, "all_gather", send, options, result)


def broadcast(tensor: torch.Tensor, root: int, options: OperationOptions) -> AnyHandle:
    """Starts replacing the tensor on all ranks by that of worker rank `root`.

    Args:
        tensor: contiguous, of any dtype.
        root: a worker rank of the group.
        options: as for all_reduce().

    Raises:
        InvalidArgumentError: `root` is not in the group.
    """
    device = staged_from(tensor)
    data = as_bytes(tensor)
    if device is None:
        return start.broadcast(data, root, options, tensor)
    ranks = members_of(options.group).ranks
    root = check_root(root, ranks)
    flat = [(0, _flat(data))]
    sends = root == bps_rdma.rank()
    layout = Layout(1, data.numel(), flat if sends else [], [] if sends else flat, data.dtype)

    def send(chunk: torch.Tensor, each: OperationOptions) -> Handle[Any]:
        return start.broadcast(chunk, root, each)

    return _stage(device, layout, "broadcast", send, options, tensor)


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
        for piece, elements in pieces(name, tensor):
            found[piece] = ((elements,), str(tensor.dtype).removeprefix("torch."))
    declare_with(found, group, compression)


def pieces(name: str, tensor: torch.Tensor) -> list[tuple[str, int]]:
    """(name, elements) of each operation of the core that an all_reduce of this name and tensor consists of."""
    if staged_from(tensor) is None:
        return [(name, tensor.numel())]
    layout = Layout(1, tensor.numel(), [], [], tensor.dtype)
    cuts = layout.cut(job.current().config.integer("BPS_GPU_CHUNK_BYTES"))
    return [(f"{name} {number}", end - begin) for number, (begin, end) in enumerate(cuts)]


def _stage(
    device: Device,
    layout: Layout,
    kind: str,
    send: Callable[[torch.Tensor, OperationOptions], Handle[Any]],
    options: OperationOptions,
    result: torch.Tensor,
) -> StagedOperation:
    running = job.current()
    name = options.name or _name_of(kind, layout.dtype, layout.rows * layout.columns)
    pipeline = running.part(_Pipelines).find(device, result.device, members_of(options.group))
    patience = running.process.timeout_s if options.timeout is None else options.timeout
    each = options._replace(awaited=False)

    def send_chunk(chunk: torch.Tensor, number: int) -> Handle[Any]:
        return send(chunk, each._replace(name=f"{name} {number}"))

    operation = StagedOperation(device, layout, send_chunk, name, result, patience, lambda: pipeline.completed)
    pipeline.start(operation)
    return operation


def _name_of(kind: str, dtype: torch.dtype, elements: int) -> str:
    """That of operations without a name, which are matched by their order per kind, dtype and size."""
    return f"~{kind}.{str(dtype).removeprefix('torch.')}.{elements}"


def check_reducible(tensor: torch.Tensor, options: OperationOptions) -> None:
    """Raises the errors of the tensor that all_reduce() raises: InvalidTensorError."""
    device_of(tensor)
    arrays.check_dense(tensor)
    arrays.check_values(tensor)
    if tensor.dtype == torch.bool and options.op is ReduceOp.average:
        raise InvalidTensorError("bool tensors have no mean", "pass average=False: the sum of bools is 'any'")


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise InvalidTensorError(
            f"the tensor of shape {tuple(tensor.shape)} is not contiguous", "pass tensor.contiguous()"
        )
    arrays.check_values(tensor)
    return tensor.detach().view(-1)


def _rows(whole: torch.Tensor, part: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    if part.numel() * ranks != whole.numel() or part.dtype != whole.dtype:
        raise InvalidTensorError(
            f"a part of {part.numel()} elements of {part.dtype} is not one of {ranks} of {whole.numel()} elements of "
            f"{whole.dtype}",
            "pass a whole that divides by the size of the group, and a part of the same dtype",
        )
    return list(_flat(whole).view(ranks, -1).unbind(0))
