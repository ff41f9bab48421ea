"""all_reduce, reduce_scatter and all_gather of torch tensors: used where they lie on the CPU, staged from a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

import bps_rdma
from bps_rdma import Group, Handle, job
from bps_rdma.errors import InvalidTensorError
from bps_rdma.torch.exchange import members_of
from bps_rdma.torch.staging.device import CudaDevice, Device
from bps_rdma.torch.staging.lane import Lane
from bps_rdma.torch.staging.operation import Layout, StagedOperation

_lanes: dict[tuple[job.Job, torch.device, int], Lane] = {}  # by job, device and group
_devices: dict[torch.device, Device] = {}
_MOMENT = 1.0  # seconds; threads that take longer to end are left alone


def device_of(tensor: torch.Tensor) -> Device | None:
    """Where a tensor must be staged from; None: it is in memory that is used where it lies.

    Raises:
        InvalidTensorError: it is neither on the CPU nor on a CUDA device.
    """
    if tensor.is_cpu:
        return None
    if not tensor.is_cuda:
        raise InvalidTensorError(f"the tensor is on {tensor.device}", "move it to the CPU, or to a CUDA device")
    if tensor.device not in _devices:
        _devices[tensor.device] = CudaDevice(tensor.device.index)
    return _devices[tensor.device]


def all_reduce(
    tensor: torch.Tensor, name: str, op: str = "average", priority: int = 0, group: Group | None = None
) -> Handle | StagedOperation:
    """Starts the reduction over all ranks, in place.

    Args:
        tensor: contiguous; dtypes as for bps_rdma.push_pull_inplace(). On a GPU
            it is read once the caller's stream has got to this call.
        name: the same on all ranks; chunks append their number to it.
        op: "sum", "average", "min", "max" or "product".
        priority: higher goes first, of what is on the wire.
        group: who takes part; None: all workers.
    """
    device = device_of(tensor)
    if device is None:
        return bps_rdma.push_pull_async_inplace(tensor.detach(), name=name, priority=priority, group=group, op=op)
    flat = _flat(tensor)

    def send(chunk: torch.Tensor, number: int) -> Handle:
        return bps_rdma.push_pull_async_inplace(chunk, name=f"{name} {number}", priority=priority, group=group, op=op)

    layout = Layout(1, flat.numel(), [(0, flat)], [(0, flat)], flat.dtype)
    return _start(device, layout, send, name, tensor, members_of(group))


def reduce_scatter(
    part: torch.Tensor,
    whole: torch.Tensor,
    name: str,
    op: str = "average",
    priority: int = 0,
    group: Group | None = None,
) -> Handle | StagedOperation:
    """Starts the reduction of `whole` over all ranks, of which this rank gets its part.

    Args:
        part: 1/size of the group of `whole`; may be this rank's part of it.
        whole, name, op, priority, group: as for all_reduce(); `whole` divides by the size of the group.
    """
    device = device_of(whole)
    if device is None:
        return bps_rdma.reduce_scatter_async(
            whole.detach(), name=name, priority=priority, group=group, out=part.detach(), op=op
        )
    members = members_of(group)
    mine = members.ranks.index(bps_rdma.rank())
    rows = _rows(whole, part, members.size)

    def send(chunk: torch.Tensor, number: int) -> Handle:
        own = chunk.view(members.size, -1)[mine]
        return bps_rdma.reduce_scatter_async(
            chunk, name=f"{name} {number}", priority=priority, group=group, out=own, op=op
        )

    layout = Layout(members.size, part.numel(), list(enumerate(rows)), [(mine, _flat(part))], part.dtype)
    return _start(device, layout, send, name, part, members)


def all_gather(
    whole: torch.Tensor, part: torch.Tensor, name: str, priority: int = 0, group: Group | None = None
) -> Handle | StagedOperation:
    """Starts gathering all ranks' parts into `whole`.

    Args:
        whole, part, name, priority, group: as for reduce_scatter().
    """
    device = device_of(whole)
    if device is None:
        return bps_rdma.all_gather_async(part.detach(), name=name, priority=priority, group=group, out=whole.detach())
    members = members_of(group)
    mine = members.ranks.index(bps_rdma.rank())
    rows = _rows(whole, part, members.size)

    def send(chunk: torch.Tensor, number: int) -> Handle:
        own = chunk.view(members.size, -1)[mine]
        return bps_rdma.all_gather_async(own, name=f"{name} {number}", priority=priority, group=group, out=chunk)

    in_place = rows[mine].data_ptr() == part.data_ptr()
    targets = [(number, row) for number, row in enumerate(rows) if not (in_place and number == mine)]
    layout = Layout(members.size, part.numel(), [(mine, _flat(part))], targets, part.dtype)
    return _start(device, layout, send, name, whole, members)


def _start(
    device: Device,
    layout: Layout,
    send: Callable[[torch.Tensor, int], Handle],
    name: str,
    result: torch.Tensor,
    members: Group,
) -> StagedOperation:
    running = job.current()
    key = (running, result.device, members.id)
    lane = _lanes.get(key)
    if lane is None:
        config = running.config
        chunk_bytes = config.integer("BPS_GPU_CHUNK_BYTES")
        lane = Lane(device, members.size, chunk_bytes, config.integer("BPS_GPU_CHUNKS"))
        _lanes[key] = lane
        running.at_end.append(lambda: _lanes.pop(key).stop(_MOMENT))
    patience = running.config.seconds("BPS_TIMEOUT")
    operation = StagedOperation(device, layout, send, name, result, patience, lambda: lane.through)
    lane.start(operation)
    return operation


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_contiguous():
        raise InvalidTensorError(
            f"the tensor of shape {tuple(tensor.shape)} is not contiguous", "pass tensor.contiguous()"
        )
    return tensor.detach().view(-1)


def _rows(whole: torch.Tensor, part: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    if part.numel() * ranks != whole.numel() or part.dtype != whole.dtype:
        raise InvalidTensorError(
            f"a part of {part.numel()} elements of {part.dtype} is not one of {ranks} of {whole.numel()} elements of "
            f"{whole.dtype}",
            "pass a whole that divides by the size of the group, and a part of the same dtype",
        )
    return list(_flat(whole).view(ranks, -1).unbind(0))
