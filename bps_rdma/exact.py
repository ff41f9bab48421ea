# SPDX-License-Identifier: Apache-2.0
"""Exact sums of several arrays on each rank, as those of micro-batches; see docs/exact.md."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import starmap
from typing import Any

import numpy as np
import numpy.typing as npt

from bps_rdma import _core, argument_types, arrays
from bps_rdma.agreement import group_of
from bps_rdma.errors import BpsError, InvalidArgumentError, InvalidTensorError, RoundAbortedError
from bps_rdma.group import Group
from bps_rdma.job import current
from bps_rdma.operations import start
from bps_rdma.operations.begun import give_up_one, of_thread
from bps_rdma.operations.options import AVERAGE, EXACT, EXACT_TO_ODD, NONE, SUM, OperationOptions, ReduceOp
from bps_rdma.positions import keywords_since

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

    It takes 8 bytes per element, and sends 8 bytes per element, with every dtype.

    Args:
        like: an array of the shape and dtype that will be added: float32, float64, float16 or bfloat16, on the CPU.
        name: identifies the sum on all ranks. None: sums are matched by the order of push_pull() per size.
        group: the ranks that take part; default: all workers.

    Raises:
        InvalidTensorError: `like` has another dtype, or more than 2^32 elements.
    """

    @keywords_since("name", "group", leading=2)
    def __init__(self, like: Any, name: str | None = None, *, group: Group | None = None) -> None:
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

    @keywords_since("average", "divisor", "priority", "timeout", named=False)
    def push_pull(
        self,
        *,
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
        try:
            sums.start(by, priority, timeout, awaited=True)
            sums.wait()
        except BaseException:
            sums.give_up()
            raise
        result = arrays.empty_like(self._like)
        sums.round(0, result)
        return result

    def _divisor(self, average: bool, divisor: int | None, is_wide: bool) -> int:
        if divisor is None:
            divides = argument_types.truth("average", average)
            return group_of(current(), self._group).size if divides else 1
        if argument_types.truth("average", average):
            raise InvalidArgumentError("there is a divisor, and average=True", "pass one of them")
        number = argument_types.whole(divisor)
        if number is None or not 1 <= number <= _LARGEST_DIVISOR:
            raise InvalidArgumentError(f"divisor={divisor!r}", f"pass a whole number from 1 to {_LARGEST_DIVISOR}")
        if is_wide and number > 1:
            raise InvalidArgumentError(
                "a sum of float64 cannot be divided exactly by a number of the caller's", "pass average=True, or none"
            )
        return number


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
        self._epoch = 0  # of the view in which they are sent
        self._how = OperationOptions()
        self._steps: list[start.Handle[Any]] = []  # those that have begun: the sums, the specials, the parts
        self._came: list[Any] = []  # an entry for each of them that is complete
        self._over = False
        self._beyond: npt.NDArray[np.intp] = np.empty(0, np.intp)
        self._left: npt.NDArray[np.intp] = self._beyond  # of them, those that the specials have not settled
        self._specials: npt.NDArray[np.bool_] = np.empty((0, 3), np.bool_)
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
        self._how = OperationOptions(op, self._name, priority, self._group, timeout, awaited, exactly)
        self._epoch = current().epoch
        self._begin(self._sums, self._how)

    def wait(self) -> None:
        """Waits until the sums of all ranks are here.

        Raises:
            As Handle.wait(). RoundAbortedError also where the caller was told of the end of the view before.
        """
        while not self._over:
            self._wait_for_step()
            self._go_on()

    def give_up(self) -> None:
        """Ends what is under way, after an exception of this rank. It takes part in what other ranks still exchange.

        They begin the same steps as this one where the step before has come. If this rank left one out, it would be one
        behind with operations of that name from then on.
        """
        try:
            while self._steps and not self._over:
                give_up_one(self._steps[-1])
                self._wait_for_step()
                self._go_on()
        except BpsError:  # the step has failed, on all ranks
            return
        except BaseException:
            self.give_up()
            raise

    def round(self, number: int, into: Any) -> None:
        """Writes the sums of one accumulator, divided and rounded to its dtype, to an array; after wait()."""
        own, places = self._within(number, self._left)
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

    def _within(self, number: int, beyond: npt.NDArray[np.intp]) -> tuple[list[int], slice]:
        """Returns which of these elements are of an accumulator, and their place among all of them."""
        begin, end = self._ends[number], self._ends[number + 1]
        first, last = np.searchsorted(beyond, [begin, end]).tolist()
        return (beyond[first:last] - begin).tolist(), slice(first, last)

    # ---- The steps. What a signal handler raises may leave them at any point: they are then called once more.

    def _wait_for_step(self) -> None:
        if len(self._came) < len(self._steps):
            self._came.extend(starmap(self._steps[-1].wait, ((),)))  # one step of Python: it is complete and noted

    def _go_on(self) -> None:
        """Takes what the last step has brought, and begins the next one, if there is one."""
        begun = len(self._steps)
        if begun == 1:
            self._beyond = self._left = np.flatnonzero(np.isnan(self._sums))  # a NaN of any rank is one on all
            if len(self._beyond) > 0:
                self._ask_for_specials()
        elif begun == 2:
            self._settle_specials()
            if len(self._left) > 0:
                self._send_parts()
        if len(self._steps) == begun:
            self._over = True

    def _ask_for_specials(self) -> None:
        found = self._specials = np.zeros((_padded(len(self._beyond)), 3), np.bool_)
        for number, one in enumerate(self._accumulators):
            own, places = self._within(number, self._beyond)
            one.copy_specials(own, arrays.describe(found[places].reshape(-1), True))
        self._reduce(found, ReduceOp.max, "specials")

    def _settle_specials(self) -> None:
        nan, infinite, negative = self._specials[: len(self._beyond)].T
        value = np.where(nan | (infinite & negative), np.nan, np.where(infinite, np.inf, -np.inf))
        settled = nan | infinite | negative
        self._sums[self._beyond[settled]] = value[settled]
        self._left = self._beyond[~settled]

    def _send_parts(self) -> None:
        width = _core.ExactAccumulator.parts_per_element
        parts = np.zeros((_padded(len(self._left)), width), np.float64)
        for number, one in enumerate(self._accumulators):
            own, places = self._within(number, self._left)
            one.copy_parts(own, arrays.describe(parts[places].reshape(-1), True))
        self._parts = parts.reshape(-1)
        self._reduce(parts, SUM, "parts")

    def _reduce(self, array: npt.NDArray[Any], op: ReduceOp, what: str) -> None:
        if current().epoch != self._epoch:  # other ranks may repeat the step
            raise RoundAbortedError("the view has ended in which these sums were sent", "repeat the step")
        name = None if self._name is None else f"{self._name}.{what}.{len(array)}"
        self._begin(array, self._how._replace(op=op, name=name, awaited=True, compression=NONE))

    def _begin(self, array: npt.NDArray[Any], how: OperationOptions) -> None:
        outer = of_thread.begun
        if outer is not None:
            self._steps.append(start.reduce(array, array, how))
            return
        try:
            of_thread.begun = self._steps  # gets the handle in one step
            start.reduce(array, array, how)
        finally:
            of_thread.begun = None


def _padded(count: int) -> int:
    """A power of two, so that there are few sizes: each is a name to be declared."""
    return 1 << (count - 1).bit_length()
