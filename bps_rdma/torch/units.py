# SPDX-License-Identifier: Apache-2.0
"""The units in which gradients are sent: a Single is one gradient in place, a Bucket several in one block of memory.

In one pass a unit takes in the gradients of its parameters as they become ready (take), is sent (start), is waited for
(wait) and gives the parameters their means over the group (deliver). A parameter may have no gradient on this rank: it
then contributes zeros, and the unit can tell afterwards whether any rank had one. Where GPUs of a host sum first, all
ranks start the units in one order: GradientPass sees to that.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bps_rdma import Group, job
from bps_rdma.agreement import group_of
from bps_rdma.arrays import core_dtype
from bps_rdma.errors import BpsError
from bps_rdma.operations import OperationOptions, ReduceOp
from bps_rdma.operations.options import EXACT, NONE
from bps_rdma.torch import holders, transfer
from bps_rdma.torch.holders import BY_GRAD, held_gradient, is_part, lent, sharers_of
from bps_rdma.torch.transfer import AnyHandle
from bps_rdma.uncompressed import why_not

_ALIGNMENT = 64  # bytes, a cache line: gradients of a bucket are summed by vector instructions
_AVERAGE = ReduceOp.average


@dataclass(frozen=True)
class Sent:
    """The way in which gradients are sent.

    Attributes:
        prefix: of all names; the same on all ranks.
        group: who takes part; None: all workers.
        method: how gradients travel between hosts, or "exact"; None: what BPS_COMPRESSION and BPS_EXACT say.
        smallest: bytes from which on a tensor is compressed.
        keeps_flags: buckets carry a flag for each parameter; not if a method would mix them with gradients.
        in_order: all ranks start in the same order what GPUs of a host may sum first; see transfer.all_reduce().
    """

    prefix: str
    group: Group | None
    method: str | None
    smallest: int = 0
    keeps_flags: bool = True
    in_order: bool = True

    def options(self, name: str, priority: int, dtype: torch.dtype, elements: int) -> OperationOptions:
        """The options of the operation that averages a tensor of this name."""
        method = self.method
        if method not in (None, EXACT, NONE):
            kind = core_dtype(dtype)
            reason = why_not(kind, elements, self.smallest)
            if reason is not None:
                running = job.current()
                number = group_of(running, self.group).id
                running.note_uncompressed(reason, number, name, method, kind, elements)
                method = NONE
        return OperationOptions(_AVERAGE, name, priority, self.group, compression=method)


@dataclass(eq=False)
class IndexedParameter:
    """One parameter that is trained.

    Attributes:
        index: position in the order of registration, which is about the order in which forward needs them.
        strides: those of its gradient in a bucket, the same on all ranks; None: it is contiguous there.
        belongs: the script has not removed it from what is trained.
    """

    index: int
    name: str
    parameter: torch.nn.Parameter
    strides: tuple[int, ...] | None = None
    belongs: bool = True

    @property
    def is_trained(self) -> bool:
        """Whether it is to get a gradient."""
        return self.belongs and self.parameter.requires_grad


def _changed(*entries: IndexedParameter) -> BpsError:
    names = ", ".join(repr(entry.name) for entry in entries)
    return BpsError(
        f"{'the gradient' if len(entries) == 1 else 'a gradient'} of {names} was changed while it was being averaged",
        "use gradients when backward() has returned, not in a hook; and wrap the model or its optimizer, not both",
    )


class Single:
    """One parameter's gradient, synchronised in place: copied only if it has holes or is a part of a buffer."""

    def __init__(self, entry: IndexedParameter, sent: Sent) -> None:
        self.entries = [entry]
        self.name = f"{sent.prefix}.{entry.name}"
        self.priority = -entry.index
        parameter = entry.parameter
        self._options = sent.options(self.name, self.priority, *as_real_numbers(parameter.dtype, parameter.numel()))
        self._in_order = sent.in_order
        self._handle: AnyHandle | None = None
        self._gradient: torch.Tensor | None = None
        self._wire: torch.Tensor | None = None
        self._sent: torch.Tensor | None = None  # the .grad that was sent ...
        self._version: int | None = None  # ... in this version, where that says whether anyone has changed it since
        self._kept: torch.Tensor | None = None  # what was in _wire when backward failed

    @property
    def places(self) -> dict[IndexedParameter, tuple[int, int]]:
        """Where gradients lie in what is sent: elements [begin, end)."""
        return {one: (0, as_real_numbers(one.parameter.dtype, one.parameter.numel())[1]) for one in self.entries}

    def declaration(self) -> tuple[str, torch.Tensor, str | None]:
        """(name, a tensor like the one that will be sent, its compression)."""
        parameter = self.entries[0].parameter
        like = torch.empty_like(parameter.detach(), memory_format=torch.contiguous_format)
        return self.name, as_real(like), self._options.compression

    def begin(self, arrives: IndexedParameter | None) -> None:
        """A pass begins. The gradient of the last one belongs to whoever has kept it."""

    def take(self, entry: IndexedParameter) -> None:
        """Takes the gradient of a parameter, which is complete."""

    def start(self) -> None:
        """Sends the gradient; zeros where there is none."""
        parameter = self.entries[0].parameter
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
        wire = gradient.resolve_conj().contiguous()
        self._sent = parameter.grad
        shares = self._sent is not None and is_part(self._sent)
        if shares and wire is gradient:  # a hook that changes it now must not change the mean on this rank alone
            wire = gradient.clone()
        self._handle, self._gradient, self._wire, self._kept = None, gradient, wire, None
        # Views share a version with their base, and with gradients that are still computed.
        self._version = None if self._sent is None or shares else gradient._version
        data = as_real(wire.data)  # the mean is no change that counts
        self._handle = transfer.all_reduce(data, self._options, in_order=self._in_order)

    def keep(self) -> None:
        """Backward has failed: keeps the mean, which may be there already, also where the script zeroes gradients."""
        if self._handle is None or self._wire is None or self._gradient is None or self._wire.device.type != "cpu":
            return
        if self._kept is None and self._version in (None, self._gradient._version):
            self._kept = self._wire.clone()

    def wait(self) -> None:
        """Waits for the mean; also once more, as a signal handler may raise something when it is there."""
        if self._handle is None:
            if self._wire is not None:
                raise BpsError(f"{self.name!r} was interrupted when it had been sent", "repeat the step")
            return
        if self._kept is not None and self._wire is not None and self._gradient is not None:
            self._wire.copy_(self._kept)
            self._kept = None
            self._version = None if self._version is None else self._gradient._version
        if not self._handle.taken:
            self._handle.wait()
        assert self._gradient is not None
        assert self._wire is not None
        if self._version is not None and self._gradient._version != self._version:
            raise _changed(*self.entries)
        if self._wire is not self._gradient:
            self._gradient.copy_(self._wire)
        self._handle = self._wire = None

    def deliver(self, *, restores: bool = False) -> None:
        """Makes the mean the parameter's .grad.

        Args:
            restores: also where the script has zeroed or dropped that.
        """
        parameter, sent, gradient = self.entries[0].parameter, self._sent, self.release()
        if restores and parameter.grad is None:
            parameter.grad = sent = gradient
        if parameter.grad is not sent or not _is_where(sent, gradient):
            raise _changed(*self.entries)
        if sent is None:
            parameter.grad = gradient

    def release(self) -> torch.Tensor | None:
        """The mean, which this object then no longer holds."""
        gradient, self._gradient, self._sent = self._gradient, None, None
        return gradient

    def unused_everywhere(self) -> list[IndexedParameter]:
        """Parameters for which no rank had a gradient: not known here, see GradientSynchronizer."""
        return []

    def close(self) -> None:
        """Does nothing: nothing is kept from pass to pass."""


class Bucket:
    """Gradients of one dtype in one block of memory; on the CPU all processes of the host can map it.

    Behind the gradients stands one element per parameter, unless they are compressed: 1 where this rank has a gradient.
    Averaged like the rest, it tells for the parameters without one whether another rank has.

    Means become gradients without a copy: a .grad is a part of the bucket. Two kinds of gradients are not:
    - one that was there before, and that somebody holds, as a script that has made it a part of a buffer, or one with a
      graph (create_graph=True): the mean is copied to it;
    - those of a bucket of which somebody has kept a gradient after zero_grad(). What was kept stays as it is: the
      bucket goes on in other memory, and copies all means from then on.
    """

    def __init__(self, number: str, entries: Sequence[IndexedParameter], sent: Sent) -> None:
        self.entries = list(entries)
        self.name = f"{sent.prefix}.bucket {number}"
        self.priority = -min(entry.index for entry in entries)
        first = entries[0].parameter
        dtype, factor = as_real_numbers(first.dtype, 1)
        offsets, count = _layout([entry.parameter.numel() * factor for entry in entries], dtype)
        self._offsets = dict(zip(self.entries, offsets, strict=True))
        self._device = transfer.device_of(first)
        self._written: dict[Any, Any] = {}  # on a device: stream that filled a part -> event: it has
        self._zeroed: Any = None  # on a device: an event: memory that was made in this pass can be filled
        # A code of many elements, as int8's of a block, may write to the gaps between gradients as well.
        self._gaps = None if sent.keeps_flags else self._gaps_of(factor, count).to(first.device)
        flags = len(entries) if sent.keeps_flags else 0
        self._options = sent.options(self.name, self.priority, dtype, count + flags)
        self._use(transfer.zeros_beside(first, count + flags, dtype), count)
        self._missing: list[IndexedParameter] = []
        self._lends = holders.CAN_TELL  # gradients are parts of the bucket
        self._theirs: dict[IndexedParameter, tuple[torch.Tensor, int | None]] = {}  # those that are not
        self._version = 0  # the version of the memory as it was sent
        self._kept: torch.Tensor | None = None  # what was in it when backward failed
        self._in_order = sent.in_order
        self._handle: AnyHandle | None = None

    def _use(self, memory: torch.Tensor, count: int) -> None:
        """The gradients lie in the first `count` elements of this memory, and the flags behind them."""
        self._memory, self._flags = memory, memory[count:]
        self._views = {entry: _view(memory, entry, offset) for entry, offset in self._offsets.items()}
        self._addresses = {entry: view.data_ptr() for entry, view in self._views.items()}
        self._references = [sys.getrefcount(view) for view in self._views.values()]
        self._sharers = sharers_of(memory) if holders.CAN_TELL else 0

    def _gaps_of(self, factor: int, count: int) -> torch.Tensor:
        """The places in the first `count` elements that belong to no gradient."""
        free = torch.ones(count, dtype=torch.bool, device="cpu")
        for entry, offset in self._offsets.items():
            free[offset : offset + entry.parameter.numel() * factor] = False
        return free.nonzero().view(-1)

    def lay_out(self) -> None:
        """Takes the strides of its entries anew, before any gradient lies here."""
        self._use(self._memory, len(self._memory) - len(self._flags))

    def _view_of(self, entry: IndexedParameter) -> torch.Tensor:
        """The place of a gradient, also after `.grad.data = ...` has given the tensor there other memory."""
        view = self._views[entry]
        if view.data_ptr() != self._addresses[entry]:
            view = self._views[entry] = _view(self._memory, entry, self._offsets[entry])
        return view

    def begin(self, arrives: IndexedParameter | None) -> None:
        """A pass begins. What somebody has kept of the last one must not become a part of this one.

        Args:
            arrives: the parameter whose gradient begins it.
        """
        self._theirs.clear()
        if self._lends and self._is_kept():
            first, count = self.entries[0].parameter, len(self._memory) - len(self._flags)
            self._use(transfer.zeros_beside(first, len(self._memory), self._memory.dtype), count)
            self._lends = False
            if self._device is not None:
                self._zeroed = self._device.record(self._device.current())
        if self._lends:
            for entry, view in self._views.items():
                parameter = entry.parameter
                if parameter.grad is None or (parameter.grad is view and view.data_ptr() == self._addresses[entry]):
                    continue
                theirs = held_gradient(parameter, arrives=entry is arrives)
                if theirs is not None:
                    self._theirs[entry] = theirs, None

    def _is_shared(self) -> bool:
        """Whether anything but its views has this memory. One to which `.grad.data = ...` gave other has left it."""
        left = sum(view.data_ptr() != self._addresses[entry] for entry, view in self._views.items())
        return sharers_of(self._memory) != self._sharers - left

    def _is_kept(self) -> bool:
        if self._is_shared():
            return True
        found = [sys.getrefcount(view) for view in self._views.values()]
        return found != self._references and any(
            number > own and entry.parameter.grad is not view
            for (entry, view), number, own in zip(self._views.items(), found, self._references, strict=True)
        )

    @property
    def places(self) -> dict[IndexedParameter, tuple[int, int]]:
        """Where gradients lie in what is sent: elements [begin, end)."""
        sizes = {one: as_real_numbers(one.parameter.dtype, one.parameter.numel())[1] for one in self.entries}
        return {one: (begin, begin + sizes[one]) for one, begin in self._offsets.items()}

    def declaration(self) -> tuple[str, torch.Tensor, str | None]:
        """(name, the memory that will be sent, its compression)."""
        return self.name, self._memory, self._options.compression

    def take(self, entry: IndexedParameter) -> None:
        """Takes the gradient of a parameter, which is complete: from now on it is in the bucket, or in _theirs."""
        gradient, view = entry.parameter.grad, self._view_of(entry)
        if self._zeroed is not None and self._device is not None:
            self._device.order(self._device.current(), self._zeroed)
        if gradient is not None and gradient is not view:
            is_held = entry in self._theirs and self._theirs[entry][0] is gradient
            if self._lends and not is_held and not gradient.requires_grad:  # its graph is nowhere else
                self._theirs.pop(entry, None)
                view.copy_(gradient.detach())
                entry.parameter.grad = view
            else:
                self._theirs[entry] = gradient, None
        if self._device is not None:  # backward may compute in several streams
            stream = self._device.current()
            self._written[stream] = self._device.record(stream)

    def start(self) -> None:
        """Sends the bucket, with zeros for parameters without a gradient."""
        if self._device is not None:
            stream = self._device.current()
            for event in self._written.values():
                self._device.order(stream, event)
            self._written.clear()
            if self._zeroed is not None:
                self._device.order(stream, self._zeroed)
                self._zeroed = None
        for entry, (gradient, _) in self._theirs.items():  # only now: hooks may have changed them
            self._view_of(entry).copy_(gradient.detach())
            # Those in a buffer share their version, with gradients that are still computed.
            self._theirs[entry] = gradient, None if is_part(gradient) else gradient._version
        if self._gaps is not None:
            self._memory.index_fill_(0, self._gaps, 0)
        self._flags.fill_(1)
        self._missing = [entry for entry in self.entries if entry.parameter.grad is None]
        for entry in self._missing:
            self._view_of(entry).zero_()
            if len(self._flags) > 0:
                self._flags[self.entries.index(entry)] = 0
        self._version, self._kept = self._memory._version, None
        data = self._memory.data  # the means are no change that counts
        self._handle = transfer.all_reduce(data, self._options, in_order=self._in_order)

    def keep(self) -> None:
        """Backward has failed: keeps the means, which may be there already, also where the script zeroes gradients."""
        if self._handle is None or self._memory.device.type != "cpu":
            return
        if self._kept is None and self._version == self._memory._version:
            self._kept = self._memory.clone()

    def wait(self) -> None:
        """Waits for the means."""
        assert self._handle is not None
        if self._kept is not None:
            self._memory.copy_(self._kept)
            self._kept, self._version = None, self._memory._version
        self._handle.wait()
        self._handle = None
        if self._memory._version != self._version:
            raise _changed(*self.entries)

    def deliver(self, *, restores: bool = False) -> None:
        """Makes the means the .grad of the parameters.

        Args:
            restores: also where the script has zeroed or dropped that.
        """
        for entry, view in self._views.items():
            parameter = entry.parameter
            theirs, version = self._theirs.get(entry, (view, None))
            if parameter.grad is theirs and (restores or version is None or theirs._version == version):
                if theirs is not view:
                    theirs.detach().copy_(view)
                    continue
                if view.data_ptr() == self._addresses[entry]:
                    continue
            if parameter.grad is not None or not (restores or entry in self._missing):
                raise _changed(entry)
            parameter.grad = view if self._lends else view.clone()
        self._theirs.clear()

    def unused_everywhere(self) -> list[IndexedParameter]:
        """Parameters for which no rank had a gradient in the last pass."""
        if not self._missing or len(self._flags) == 0:
            return []
        used = self._flags.tolist()
        return [entry for entry in self._missing if used[self.entries.index(entry)] == 0]

    def close(self) -> None:
        """Gives gradients that nobody holds memory of their own: that of the bucket is then freed."""
        if not self._lends or self._is_shared():
            return
        found = [sys.getrefcount(view) for view in self._views.values()]
        for (entry, view), number, own in zip(self._views.items(), found, self._references, strict=True):
            if entry.parameter.grad is view and number <= own + BY_GRAD:
                entry.parameter.grad = view.clone()


Unit = Single | Bucket


def _is_where(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two tensors are the same memory, if both are there."""
    return one is None or other is None or one.data_ptr() == other.data_ptr()


def as_real_numbers(dtype: torch.dtype, elements: int) -> tuple[torch.dtype, int]:
    """The dtype and the number in which elements are summed: a complex one is two real ones."""
    return (dtype.to_real(), 2 * elements) if dtype.is_complex else (dtype, elements)


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, in numbers that servers sum."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _layout(sizes: Sequence[int], dtype: torch.dtype) -> tuple[list[int], int]:
    """(where each starts, where all end), in elements."""
    step = max(_ALIGNMENT // dtype.itemsize, 1)
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += math.ceil(size / step) * step
    return offsets, end


def strides_of(parameter: torch.Tensor) -> tuple[int, ...] | None:
    """The strides of a parameter that lies without holes in another order than a contiguous one; otherwise None.

    Optimizers are faster with gradients that have the strides of their parameter.
    """
    if parameter.is_contiguous():
        return None
    order = sorted(range(parameter.dim()), key=lambda d: (parameter.stride(d), parameter.size(d)))
    expected = 1
    for dimension in order:
        if parameter.size(dimension) != 1 and parameter.stride(dimension) != expected:
            return None
        expected *= parameter.size(dimension)
    return tuple(parameter.stride())


def _view(memory: torch.Tensor, entry: IndexedParameter, offset: int) -> torch.Tensor:
    """The place of a gradient."""
    parameter = entry.parameter
    if parameter.is_complex():
        memory, offset = torch.view_as_complex(memory[: len(memory) // 2 * 2].view(-1, 2)), offset // 2
    flat = memory[offset : offset + parameter.numel()]
    if entry.strides is None:
        return lent(flat.view(parameter.shape))
    return lent(flat.as_strided(parameter.size(), entry.strides, flat.storage_offset()))
