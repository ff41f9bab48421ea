# SPDX-License-Identifier: Apache-2.0
"""Gives each place what it is to remember of a tensor, where ranks load what they or others have saved.

One rank of a host encodes a partition for all of them, and none does where the server is on that host. Which rank that
is depends on servers and partition sizes, and so differs from start to start. What a rank has saved of a partition that
it does not encode any more therefore goes on to others:

    residual    to the servers, which add it to the next sum of all ranks
    momentum    in equal parts to the ranks that encode the partition: it is a sum, to which all of them add

Sums of all ranks then get what they would have got, and where nothing has changed each rank has what it had.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from bps_rdma import _core
from bps_rdma.errors import InvalidArgumentError
from bps_rdma.group import Group
from bps_rdma.operations import start
from bps_rdma.operations.options import NONE, SUM, OperationOptions

OF_RANK = {"residual": False, "momentum": True}  # the core's argument: is it the momentum?
SAVED_BY = "saved_by"

Part = tuple[int, int]  # the place of the rank that has saved a state, and how many ranks there were
Floats = npt.NDArray[np.float32]


def own_part(state: Mapping[str, Any], position: int, ranks: int) -> Part:
    """Whose state it is; by default that of the rank in the same place of a job of the same size."""
    place, size = (int(one) for one in np.asarray(state.get(SAVED_BY, (position, ranks))).reshape(-1))
    if not 0 <= place < size:
        raise InvalidArgumentError(
            f"a state cannot be that of rank {place} of {size}", "pass what feedback_state() returned"
        )
    return place, size


class Restored:
    """What this rank is to remember of a tensor.

    Args:
        name, tensor: whose feedback it is, and what the core has declared.
        members, position: the ranks that load states, and the place of this one.
        timeout: of each operation.

    Attributes:
        of_rank: "residual" and "momentum" of this rank, when take() has returned.
    """

    def __init__(self, name: str, tensor: _core.Tensor, members: Group, position: int, timeout: float | None) -> None:
        self._name, self._elements = name, tensor.elements
        self._members, self._position = members, position
        # Calls of one size share a name, so that restoring declares few.
        self._options = OperationOptions(SUM, None, 0, members, timeout, True, NONE)
        self._encodes = np.zeros(tensor.elements, np.bool_)
        for begin, end in tensor.encoded:
            self._encodes[begin:end] = True
        self.of_rank: dict[str, Floats] = {}

    def take(self, flat: Mapping[str, Floats], own: Part | None, average: bool) -> Floats:
        """Takes what all ranks have loaded. A collective call.

        Args:
            flat: the state that this rank has loaded; {}: none.
            own: whose it is.
            average: whether sums of the tensor are divided by the number of ranks.

        Returns:
            This rank's share of what the servers are to remember.
        """
        parts = self._parts(own)
        loaded = [part for part in parts if part is not None]
        if len({size for _, size in loaded}) > 1:
            raise InvalidArgumentError(
                f"ranks have loaded states of {self._name!r} that were saved by different numbers of ranks: {loaded}",
                "load states that were saved at the same time",
            )
        self._tell_of_missing(loaded)
        counts = own is not None and parts.index(own) == self._position  # another rank may have loaded the same
        # A mean of more ranks has less of what one of them adds.
        scale = self._members.size / own[1] if own is not None and average else 1
        here, elsewhere = {}, {}
        for key in OF_RANK:
            values = flat[key] * np.float32(scale) if counts and key in flat else np.zeros(self._elements, np.float32)
            here[key] = np.where(self._encodes, values, np.float32(0))
            elsewhere[key] = np.where(self._encodes, np.float32(0), values)
        servers = np.zeros(self._elements, np.float32)
        if loaded and parts.index(loaded[0]) == self._position and "servers" in flat:
            servers += flat["servers"]
        self.of_rank = here
        if loaded:
            encoders = self._sum(self._encodes.astype(np.float32))
            self._tell_of_lost([*elsewhere.values(), servers], encoders)
            servers += elsewhere["residual"] / np.float32(self._members.size if average else 1)
            if self._sum(np.array([elsewhere["momentum"].any()], np.int64)).any():
                moved = self._sum(elsewhere["momentum"]) / np.maximum(encoders, 1)
                here["momentum"] += np.where(self._encodes, moved, np.float32(0))
        return servers

    def _parts(self, own: Part | None) -> list[Part | None]:
        """Whose state each rank has loaded."""
        mine = np.array((-1, -1) if own is None else own, np.int64)
        found = start.all_gather(mine, None, self._options).wait()
        return [None if place < 0 else (place, size) for place, size in found.reshape(-1, 2).tolist()]

    def _tell_of_missing(self, loaded: list[Part]) -> None:
        missing = sorted({*range(loaded[0][1] if loaded else 0)} - {place for place, _ in loaded})
        if missing and self._position == 0:
            _core.log_warning(
                f"what compression remembered of {self._name!r} is lost in part: {loaded[0][1]} ranks have saved it, "
                f"and no rank has loaded what was saved by {', '.join(map(str, missing))}"
            )

    def _tell_of_lost(self, values: list[Floats], encoders: Floats) -> None:
        lost = max(np.count_nonzero(each[encoders == 0]) for each in values)
        if lost:
            _core.log_warning(
                f"what compression remembered of {lost} elements of {self._name!r} is lost: nothing encodes them now, "
                "because they cross no network, or because their code would be no shorter"
            )

    def _sum(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        found: npt.NDArray[Any] = start.reduce(values, np.empty_like(values), self._options).wait()
        return found
