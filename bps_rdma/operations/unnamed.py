# SPDX-License-Identifier: Apache-2.0
"""Reductions of tensors that have no name of their own: all of one size share one, and so what is remembered by name.

A compression with feedback or momentum would add what one tensor has left over to another one.
"""

from __future__ import annotations

from bps_rdma.agreement import group_of
from bps_rdma.errors import InvalidArgumentError
from bps_rdma.job import current
from bps_rdma.operations.options import NONE, OperationOptions
from bps_rdma.uncompressed import remembers


def unnamed(options: OperationOptions) -> OperationOptions:
    """The options of such a reduction: without a compression of BPS_COMPRESSION that remembers, which is said once.

    Raises:
        InvalidArgumentError: the call asks for one.
    """
    running = current()
    wanted = options.compression
    if wanted is None:
        if not running.remembers:
            return options
        running.note_unnamed(group_of(running, options.group))
        return options._replace(compression=NONE)
    if remembers(wanted):
        raise InvalidArgumentError(
            f"{wanted!r} remembers something of each tensor, by its name, and this one has none",
            "pass a name for each tensor, the same on all ranks",
        )
    return options
