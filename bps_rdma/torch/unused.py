# SPDX-License-Identifier: Apache-2.0
"""Which parameters no rank used in a pass, where the units of gradients cannot tell: without buckets, or compressed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import bps_rdma
from bps_rdma import Handle
from bps_rdma.torch.units import IndexedParameter, Sent

Declared = tuple[str, torch.Size, torch.dtype, torch.device]  # a name, and what is sent under it


class UnusedParameters:
    """Asks for them by one small operation per pass.

    Args:
        entries: all parameters.
        sent: how gradients are sent.
        declares: now, before what else is declared: which server sums what follows from the order of names.
    """

    def __init__(self, entries: Sequence[IndexedParameter], sent: Sent, *, declares: bool) -> None:
        self._entries, self._sent = entries, sent
        self.name = f"{sent.prefix}.used"
        self._flags = bps_rdma.empty(len(entries), "bool")
        self._handle: Handle[Any] | None = None
        self._found: list[IndexedParameter] = []
        if declares:
            bps_rdma.declare(self.name, self._flags, group=sent.group)

    @property
    def declared(self) -> Declared:
        """What a pass sends."""
        return self.name, torch.Size([len(self._entries)]), torch.bool, torch.device("cpu")

    def ask(self) -> None:
        """Backward is over: tells the other ranks which parameters this one used."""
        for entry in self._entries:
            self._flags[entry.index] = entry.parameter.grad is not None
        self._handle = bps_rdma.push_pull_async_inplace(
            self._flags, self.name, average=False, priority=1, group=self._sent.group
        )

    def wait(self) -> None:
        """Waits for the other ranks, once per pass."""
        if self._handle is not None:
            used = self._handle.wait()
            self._handle = None
            self._found = [self._entries[int(index)] for index in np.flatnonzero(~used)]

    def found(self) -> list[IndexedParameter]:
        """Those that no rank used in the last pass; waits for the other ranks."""
        self.wait()
        return self._found
