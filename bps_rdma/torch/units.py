"""What gradients travel in: a Single is one gradient where it lies, a Bucket several in one block of shared memory.

In one pass a unit takes in the gradients of its parameters as they arrive (take), is sent off (start), is waited for
(wait) and gives the parameters their means over the group (deliver). A parameter may have no gradient on this rank: it
then contributes zeros, and the unit can tell afterwards whether any rank had one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

import bps_rdma
from bps_rdma import Group, Handle
from bps_rdma.torch.compression import Compressor

_ALIGNMENT = 64  # bytes, a cache line: gradients of a bucket are summed by vector instructions


@dataclass(frozen=True)
class Sent:
    """How gradients are sent.

    Attributes:
        prefix: in front of names; the same on all ranks.
        group: who takes part; None: all workers.
        compressor: what travels instead of a gradient.
    """

    prefix: str
    group: Group | None
    compressor: Compressor


@dataclass(frozen=True, eq=False)
class Place:
    """One parameter that is trained.

    Attributes:
        index: position in the order of registration, which is about the order in which forward needs them.
    """

    index: int
    name: str
    parameter: torch.nn.Parameter


class Single:
    """One parameter's gradient, synchronised where it lies: nothing is copied, unless it is compressed."""

    def __init__(self, place: Place, sent: Sent) -> None:
        self.places = [place]
        self.name = f"{sent.prefix}.{place.name}"
        self.priority = -place.index
        self._sent = sent
        self._handle: Handle | None = None
        self._gradient: torch.Tensor | None = None
        self._wire: torch.Tensor | None = None

    def declaration(self) -> tuple[str, torch.Tensor]:
        """(name, a tensor like the one that will travel)."""
        parameter = self.places[0].parameter
        wire = self._sent.compressor.wire_dtype(parameter.dtype)
        return self.name, torch.empty_like(parameter, dtype=wire, memory_format=torch.contiguous_format)

    def take(self, place: Place) -> None:
        """The gradient of this parameter is complete."""

    def start(self) -> None:
        """Sends the gradient off; zeros where there is none."""
        parameter = self.places[0].parameter
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
        wire = gradient.to(self._sent.compressor.wire_dtype(gradient.dtype)).contiguous()
        self._gradient, self._wire = gradient, wire
        self._handle = bps_rdma.push_pull_async_inplace(
            wire, True, self.name, priority=self.priority, group=self._sent.group
        )

    def wait(self) -> None:
        """Waits for the mean."""
        handle, self._handle = self._handle, None
        assert handle is not None
        handle.wait()
        assert self._gradient is not None
        assert self._wire is not None
        if self._wire is not self._gradient:
            self._gradient.copy_(self._wire)
        self._wire = None

    def deliver(self) -> None:
        """Makes the mean the parameter's .grad."""
        gradient = self.release()
        if self.places[0].parameter.grad is None:
            self.places[0].parameter.grad = gradient

    def release(self) -> torch.Tensor | None:
        """The mean, which is then no longer held here."""
        gradient, self._gradient = self._gradient, None
        return gradient

    def unused_everywhere(self) -> list[Place]:
        """Parameters for which no rank had a gradient: cannot be told here, see GradientSynchronizer."""
        return []

    def close(self) -> None:
        """Nothing is kept from pass to pass."""


class Bucket:
    """Gradients of one dtype in one block of memory that all processes of the host map.

    Behind the gradients stands one element per parameter: 1 where this rank has a gradient. Averaged like the rest, it
    tells for the parameters without one whether another rank has.
    """

    def __init__(self, number: str, places: Sequence[Place], sent: Sent) -> None:
        self.places = list(places)
        self.name = f"{sent.prefix}.bucket {number}"
        self.priority = -min(place.index for place in places)
        self._group = sent.group
        dtype = places[0].parameter.dtype
        wire = sent.compressor.wire_dtype(dtype)
        self._points_into = wire == dtype
        offsets, count = _layout([place.parameter for place in places], wire)
        self._memory = shared_tensor(count + len(places), wire)
        self._flags = self._memory[count:]
        self._views = {
            place: _view(self._memory, place.parameter, offset) for place, offset in zip(places, offsets, strict=True)
        }
        self._missing: list[Place] = []
        self._handle: Handle | None = None

    def declaration(self) -> tuple[str, torch.Tensor]:
        """(name, the memory that will travel)."""
        return self.name, self._memory

    def take(self, place: Place) -> None:
        """The gradient of this parameter is complete: from now on it is in the bucket."""
        gradient, view = place.parameter.grad, self._views[place]
        if gradient is not None and gradient is not view:
            view.copy_(gradient.detach())
            if self._points_into:
                place.parameter.grad = view

    def start(self) -> None:
        """Sends the bucket off, with zeros for parameters without a gradient."""
        self._flags.fill_(1)
        self._missing = [place for place in self.places if place.parameter.grad is None]
        for place in self._missing:
            self._views[place].zero_()
            self._flags[self.places.index(place)] = 0
        self._handle = bps_rdma.push_pull_async_inplace(
            self._memory, True, self.name, priority=self.priority, group=self._group
        )

    def wait(self) -> None:
        """Waits for the means."""
        handle, self._handle = self._handle, None
        assert handle is not None
        handle.wait()

    def deliver(self) -> None:
        """Makes the means the .grad of the parameters."""
        for place, view in self._views.items():
            parameter = place.parameter
            if self._points_into:
                parameter.grad = view
            elif parameter.grad is None:
                parameter.grad = view.to(parameter.dtype)
            else:
                parameter.grad.detach().copy_(view)

    def unused_everywhere(self) -> list[Place]:
        """Parameters for which no rank had a gradient in the last pass."""
        if not self._missing:
            return []
        used = self._flags.tolist()
        return [place for place in self._missing if used[self.places.index(place)] == 0]

    def close(self) -> None:
        """Gives gradients that live here memory of their own: the bucket is about to go."""
        for place, view in self._views.items():
            if place.parameter.grad is view:
                place.parameter.grad = view.clone()


Unit = Single | Bucket


def shared_tensor(count: int, dtype: torch.dtype) -> torch.Tensor:
    """A zeroed flat tensor in memory that the other processes of the host can map."""
    memory = bps_rdma.empty(max(count, 1) * dtype.itemsize, "uint8")
    return torch.from_numpy(memory).view(dtype)[:count]


def _layout(parameters: Sequence[torch.Tensor], dtype: torch.dtype) -> tuple[list[int], int]:
    """(where each starts, where all end), in elements."""
    step = max(_ALIGNMENT // dtype.itemsize, 1)
    offsets, end = [], 0
    for parameter in parameters:
        offsets.append(end)
        end += math.ceil(parameter.numel() / step) * step
    return offsets, end


def _view(memory: torch.Tensor, parameter: torch.Tensor, offset: int) -> torch.Tensor:
    """The place of a gradient, with its parameter's strides where those leave no holes: optimizers are faster then."""
    flat = memory[offset : offset + parameter.numel()]
    if parameter.is_contiguous():
        return flat.view(parameter.shape)
    order = sorted(range(parameter.dim()), key=lambda d: (parameter.stride(d), parameter.size(d)))
    expected = 1
    for dimension in order:
        if parameter.size(dimension) != 1 and parameter.stride(dimension) != expected:
            return flat.view(parameter.shape)
        expected *= parameter.size(dimension)
    strided: torch.Tensor = flat.as_strided(parameter.size(), parameter.stride(), flat.storage_offset())
    return strided
