# SPDX-License-Identifier: Apache-2.0
"""How one operation runs, as one value that passes through all layers."""

from __future__ import annotations

from typing import Literal, NamedTuple

from bps_rdma import _core, argument_types
from bps_rdma.errors import InvalidArgumentError
from bps_rdma.group import Group

ReduceOp = _core.ReduceOp
ReduceName = Literal["sum", "average", "min", "max", "product"]
SUM, AVERAGE = ReduceOp.sum, ReduceOp.average  # looked up once: an attribute of a pybind11 enum costs a call


class Options(NamedTuple):  # immutable like a frozen dataclass, and made in a third of its time
    """The options of one operation.

    Attributes:
        op: the reduction; ignored by operations that only move data.
        name: identifies the tensor on all ranks. None: calls are matched by their order per kind, dtype and size.
        priority: operations with a higher priority are sent first.
        group: the ranks that take part; None: all workers.
        timeout: seconds until the operation fails with DeadlineError; None: BPS_TIMEOUT.
        awaited: the caller waits for the operation next, so the calling thread may drive it.
        compression: how the tensor travels between hosts, or that its sums are exact; None: as the name was declared,
            or BPS_COMPRESSION and BPS_EXACT say.
    """

    op: ReduceOp = SUM
    name: str | None = None
    priority: int = 0
    group: Group | None = None
    timeout: float | None = None
    awaited: bool = False
    compression: str | None = None


def reduction(average: bool, op: ReduceName | None) -> ReduceOp:
    """The reduction that the public arguments `average` and `op` select; `op` wins.

    Raises:
        InvalidArgumentError: `op` is not the name of a reduction, or `average` is no truth value.
    """
    if op is None:
        return AVERAGE if average is True or argument_types.truth("average", average) else SUM
    found = ReduceOp.__members__.get(op) if isinstance(op, str) else None
    if found is None:
        raise InvalidArgumentError(f"{op!r} is not a reduction", f"use one of {', '.join(ReduceOp.__members__)}")
    return found
