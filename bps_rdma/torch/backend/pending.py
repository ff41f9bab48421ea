# SPDX-License-Identifier: Apache-2.0
"""The way to call an operation of the backend, and what it returns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from bps_rdma.handle import PythonHandle
from bps_rdma.torch.transfer import AnyHandle
from bps_rdma.torch.transfer.dense import Finish


class Call(NamedTuple):
    """The way to call: timeout in seconds, and whether the caller waits next."""

    seconds: float
    awaited: bool


class Pending(NamedTuple):
    """Operations in progress, and what remains to be done once they are over."""

    handles: Sequence[AnyHandle | PythonHandle[Any]] = ()
    finishes: Sequence[Finish] = ()
    whole: torch.Tensor | None = None  # all_gather_parts(): all parts in one tensor, if they are equally large


NOTHING = Pending()


def together(pending: Iterable[Pending]) -> Pending:
    """Several as one."""
    all_of = list(pending)
    return Pending([h for one in all_of for h in one.handles], [f for one in all_of for f in one.finishes])
