# SPDX-License-Identifier: Apache-2.0
"""The units in which gradients are sent, in the order in which they are expected: declared, filled anew, saved."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np

import bps_rdma
from bps_rdma.torch import compression_state, transfer
from bps_rdma.torch.bucket_sizes import BucketSizes
from bps_rdma.torch.plan import Strategy, Unit, units_of
from bps_rdma.torch.sparse import Rows
from bps_rdma.torch.units import IndexedParameter, Sent
from bps_rdma.torch.unused import Declared


class OrderedUnits:
    """All units of a synchronizer.

    Args:
        entries: the parameters, in the order of registration; their gradients are expected in the reverse one.
        strategy: whether there are buckets.
        sizes: of buckets.
        sent: prefix, group and compression.
        sparse: names of the parameters whose gradients are sparse.
    """

    def __init__(
        self, entries: Sequence[IndexedParameter], strategy: Strategy, sizes: BucketSizes, sent: Sent,
        sparse: Container[str],
    ) -> None:  # fmt: skip
        self._entries, self._strategy, self._sizes = entries, strategy, sizes
        self.sent, self._sparse = sent, sparse
        self._generation = 0
        self._goes_on = False  # with what others have left
        self.units: list[Unit] = []
        self._fill(list(reversed(entries)))

    def _fill(self, order: Sequence[IndexedParameter]) -> None:
        self.close()
        self.units = units_of(order, self._strategy, self._sizes, self._generation, self.sent, self._sparse)
        self._unit_of = {entry: unit for unit in self.units for entry in unit.entries}
        self._kept = [compression_state.Kept.of(unit) for unit in self.units]
        declarations = [unit.declaration() for unit in self.units]
        # Parameters may have another dtype one day.
        self.declared: list[Declared] = [(name, one.shape, one.dtype, one.device) for name, one, _ in declarations]
        transfer.declare_each(declarations, self.sent.group)

    def of(self, entry: IndexedParameter) -> Unit:
        """The unit in which the gradient of this parameter is sent."""
        return self._unit_of[entry]

    @property
    def in_order(self) -> list[Unit]:
        """Those that must be started in this order, because GPUs of a host may sum them first, which sum no rows."""
        if not (self.sent.in_order and transfer.on_hosts()):
            return []
        return [unit for unit in self.units if not isinstance(unit, Rows)]

    @property
    def can_be_rebuilt(self) -> bool:
        """Whether their order counts."""
        return self._strategy.buckets and self._strategy.eager

    def rebuild(self, arrived: Sequence[IndexedParameter]) -> bool:
        """Fills the buckets anew; see GradientSynchronizer.rebuild(). Returns whether they are others."""
        if not self.can_be_rebuilt:
            return False
        order = np.array([entry.index for entry in arrived], dtype="int64")
        missing = np.setdiff1d(np.arange(len(self._entries)), order)
        order = np.concatenate([order, missing[::-1]])  # a first pass that has failed lacks some
        root = self.sent.group.ranks[0] if self.sent.group else 0
        bps_rdma.broadcast(order, self._order_name, root=root, group=self.sent.group)
        ordered = [self._entries[index] for index in order]
        if ordered == [entry for unit in self.units for entry in unit.entries]:
            return False
        self._generation += 1
        before = self._kept
        self._fill(ordered)
        if self._goes_on:  # what one pass has left is not worth an exchange of everything
            compression_state.carry(before, self._kept, self.sent.group)
        return True

    def take_over(self, before: OrderedUnits) -> None:
        """Goes on with what others remember of the same parameters. A collective call."""
        self._goes_on = True
        compression_state.carry(before._kept, self._kept, self.sent.group)

    @property
    def _order_name(self) -> str:
        return f"{self.sent.prefix}.order {self._generation}"

    def meet(self) -> None:
        """Meets ranks that have begun rebuild(), and raises MismatchError there and here."""
        bps_rdma.push_pull(np.zeros(len(self._entries), np.int64), name=self._order_name, group=self.sent.group)

    def compression_state(self) -> dict[str, Any]:
        """The feedback of the units, and which they are; see compression_state.py. A collective call."""
        return compression_state.save(self.units, self.sent, self._generation)

    def load_compression_state(self, state: Mapping[str, Any]) -> bool:
        """Goes on with the units of a saved state, and what they remembered; see GradientSynchronizer."""
        ordered = compression_state.order(state, self._entries)
        rebuilt = int(state["generation"]) > 0
        if rebuilt:
            self.rebuild(ordered)
        compression_state.load(state, self.units, self.sent)
        return rebuilt

    def close(self) -> None:
        """Gives back what the units keep."""
        for unit in self.units:
            unit.close()
