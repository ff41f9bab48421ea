# SPDX-License-Identifier: Apache-2.0
"""Saves and restores the feedback that compression keeps from round to round; see docs/compression.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from bps_rdma import arrays
from bps_rdma.agreement import group_of
from bps_rdma.compression import Codec
from bps_rdma.errors import InvalidArgumentError
from bps_rdma.group import Group
from bps_rdma.job import current
from bps_rdma.operations import start
from bps_rdma.operations.options import AVERAGE, SUM, OperationOptions, ReduceName, reduction
from bps_rdma.operations.restored_feedback import OF_RANK, SAVED_BY, Restored, own_part
from bps_rdma.positions import keywords_since


@keywords_since("name", "group", "timeout")
def feedback_state(
    like: Any, name: str, *, group: Group | None = None, timeout: float | None = None
) -> dict[str, npt.NDArray[Any]]:
    """Returns the feedback of push_pulls of this name: what encoding has lost in earlier rounds, and momentum.

    A collective call, while no operation of this name is in progress: every rank of the group must make it. Nothing
    changes. Each rank saves what it gets, and gives it to load_feedback_state() after a restart.

    Args:
        like: an array of the shape and dtype that is push_pulled; it is not read.
        name: as the operations call it; it was declared with a compression, or has been used with one.
        group, timeout: as for push_pull_inplace().

    Returns:
        Flat arrays of float32, as many elements as `like`: "residual" and "momentum" of this rank, each if the
        compression has one, and "servers": the residual of all servers, the same array on all ranks. And "saved_by":
        this rank's place in the group, and the size of the group. With neither feedback nor momentum: {}.

    Raises:
        InvalidArgumentError: the name is not compressed, or was used by reduce_scatter. Otherwise as
            push_pull_inplace().
    """
    options = OperationOptions(SUM, name, 0, group, timeout, True)
    tensor = _tensor(like, options)
    state: dict[str, npt.NDArray[Any]] = {}
    for key, is_momentum in OF_RANK.items():
        kept = np.empty(tensor.elements, np.float32)
        if tensor.copy_feedback(is_momentum, arrays.describe(kept, True), False):
            state[key] = kept
    servers = np.zeros(tensor.elements, np.float32)
    _run(start.Kind.read_feedback, servers, like, options)
    if "residual" in state:
        state["servers"] = servers
    if state:
        members = group_of(current(), group)
        state[SAVED_BY] = np.array([members.ranks.index(current().process.rank), members.size], np.int64)
    return state


@keywords_since("group", "timeout", leading=3, named=False)
def load_feedback_state(
    like: Any,
    name: str,
    state: Mapping[str, Any],
    *,
    average: bool = True,
    op: ReduceName | None = None,
    group: Group | None = None,
    timeout: float | None = None,
) -> None:
    """Goes on from what feedback_state() gave: further push_pulls of this name have the bits that they had there.

    A collective call, as feedback_state(). That holds for the same number of ranks, layout on hosts, servers, settings
    and partition size; methods that draw random numbers draw others. Otherwise other numbers are rounded, and all that
    was saved still takes part: where another rank encodes a partition now, or none does for its host, it gets there.
    Other ranks may load the states, and other numbers of them: each state counts once. A warning tells of states that
    no rank has loaded, and of what no place remembers any more.

    Args:
        like, name, group, timeout: as for feedback_state().
        state: what one rank has saved: this one, as long as there are as many. {}: this rank has none.
        average, op: as for push_pulls of this name. They count wherever another rank encodes a part now.

    Raises:
        InvalidArgumentError: the state is of another size, or has what this compression does not remember. Or ranks
            have loaded states of jobs of different sizes. Otherwise as feedback_state().
    """
    options = OperationOptions(SUM, name, 0, group, timeout, True)
    tensor = _tensor(like, options)
    is_mean = reduction(average, op) is AVERAGE
    flat = _checked(state, tensor)
    members = group_of(current(), group)
    position = members.ranks.index(current().process.rank)
    own = own_part(state, position, members.size) if flat else None
    restored = Restored(name, tensor, members, position, timeout)
    servers = restored.take(flat, own, is_mean)
    _run(start.Kind.write_feedback, servers, like, options)
    for key, is_momentum in OF_RANK.items():
        tensor.copy_feedback(is_momentum, arrays.describe(restored.of_rank[key], False), True)


def _checked(state: Mapping[str, Any], tensor: Any) -> dict[str, npt.NDArray[np.float32]]:
    """The arrays of a state, if they are of this tensor and of its compression."""
    flat = {key: np.ascontiguousarray(value, np.float32).reshape(-1) for key, value in state.items() if key != SAVED_BY}
    codec = Codec(tensor.compression) if tensor.compression else None
    kept = {"residual": codec and codec.feedback, "momentum": codec and codec.momentum != 0}
    for key, value in flat.items():
        if key not in (*OF_RANK, "servers") or len(value) != tensor.elements:
            raise InvalidArgumentError(
                f"a state with {key!r} of {len(value)} elements is not one of {tensor.name!r}, which has "
                f"{tensor.elements}",
                "pass what feedback_state() returned for this name",
            )
        if codec is not None and not kept.get(key, True):
            raise InvalidArgumentError(
                f"{tensor.name!r} has no {key}", "declare it with the compression that it had when the state was saved"
            )
    return flat


def _tensor(like: Any, options: OperationOptions) -> Any:
    memory = arrays.describe(like, False)
    return start.tensor_of(current(), start.Kind.push_pull, memory, memory.elements, options)


def _run(kind: start.Kind, array: npt.NDArray[np.float32], like: Any, options: OperationOptions) -> None:
    memory = arrays.describe(array, True)
    declared = arrays.describe(like, False)
    start.run(start.Described(kind, memory, memory, array, memory.elements, declared=declared), options).wait()
