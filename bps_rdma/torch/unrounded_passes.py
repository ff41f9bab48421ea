# SPDX-License-Identifier: Apache-2.0
"""Which passes send unrounded sums: those whose gradients accumulated on a rank, where sums are exact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import bps_rdma
from bps_rdma import Handle
from bps_rdma.torch.accumulation import Accumulation, UnroundedUnit
from bps_rdma.torch.units import Bucket, IndexedParameter, Sent, Single, Unit


class UnroundedPasses:
    """Accumulates, and tells of each pass whether it sends unrounded sums. Where sums are not exact, none does.

    Args:
        entries: all parameters.
        sent: how gradients are sent.
        is_exact: whether sums are exact.
        accumulates: whether gradients of several backward passes are added before they are sent, on all ranks; None:
            the ranks tell each other in each pass, by one small operation.
    """

    def __init__(
        self, entries: Sequence[IndexedParameter], sent: Sent, *, is_exact: bool, accumulates: bool | None
    ) -> None:
        self._entries, self._sent, self._is_exact = entries, sent, is_exact
        self._accumulations: dict[IndexedParameter, Accumulation] = {}  # empty unless something accumulates
        self._units: dict[Unit, UnroundedUnit] = {}  # made when they are needed
        self._asked: Handle[Any] | None = None  # has any rank accumulated?
        self._answer: bool | None = None  # for this pass
        self.hooks: list[Any] = []  # to be removed when this object goes
        self.accumulate(accumulates)

    def accumulate(self, accumulates: bool | None) -> None:
        """Sets `accumulates` anew, between passes."""
        self._accumulates = accumulates
        if self._is_exact and accumulates is not False and not self._accumulations:
            self._accumulations = {entry: Accumulation(entry) for entry in self._entries}
            self.hooks.extend(one.hook for one in self._accumulations.values())

    def take_over(self, before: UnroundedPasses) -> None:
        """Goes on with what has accumulated since the last pass of another one."""
        sums = {id(entry.parameter): one for entry, one in before._accumulations.items()}
        for entry, one in self._accumulations.items():
            if id(entry.parameter) in sums:
                one.take_over(sums[id(entry.parameter)])

    def follow_shapes(self) -> None:
        """A forward begins, whose graph ends in the nodes that add to .grad: parameters may have other shapes."""
        for entry, one in self._accumulations.items():
            if one.lets_go():
                self._accumulations[entry] = made = Accumulation(entry)
                self.hooks.append(made.hook)
                self._units = {unit: one for unit, one in self._units.items() if entry not in unit.entries}

    def added_to(self, entry: IndexedParameter) -> torch.Tensor | None:
        """The .grad to which autograd has added a gradient; before accumulated()."""
        return self._accumulations[entry].added_to if self._accumulations else entry.parameter.grad

    def accumulated(self, entry: IndexedParameter, accumulates: bool) -> None:
        """Autograd has added a gradient to .grad; see GradientSynchronizer.accumulated()."""
        if self._accumulations:
            self._accumulations[entry].after(accumulates)

    @property
    def _name(self) -> str:
        return f"{self._sent.prefix}.accumulated"

    def begin(self) -> None:
        """A pass begins: asks the other ranks, where that is to be known."""
        self._asked, self._answer = None, self._accumulates if self._is_exact else False
        if self._answer is None:
            mine = np.array([any(one.pending for one in self._accumulations.values())])
            self._asked = bps_rdma.push_pull_async_inplace(
                mine, name=self._name, priority=1, group=self._sent.group, op="max"
            )

    @property
    def is_asking(self) -> bool:
        """True until the answer of the other ranks has been looked at."""
        return self._asked is not None

    def is_known(self, *, waits: bool) -> bool:
        """True if it is known whether this pass sends unrounded sums."""
        if self._asked is not None and (waits or self._asked.done()):
            self._answer = bool(self._asked.wait()[0])
            self._asked = None
        return self._answer is not None

    @property
    def sends_unrounded(self) -> bool:
        """Whether this pass does, once that is known."""
        return bool(self._answer)

    def in_place_of(self, unit: Single | Bucket) -> UnroundedUnit:
        """What sends the unrounded sums of the parameters of a unit."""
        if unit not in self._units:
            self._units[unit] = UnroundedUnit(unit, self._accumulations, self._sent)
        return self._units[unit]

    def was_sent(self, unit: Single) -> Single | UnroundedUnit:
        """What the last pass has sent for a unit, where all passes do the same."""
        return self._units[unit] if self._is_exact and self._accumulates else unit

    def drop_units(self) -> None:
        """Other units take the place of those that there were."""
        self._units = {}

    def meet(self) -> None:
        """Answers ranks that have begun a pass which does not take place."""
        if self._is_exact and self._accumulates is None:
            bps_rdma.push_pull(np.zeros(1, bool), name=self._name, group=self._sent.group, op="min")
