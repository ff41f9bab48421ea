"""Tensors, and nests of tensors and other objects, from the ranks that have them to all others.

Tensors travel as their bytes, whatever their dtype, from the memory and into the memory where they lie. What is not
contiguous or not on the CPU goes through a copy that is.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import bps_rdma
from bps_rdma import Group, job
from bps_rdma.errors import InvalidArgumentError, InvalidTensorError
from bps_rdma.torch.exchange import exchange, members_of

_WINDOW_BYTES = 64 << 20  # received at once by ranks that keep nothing


@dataclass(frozen=True)
class Transfer:
    """One tensor on its way: read on worker rank `root`, overwritten on the others; of the same size on all."""

    name: str
    root: int
    tensor: torch.Tensor


def check_tensor(name: str, tensor: torch.Tensor) -> None:
    """Raises InvalidTensorError when it has no bytes of its own that could be read and written."""
    hint = "leave it out, or pass an ordinary dense tensor"
    if torch.nn.parameter.is_lazy(tensor):
        raise InvalidTensorError(f"{name} has no shape yet", "run the lazy module once before")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise InvalidTensorError(f"{name} is {tensor.layout}, {tensor.dtype}: that is not dense", hint)
    if tensor.device.type == "meta":
        raise InvalidTensorError(f"{name} is on the meta device and has no values", "materialise it first")
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise InvalidTensorError(f"{name} is expanded: several elements share one place", "pass a clone() of it")


def bytes_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor's own memory as a flat uint8 tensor; None where it cannot be used as it is."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    return tensor.detach().view(-1).view(torch.uint8)


def spread_tensors(transfers: Sequence[Transfer], group: Group | None) -> None:
    """Moves all of them, at the same time; every rank of the group gives the same names, sizes and roots."""
    members = members_of(group)
    transfers = [transfer for transfer in transfers if transfer.tensor.numel()] if members.size > 1 else []
    wires = [_wire(transfer) for transfer in transfers]
    known = job.current().tensors
    new = {
        transfer.name: wire
        for transfer, wire in zip(transfers, wires, strict=True)
        if (members.id, transfer.name) not in known
    }
    if new:
        bps_rdma.declare_many(new, group=members)
    handles = [
        bps_rdma.broadcast_async(wire, root=transfer.root, name=transfer.name, group=members)
        for transfer, wire in zip(transfers, wires, strict=True)
    ]
    bps_rdma.wait(handles)
    for transfer, wire in zip(transfers, wires, strict=True):
        if transfer.root == bps_rdma.rank():
            continue
        target = transfer.tensor.detach()
        if wire.data_ptr() == target.data_ptr():
            if not target.is_inference():
                torch.autograd.graph.increment_version(target)  # autograd has not seen it change
        else:
            target.copy_(wire.view(target.dtype).view(target.shape))


def _wire(transfer: Transfer) -> torch.Tensor:
    tensor = transfer.tensor.detach()
    own = bytes_of(tensor)
    if own is not None:
        return own
    if transfer.root == bps_rdma.rank():
        copy = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    else:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    return copy.view(-1).view(torch.uint8)


# ---- Nests: whatever can be pickled, and the tensors in it beside the pickle


class _Pickler(pickle.Pickler):
    """Leaves plain tensors out, and numbers them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[torch.Tensor] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> Any:
        """What stands for a tensor: its number, dtype, shape and kind of device."""
        if type(obj) is not torch.Tensor or obj.layout is not torch.strided or obj.is_quantized:
            return None
        place = self._places.setdefault(id(obj), len(self.tensors))
        if place == len(self.tensors):
            self.tensors.append(obj)
        return place, obj.dtype, tuple(obj.shape), obj.device.type


class _Unpickler(pickle.Unpickler):
    """Puts new tensors in their places, for the values to come; on the meta device when they are not kept."""

    def __init__(self, text: memoryview, *, keep: bool) -> None:
        super().__init__(io.BytesIO(text))
        self.tensors: list[torch.Tensor] = []
        self._keep = keep

    def persistent_load(self, pid: Any) -> Any:
        """The tensor of that number; first ones come in their order."""
        place, dtype, shape, device = pid
        if place == len(self.tensors):
            self.tensors.append(torch.empty(shape, dtype=dtype, device=device if self._keep else "meta"))
        return self.tensors[place]


def spread(
    nest: Any, roots: Sequence[int], name: str, group: Group | None, keepers: Sequence[int] | None = None
) -> dict[int, Any]:
    """The nests of all `roots`, by their worker rank, on every rank of the group; the own one is `nest` itself.

    Args:
        nest: picklable; its tensors are taken where they lie. Ignored on ranks that are not among `roots`.
        name: the same on all ranks.
        keepers: worker ranks that want the result. The others get an empty dict and never hold more than a window.

    Raises:
        InvalidArgumentError: a nest cannot be pickled (on all ranks) or unpickled (on the rank that cannot).
    """
    members = members_of(group)
    own_rank = bps_rdma.rank()
    keep = keepers is None or own_rank in keepers
    own: list[torch.Tensor] = []

    def write(file: io.BytesIO) -> None:
        pickler = _Pickler(file)
        pickler.dump(nest)
        own.extend(pickler.tensors)

    found: dict[int, Any] = {}
    messages = exchange(write if own_rank in roots else None, name, members)
    counted: Counter[int] = Counter()
    transfers: list[Transfer] = []
    for rank, text in zip(members.ranks, messages, strict=True):
        if text is None:
            continue
        if rank == own_rank:
            found[rank], tensors = nest, own
        else:
            found[rank], tensors = _load(text, rank, keep=keep)
        if keepers is not None and set(keepers) <= {rank}:
            continue  # who wants them has them
        for tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            transfers.append(Transfer(f"{name}.{size}.{counted[size]}", rank, tensor))
            counted[size] += 1
    if keepers is None:
        spread_tensors(transfers, members)
        return found
    for window in _windows(transfers):
        spread_tensors([_with_memory(transfer) for transfer in window], members)
    return found if keep else {}


def _load(text: memoryview, rank: int, *, keep: bool) -> tuple[Any, list[torch.Tensor]]:
    unpickler = _Unpickler(text, keep=keep)
    nest = unpickled(unpickler.load, rank)
    return nest, unpickler.tensors


def unpickled(load: Callable[[], Any], rank: int) -> Any:
    """What worker `rank` pickled. Raises InvalidArgumentError."""
    try:
        return load()
    except Exception as error:
        raise InvalidArgumentError(
            f"the object of worker {rank} cannot be unpickled here: {type(error).__name__}: {error}",
            "define its class in a module that every rank can import",
        ) from error


def _with_memory(transfer: Transfer) -> Transfer:
    if transfer.tensor.device.type != "meta":
        return transfer
    return Transfer(transfer.name, transfer.root, torch.empty_like(transfer.tensor, device="cpu"))


def _windows(transfers: Sequence[Transfer]) -> list[list[Transfer]]:
    """Runs of at most _WINDOW_BYTES, or of one tensor."""
    windows: list[list[Transfer]] = []
    room = 0
    for transfer in transfers:
        size = transfer.tensor.numel() * transfer.tensor.element_size()
        if not windows or size > room:
            windows.append([])
            room = _WINDOW_BYTES
        windows[-1].append(transfer)
        room -= size
    return windows
