# SPDX-License-Identifier: Apache-2.0
"""Broadcasts tensors, and objects with tensors in them, from the ranks that have them to all others.

Tensors of any dtype are sent as bytes: in place where they are contiguous, otherwise through a copy.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

import bps_rdma
from bps_rdma import Group, job
from bps_rdma.errors import InvalidArgumentError, InvalidTensorError
from bps_rdma.operations import OperationOptions
from bps_rdma.torch import transfer
from bps_rdma.torch.check_alike import all_gather_bytes, place_of
from bps_rdma.torch.encoding import Encoder, decode
from bps_rdma.torch.transfer import AnyHandle, members_of
from bps_rdma.torch.transfer.flat_bytes import flat_bytes

T = TypeVar("T")
_WINDOW_BYTES = 64 << 20  # received at once by ranks that do not keep the result


@dataclass(frozen=True)
class Transfer:
    """One tensor to broadcast: read on worker rank `root`, overwritten on the others; of the same size on all."""

    name: str
    root: int
    tensor: torch.Tensor


def check_tensor(name: str, tensor: torch.Tensor) -> None:
    """Checks that a tensor has memory of its own that can be read and written.

    Raises:
        InvalidTensorError: it is sparse, quantised, expanded, lazy or on the meta device.
    """
    hint = "leave it out, or pass an ordinary dense tensor"
    if torch.nn.parameter.is_lazy(tensor):
        raise InvalidTensorError(f"{name} has no shape yet", "run the lazy module once first")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise InvalidTensorError(f"{name} is not dense: its layout is {tensor.layout}, its dtype {tensor.dtype}", hint)
    if tensor.device.type == "meta":
        raise InvalidTensorError(f"{name} is on the meta device and has no values", "materialise it first")
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise InvalidTensorError(
            f"{name} is expanded: several of its elements share one address", "pass a clone() of it"
        )


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes of its elements."""
    return tensor.numel() * tensor.element_size()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor's own memory as a flat uint8 tensor; None where it is not contiguous, or lazily conjugated."""
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    return flat_bytes(tensor)


def broadcast_tensors(
    transfers: Sequence[Transfer], group: Group | None, *, staged: bool = True, in_order: bool = False
) -> None:
    """Broadcasts all of them at the same time; every rank of the group gives the same names, sizes and roots.

    Args:
        transfers: tensors of any dtype and device.
        group: who takes part; None: all workers.
        staged: corresponding tensors lie on devices of the same kind on all ranks, so that they can be staged from
            there; False: those on a device are sent through a copy in CPU memory. The same on all ranks.
        in_order: see transfer.all_reduce().
    """
    members = members_of(group)
    transfers = [each for each in transfers if each.tensor.numel()] if members.size > 1 else []
    wires = [_Wire(each, staged=staged) for each in transfers]
    known = job.current().tensors
    for kept_on_cpu in (True, False):
        new = {
            each.name: wire.data
            for each, wire in zip(transfers, wires, strict=True)
            if wire.on_cpu == kept_on_cpu and (members.id, each.name) not in known
        }
        if new:
            (bps_rdma.declare_many if kept_on_cpu else transfer.declare_many)(new, group=members)
    handles = [wire.start(each, members, in_order=in_order) for each, wire in zip(transfers, wires, strict=True)]
    bps_rdma.wait(handles)
    for each, wire in zip(transfers, wires, strict=True):
        if each.root != bps_rdma.rank():
            wire.deliver(each.tensor.detach())


class _Wire:
    """The bytes of a tensor that are sent, or received."""

    def __init__(self, each: Transfer, *, staged: bool) -> None:
        tensor = each.tensor.detach()
        self.on_cpu = not staged or place_of(tensor) != "staged"
        own = bytes_of(tensor) if not self.on_cpu or tensor.is_cpu else None
        self._in_place = own is not None
        if own is None:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu" if self.on_cpu else tensor.device)
            if each.root == bps_rdma.rank():
                copy.copy_(tensor)
            own = flat_bytes(copy)
        self.data: torch.Tensor = own

    def start(self, each: Transfer, members: Group, *, in_order: bool) -> AnyHandle:
        if self.on_cpu:
            return bps_rdma.broadcast_async(self.data, root=each.root, name=each.name, group=members)
        options = OperationOptions(name=each.name, group=members)
        return transfer.broadcast(self.data, each.root, options, in_order=in_order)

    def deliver(self, target: torch.Tensor) -> None:
        """Brings what has been received into the tensor."""
        if not self._in_place:
            target.copy_(self.data.view(target.dtype).view(target.shape))
        elif not target.is_inference():
            torch.autograd.graph.increment_version(target)  # autograd has not seen it change


# ---- Objects: encoded, with the values of the tensors in them sent beside


def broadcast_objects(
    nest: Any,
    roots: Sequence[int],
    name: str,
    group: Group | None,
    keepers: Sequence[int] | None = None,
    *,
    allow_pickle: bool = False,
) -> dict[int, Any]:
    """The objects of all `roots`, by their worker rank, on every rank of the group; the own one is `nest` itself.

    Args:
        nest: what encoding.py knows, with tensors at any depth, which are read in place. Ignored on ranks that are not
            roots.
        roots: worker ranks that have an object.
        name: the same on all ranks.
        group: who takes part; None: all workers.
        keepers: worker ranks that need the result. The others get an empty dict and never hold more than a window.
        allow_pickle: see check_pickle(); the same on all ranks.

    Raises:
        InvalidArgumentError: an object cannot be encoded (raised on all ranks) or read (raised on that rank).
    """
    members = members_of(group)
    own_rank = bps_rdma.rank()
    keep = keepers is None or own_rank in keepers
    own: list[torch.Tensor] = []

    def write(file: io.BytesIO) -> None:
        encoder = Encoder(tensors_beside=True, allow_pickle=allow_pickle)
        encoder.write(nest, file)
        own.extend(encoder.tensors)

    found: dict[int, Any] = {}
    messages = all_gather_bytes(write if own_rank in roots else None, name, members)
    counted: Counter[int] = Counter()
    transfers: list[Transfer] = []
    for rank, text in zip(members.ranks, messages, strict=True):
        if text is None:
            continue
        if rank == own_rank:
            found[rank], tensors = nest, own
        else:
            found[rank], tensors = _load(text, rank, keep=keep, allow_pickle=allow_pickle)
        if keepers is not None and set(keepers) <= {rank}:
            continue  # the only rank that needs them has them
        for tensor in tensors:
            size = nbytes(tensor)
            transfers.append(Transfer(f"{name}.{size}.{counted[size]}", rank, tensor))
            counted[size] += 1
    if keepers is None:
        broadcast_tensors(transfers, members)  # receivers have made theirs on the same kind of device
        return found
    for window in windows(transfers, lambda each: each.tensor):
        broadcast_tensors([_with_memory(each) for each in window], members, staged=False)
    return found if keep else {}


def _load(text: memoryview, rank: int, *, keep: bool, allow_pickle: bool) -> tuple[Any, list[torch.Tensor]]:
    tensors: list[torch.Tensor] = []

    def make(place: int, dtype: torch.dtype, shape: tuple[int, ...], device: str) -> torch.Tensor:
        if place == len(tensors):  # numbers occur in ascending order at first
            tensors.append(torch.empty(shape, dtype=dtype, device=device if keep else "meta"))
        return tensors[place]

    return decode(text, rank, make, allow_pickle=allow_pickle), tensors


def check_pickle(*, allow_pickle: bool) -> None:
    """Checks that objects may be pickled in this job.

    Raises:
        InvalidArgumentError: they may not, because everybody can join a job without a secret.
    """
    if allow_pickle and not job.current().process.is_authenticated:
        raise InvalidArgumentError(
            "allow_pickle is refused in a job without a secret (BPS_INSECURE=1): everybody could run code here",
            "set BPS_SECRET or BPS_SECRET_FILE on all hosts",
        )


def _with_memory(each: Transfer) -> Transfer:
    if each.tensor.device.type != "meta":
        return each
    return Transfer(each.name, each.root, torch.empty_like(each.tensor, device="cpu"))


def windows(items: Sequence[T], tensor_of: Callable[[T], torch.Tensor]) -> Iterator[list[T]]:
    """Runs of items whose tensors have at most _WINDOW_BYTES, or of one item."""
    window: list[T] = []
    room = _WINDOW_BYTES
    for each in items:
        size = nbytes(tensor_of(each))
        if window and size > room:
            yield window
            window, room = [], _WINDOW_BYTES
        window.append(each)
        room -= size
    if window:
        yield window
