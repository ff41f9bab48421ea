# SPDX-License-Identifier: Apache-2.0
"""Sums that ranks have accumulated without rounding, on their way over the ranks; see docs/exact.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bps_rdma import _core, arrays
from bps_rdma.group import Group
from bps_rdma.operations import start
from bps_rdma.operations.compressed import EXACT, EXACT_TO_ODD, NONE
from bps_rdma.operations.options import AVERAGE, SUM, Options, ReduceOp


class UnroundedSums:
    """Adds the sums of accumulators over the ranks, those of all accumulators in one operation.

    They travel as float64. An element that a float64 does not hold on some rank, or not for all ranks, is a NaN in
    it. For those elements there are two more operations, which the same ranks make because they see the same NaN: the
    first one finds what is infinite or really NaN, the second one adds the others digit by digit.

    Args:
        accumulators: all of one dtype. What is in them stays.
        sums: (elements,) float64, of all accumulators together: memory of the operation.
        name: identifies it on all ranks; None: it is matched by the order of operations of its size.
        group: who takes part; None: all workers.
    """

    def __init__(
        self,
        accumulators: Sequence[_core.ExactAccumulator],
        sums: npt.NDArray[np.float64],
        name: str | None,
        group: Group | None,
    ) -> None:
        self._accumulators = list(accumulators)
        self._ends = np.cumsum([0, *(one.elements for one in accumulators)]).tolist()
        self._sums = sums
        self._name = name
        self._group = group
        self._by = 1
        self._divides = False
        self._how = Options()
        self._handle: start.Handle | None = None
        self._beyond: npt.NDArray[np.intp] = np.empty(0, np.intp)
        self._parts: npt.NDArray[np.float64] = np.empty(0, np.float64)

    def start(self, by: int, priority: int = 0, timeout: float | None = None, awaited: bool = False) -> None:
        """Sends the sums, which will be divided by `by`: of float64 that is 1, or the number of ranks.

        Raises:
            As push_pull_async_inplace().
        """
        is_wide = self._accumulators[0].dtype == arrays.Dtype.float64
        # A float64 is rounded to its own dtype on the way: servers must divide it.
        self._by, self._divides = by, is_wide and by > 1
        op, exactly = (AVERAGE, EXACT) if self._divides else (SUM, EXACT if is_wide else EXACT_TO_ODD)
        for number, one in enumerate(self._accumulators):
            one.copy_sums(arrays.describe(self._of(number), True))
        self._how = Options(op, self._name, priority, self._group, timeout, awaited, exactly)
        self._handle = start.reduce(self._sums, self._sums, self._how)

    def wait(self) -> None:
        """Waits until the sums of all ranks are here.

        Raises:
            As Handle.wait().
        """
        handle, self._handle = self._handle, None
        assert handle is not None
        handle.wait()
        self._beyond = np.flatnonzero(np.isnan(self._sums))  # on any rank, and so the same ones on all
        if len(self._beyond) > 0:
            self._settle_specials()
        self._parts = self._sum_parts()

    def round(self, number: int, into: Any) -> None:
        """Writes the sums of one accumulator, divided and rounded to its dtype, to an array; after wait()."""
        own, places = self._within(number)
        width = _core.ExactAccumulator.parts_per_element
        self._accumulators[number].round(
            arrays.describe(self._of(number), False),
            own,
            arrays.describe(self._parts[places.start * width : places.stop * width], False),
            self._by,
            self._divides,
            arrays.describe(into, True),
        )

    def _of(self, number: int) -> npt.NDArray[np.float64]:
        return self._sums[self._ends[number] : self._ends[number + 1]]

    def _within(self, number: int) -> tuple[list[int], slice]:
        """Which elements of an accumulator are too long, and where they are in the list of all of them."""
        begin, end = self._ends[number], self._ends[number + 1]
        first, last = np.searchsorted(self._beyond, [begin, end]).tolist()
        return (self._beyond[first:last] - begin).tolist(), slice(first, last)

    def _settle_specials(self) -> None:
        found = np.zeros((_padded(len(self._beyond)), 3), np.bool_)
        for number, one in enumerate(self._accumulators):
            own, places = self._within(number)
            one.copy_specials(own, arrays.describe(found[places].reshape(-1), True))
        self._reduce(found, ReduceOp.max, "specials")
        nan, infinite, negative = found[: len(self._beyond)].T
        value = np.where(nan | (infinite & negative), np.nan, np.where(infinite, np.inf, -np.inf))
        settled = nan | infinite | negative
        self._sums[self._beyond[settled]] = value[settled]
        self._beyond = self._beyond[~settled]

    def _sum_parts(self) -> npt.NDArray[np.float64]:
        if len(self._beyond) == 0:
            return np.empty(0, np.float64)
        parts = np.zeros((_padded(len(self._beyond)), _core.ExactAccumulator.parts_per_element), np.float64)
        for number, one in enumerate(self._accumulators):
            own, places = self._within(number)
            one.copy_parts(own, arrays.describe(parts[places].reshape(-1), True))
        self._reduce(parts, SUM, "parts")
        return parts.reshape(-1)

    def _reduce(self, array: Any, op: ReduceOp, what: str) -> None:
        name = None if self._name is None else f"{self._name}.{what}.{len(array)}"
        start.reduce(array, array, self._how._replace(op=op, name=name, awaited=True, compression=NONE)).wait()


def _padded(count: int) -> int:
    """A power of two, so that there are few sizes: each is a name to be declared."""
    return 1 << (count - 1).bit_length()
