# SPDX-License-Identifier: Apache-2.0
"""Gradients of several backward passes that are added on a rank, and then over the ranks, without rounding.

autograd adds the gradients of several passes in the dtype of the parameter, and rounds each time. Where sums are exact,
an Accumulation takes part in that: it sees the gradient of each pass by itself, and keeps the unrounded sum beside
.grad, which shows the rounded one as always. Instead of .grad, an UnroundedUnit sends these sums.

A program that changes .grad between two passes means the value that it leaves there: the sum begins again from that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from bps_rdma import _core, arrays
from bps_rdma.exact import UnroundedSums
from bps_rdma.torch import transfer
from bps_rdma.torch.holders import is_part
from bps_rdma.torch.units import Bucket, IndexedParameter, Sent, Unit


class Accumulation:
    """The unrounded sum of one parameter's gradients on this rank: 8 bytes per element, from the first use on.

    Args:
        entry: the parameter.
    """

    def __init__(self, entry: IndexedParameter) -> None:
        self._parameter = entry.parameter
        self._sum: _core.ExactAccumulator | None = None
        self._grad: torch.Tensor | None = None  # the .grad that shows the sum, while it is this one ...
        self._version = 0  # ... and in this version ...
        self._copy: torch.Tensor | None = None  # ... or has these values, where it shares its version with others
        self._aside: torch.Tensor | None = None
        # This node adds to .grad. It lives as long as it is referenced, and a parameter does not hold it.
        trains = entry.parameter.requires_grad
        self._shape = entry.parameter.shape
        self._node: Any = torch.autograd.graph.get_gradient_edge(entry.parameter.requires_grad_(True)).node
        entry.parameter.requires_grad_(trains)
        self.hook = self._node.register_prehook(self._before)

    def _before(self, _: Any) -> None:
        """Puts .grad aside before autograd adds to it, so that autograd finds nothing there."""
        self._aside, self._parameter.grad = self._parameter.grad, None

    def after(self, accumulates: bool) -> None:
        """Takes the gradient of a pass, which autograd has written to .grad, and makes .grad what it would have been.

        Args:
            accumulates: more passes follow before gradients are sent. After one that did, the next one always does.
        """
        before, self._aside = self._aside, None
        own = self._parameter.grad
        if own is None or own.layout is not torch.strided:
            self._parameter.grad = own if before is None else before if own is None else before + own
            return
        is_ours = self._shows(before)
        counts = accumulates or is_ours
        if counts:
            if not is_ours:
                self._begin(before)
            self._add(own)
        if before is None:
            shown = own
        else:
            shown = before
            shown.detach().add_(own.detach())
        self._parameter.grad = shown
        if counts:
            self._grad, self._version = shown, shown._version
            self._copy = shown.detach().clone() if is_part(shown) else None

    def lets_go(self) -> bool:
        """Lets go of the node, which would refuse the gradient, if the parameter has another shape; returns if so."""
        if self._parameter.shape == self._shape:
            return False
        self.hook.remove()
        self._node = None
        return True

    def take_over(self, before: Accumulation) -> None:
        """Goes on with the sum of another one for the same parameter."""
        if before.pending and before._grad is not None and before._grad.dtype == self._parameter.dtype:
            self._sum, self._grad, self._version, self._copy = before._sum, before._grad, before._version, before._copy

    @property
    def added_to(self) -> torch.Tensor | None:
        """What .grad was when the gradient of this pass came: until after()."""
        return self._aside

    @property
    def pending(self) -> bool:
        """True if there is an unrounded sum of what .grad shows."""
        return self._shows(self._parameter.grad)

    def settle(self) -> _core.ExactAccumulator:
        """The sum of what is to be sent: if there is none of what .grad shows now, .grad itself."""
        grad = self._parameter.grad
        if not self._shows(grad):
            self._begin(grad)
        self._grad = None
        assert self._sum is not None
        return self._sum

    def _shows(self, grad: torch.Tensor | None) -> bool:
        if grad is None or grad is not self._grad:
            return False
        return grad._version == self._version if self._copy is None else torch.equal(grad, self._copy)

    def _begin(self, grad: torch.Tensor | None) -> None:
        if self._sum is None:
            dtype = arrays.core_dtype(self._parameter.dtype)
            self._sum = _core.ExactAccumulator(dtype, self._parameter.numel())
        else:
            self._sum.clear()
        if grad is not None:
            self._add(grad)

    def _add(self, grad: torch.Tensor) -> None:
        assert self._sum is not None
        self._sum.add(arrays.describe(grad.detach().to("cpu", self._parameter.dtype).contiguous(), False))


class UnroundedUnit:
    """A unit (units.py) that sends the unrounded sums of another one's parameters, as float64.

    Behind the sums of a bucket's parameters stands one element for each: 1 where this rank has a gradient.
    """

    def __init__(self, unit: Unit, accumulations: dict[IndexedParameter, Accumulation], sent: Sent) -> None:
        self.entries = list(unit.entries)
        self.priority = unit.priority
        self._name = f"{unit.name}.unrounded"
        self._accumulations = [accumulations[entry] for entry in self.entries]
        self._group = sent.group
        count = sum(entry.parameter.numel() for entry in self.entries)
        flags = len(self.entries) if isinstance(unit, Bucket) else 0
        self._memory: Any = np.zeros(count + flags, np.float64)
        self._flags = self._memory[count:]
        self._sums: UnroundedSums | None = None
        self._means: list[torch.Tensor] = []

    def declaration(self) -> tuple[str, torch.Tensor, str | None]:
        """(name, a tensor like the one that is sent, no compression)."""
        return self._name, torch.from_numpy(self._memory), None

    def start(self) -> None:
        """Sends the sums; nothing, which is a negative zero, where there is no gradient."""
        if len(self._flags) > 0:
            self._flags[:] = [entry.parameter.grad is not None for entry in self.entries]
        settled = [accumulation.settle() for accumulation in self._accumulations]
        self._sums = UnroundedSums(settled, self._memory, self._name, self._group)
        self._sums.start(transfer.members_of(self._group).size, self.priority)

    def wait(self) -> None:
        """Waits for the means."""
        assert self._sums is not None
        sums = self._sums
        sums.wait()
        self._sums, self._means = None, []
        for number, entry in enumerate(self.entries):
            parameter = entry.parameter
            mean = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
            sums.round(number, mean)
            self._means.append(mean.to(parameter.device))

    def deliver(self, *, restores: bool = False) -> None:
        """Makes the means the .grad of the parameters."""
        for entry, mean in zip(self.entries, self._means, strict=True):
            if entry.parameter.grad is None:
                entry.parameter.grad = mean
            else:
                entry.parameter.grad.detach().copy_(mean)
        self._means = []

    def release(self) -> torch.Tensor | None:
        """The mean of the only parameter, which this object then no longer holds."""
        means, self._means = self._means, []
        return means[0] if means else None

    def unused_everywhere(self) -> list[IndexedParameter]:
        """Parameters for which no rank had a gradient in the last pass."""
        return [entry for entry, used in zip(self.entries, self._flags, strict=False) if used == 0]
