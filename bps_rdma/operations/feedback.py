# SPDX-License-Identifier: Apache-2.0
"""Saves and restores the feedback that compression keeps from round to round; see docs/compression.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from bps_rdma import arrays
from bps_rdma.agreement import group_of
from bps_rdma.errors import InvalidArgumentError
from bps_rdma.group import Group
from bps_rdma.job import current
from bps_rdma.operations import start
from bps_rdma.operations.options import SUM, OperationOptions
from bps_rdma.positions import keywords_since

_OF_RANK = {"residual": False, "momentum": True}  # the core's argument: is it the momentum?


@keywords_since("name", "group", "timeout")
def feedback_state(
    like: Any, name: str, *, group: Group | None = None, timeout: float | None = None
) -> dict[str, npt.NDArray[np.float32]]:
    """Returns the feedback of push_pulls of this name: what encoding has lost in earlier rounds, and momentum.

    A collective call, while no operation of this name is in progress: every rank of the group must make it. Nothing
    changes. Each rank saves what it gets, and gives it to load_feedback_state() after a restart.

    Args:
        like: an array of the shape and dtype that is push_pulled; it is not read.
        name: as the operations call it; it was declared with a compression, or has been used with one.
        group, timeout: as for push_pull_inplace().

    Returns:
        Flat arrays of float32, as many elements as `like`: "residual" and "momentum" of this rank, each if the
        compression has one, and "servers": the residual of all servers, the same array on all ranks. With neither
        feedback nor momentum: {}.

    Raises:
        InvalidArgumentError: the name is not compressed, or was used by reduce_scatter. Otherwise as
            push_pull_inplace().
    """
    options = OperationOptions(SUM, name, 0, group, timeout, True)
    tensor = _tensor(like, options)
    state = {}
    for key, is_momentum in _OF_RANK.items():
        kept = np.empty(tensor.elements, np.float32)
        if tensor.copy_feedback(is_momentum, arrays.describe(kept, True), False):
            state[key] = kept
    servers = np.zeros(tensor.elements, np.float32)
    _run(start.Kind.read_feedback, servers, like, options)
    if "residual" in state:
        state["servers"] = servers
    return state


@keywords_since("group", "timeout", leading=3, named=False)
def load_feedback_state(
    like: Any, name: str, state: Mapping[str, Any], *, group: Group | None = None, timeout: float | None = None
) -> None:
    """Goes on from what feedback_state() gave: further push_pulls of this name have the bits that they had there.

    A collective call, as feedback_state(). That holds for the same number of ranks, layout on hosts, servers and
    settings; methods that draw random numbers draw others. With another layout call it as well, so that no rank misses
    it: what this rank has lost is then only fed back where it is this rank that encodes the partition.

    Args:
        like, name, group, timeout: as for feedback_state().
        state: what this rank has saved. "servers" is taken from the group's first rank.

    Raises:
        InvalidArgumentError: the state is of another size, or lacks what this compression remembers.
            Otherwise as feedback_state().
    """
    options = OperationOptions(SUM, name, 0, group, timeout, True)
    tensor = _tensor(like, options)
    flat = {key: np.ascontiguousarray(value, np.float32).reshape(-1) for key, value in state.items()}
    for key, value in flat.items():
        if key not in (*_OF_RANK, "servers") or len(value) != tensor.elements:
            raise InvalidArgumentError(
                f"a state with {key!r} of {len(value)} elements is not one of {name!r}, which has {tensor.elements}",
                "pass what feedback_state() returned for this name",
            )
    members = group_of(current(), group)
    servers = np.zeros(tensor.elements, np.float32)
    if "servers" in flat and members.ranks.index(current().process.rank) == 0:
        servers[:] = flat["servers"]
    _run(start.Kind.write_feedback, servers, like, options)
    for key, is_momentum in _OF_RANK.items():
        value = flat.get(key, np.zeros(tensor.elements, np.float32))
        if not tensor.copy_feedback(is_momentum, arrays.describe(value, False), True) and key in flat:
            raise InvalidArgumentError(
                f"{name!r} has no {key}", "declare it with the compression that it had when the state was saved"
            )


def _tensor(like: Any, options: OperationOptions) -> Any:
    memory = arrays.describe(like, False)
    return start.tensor_of(current(), start.Kind.push_pull, memory, memory.elements, options)


def _run(kind: start.Kind, array: npt.NDArray[np.float32], like: Any, options: OperationOptions) -> None:
    memory = arrays.describe(array, True)
    declared = arrays.describe(like, False)
    start.run(start.Described(kind, memory, memory, array, memory.elements, declared=declared), options).wait()
