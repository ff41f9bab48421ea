# SPDX-License-Identifier: Apache-2.0
"""Exact sums of several arrays on each rank, as those of micro-batches; see docs/exact.md."""

from __future__ import annotations

from typing import Any

import numpy as np

from bps_rdma import _core, arrays
from bps_rdma.agreement import group_of
from bps_rdma.errors import InvalidArgumentError, InvalidTensorError
from bps_rdma.group import Group
from bps_rdma.job import current
from bps_rdma.unrounded import UnroundedSums

__all__ = ["ExactSum"]

_LARGEST_DIVISOR = (1 << 20) - 1
_FLOAT64 = arrays.Dtype.float64


class ExactSum:
    """Adds arrays without rounding, first on each rank and then over the ranks, and rounds once.

    The result has the same bits however the arrays are spread over ranks and calls::

        total = bps.ExactSum(gradient)
        for batch in batches:
            total.add(gradient_of(batch))
        mean = total.push_pull(divisor=all_batches_of_all_ranks)

    It takes 8 bytes per element, and sends 8 bytes per element, whatever the dtype.

    Args:
        like: an array of the shape and dtype that will be added: float32, float64, float16 or bfloat16, on the CPU.
        name: identifies the sum on all ranks. None: sums are matched by the order of push_pull() per size.
        group: the ranks that take part; default: all workers.

    Raises:
        InvalidTensorError: `like` has another dtype, or more than 2^32 elements.
    """

    def __init__(self, like: Any, name: str | None = None, group: Group | None = None) -> None:
        memory = arrays.describe(like, False)
        if memory.dtype not in arrays.FLOATING:
            raise InvalidTensorError(
                f"{memory.dtype.name} is not floating point", "use push_pull(): sums of integers are exact"
            )
        if memory.elements >= 1 << 32:
            raise InvalidTensorError(f"{memory.elements} elements are too many", "make several sums of parts")
        self._like = like
        self._name = name
        self._group = group
        self._sum = _core.ExactAccumulator(memory.dtype, memory.elements)

    def add(self, array: Any) -> None:
        """Adds an array of the same size and dtype on this rank.

        Raises:
            InvalidArgumentError: it has another size or dtype.
        """
        self._sum.add(arrays.describe(array, False))

    def clear(self) -> None:
        """Begins again: nothing has been added."""
        self._sum.clear()

    def push_pull(
        self,
        average: bool = False,
        divisor: int | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> Any:
        """The sum of what all ranks have added, as a new array; the same bits on all ranks. Every rank must call it.

        What this rank has added stays; see clear(). A sum that nothing was added to is minus zero.

        Args:
            average: divide by the number of ranks.
            divisor: divide by this number, less than 2^20, the same on all ranks; not for float64.
            priority: operations with a higher priority are sent first.
            timeout: seconds; default BPS_TIMEOUT.

        Raises:
            InvalidArgumentError: the divisor cannot be used. Otherwise as push_pull_inplace().
        """
        by = self._divisor(average, divisor, self._sum.dtype == _FLOAT64)
        sums = UnroundedSums([self._sum], np.empty(self._sum.elements, np.float64), self._name, self._group)
        sums.start(by, priority, timeout, awaited=True)
        sums.wait()
        result = arrays.empty_like(self._like)
        sums.round(0, result)
        return result

    def _divisor(self, average: bool, divisor: int | None, is_wide: bool) -> int:
        if divisor is None:
            return group_of(current(), self._group).size if average else 1
        if average:
            raise InvalidArgumentError("there is a divisor, and average=True", "pass one of them")
        if not isinstance(divisor, int) or not 1 <= divisor <= _LARGEST_DIVISOR:
            raise InvalidArgumentError(f"divisor={divisor!r}", f"pass a whole number from 1 to {_LARGEST_DIVISOR}")
        if is_wide and divisor > 1:
            raise InvalidArgumentError(
                "a sum of float64 cannot be divided exactly by a number of the caller's", "pass average=True, or none"
            )
        return divisor
