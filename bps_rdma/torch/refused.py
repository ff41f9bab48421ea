# SPDX-License-Identifier: Apache-2.0
"""The refusal of a unit, whose gradients a rank cannot compute or send any more: no rank gets its mean."""

from __future__ import annotations

import torch

from bps_rdma.operations import OperationOptions, ReduceOp
from bps_rdma.torch import transfer
from bps_rdma.torch.accumulation import UnroundedUnit
from bps_rdma.torch.plan import Unit
from bps_rdma.torch.sparse import Rows
from bps_rdma.torch.transfer import AnyHandle
from bps_rdma.torch.units import Sent


class Refused:
    """Takes the place of a unit (units.py) in a pass; wait() raises MismatchError on all ranks.

    It asks for another operation than the others, under the same name: servers tell all ranks so at once. To start the
    unit and give it up would be too late where the others wait for this rank only.

    Args:
        unit: what the other ranks send.
        sent: how.
    """

    def __init__(self, unit: Unit | UnroundedUnit, sent: Sent) -> None:
        self._unit, self._sent = unit, sent
        self._handle: AnyHandle | None = None

    def start(self) -> None:
        """Refuses the unit."""
        if isinstance(self._unit, Rows):
            self._unit.refuse()
            return
        name, like, _ = self._unit.declaration()
        options = OperationOptions(ReduceOp.max, name, group=self._sent.group)
        self._handle = transfer.all_reduce(torch.zeros_like(like), options, in_order=self._sent.in_order)

    def wait(self) -> None:
        """Waits for the other ranks."""
        if isinstance(self._unit, Rows):
            self._unit.wait()
        elif self._handle is not None:
            self._handle.wait()
