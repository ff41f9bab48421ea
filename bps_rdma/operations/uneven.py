# SPDX-License-Identifier: Apache-2.0
"""An all_gather whose parts differ in size: the ranks tell each other the sizes, then each broadcasts its part."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from bps_rdma import _core, arrays
from bps_rdma.agreement import group_of
from bps_rdma.blockers import Blocker
from bps_rdma.errors import InvalidTensorError, MismatchError, RoundAbortedError, UnknownHandleError
from bps_rdma.handle import blocker_of
from bps_rdma.job import current
from bps_rdma.operations import start
from bps_rdma.operations.begun import give_up, give_up_one, of_thread
from bps_rdma.operations.messages import Together
from bps_rdma.operations.options import OperationOptions
from bps_rdma.operations.progress import Progress
from bps_rdma.operations.stepwise import StepwiseHandle

_SIZE = struct.Struct("<q16s40s")  # rows, dtype, and the other dimensions as text


def _copy_on_cpu(part: Any, array: Any) -> None:
    source = arrays.describe(array, False)
    _core.copy_bytes(arrays.describe(part, True).address, source.address, source.nbytes)


class UnevenGather(StepwiseHandle):
    """Such an all_gather in progress.

    Args:
        array: this rank's part.
        out: receives the whole; None: a new array.
        options: as for all_gather().
        copy: copies this rank's part into the whole, and both may be CUDA tensors on the core's own route. The caller
            has to wait at once then: what another thread starts would not wait for the caller's stream.
    """

    def __init__(
        self, array: Any, out: Any, options: OperationOptions, copy: Callable[[Any, Any], Any] | None = None
    ) -> None:
        super().__init__()
        self._copy: Callable[[Any, Any], Any] = copy or _copy_on_cpu
        self._describe = start.describe if copy else arrays.describe
        memory = self._describe(array, False)
        shape = tuple(memory.shape) or (1,)
        self._array, self._out, self._options = array, out, options
        self._rest = shape[1:]
        self._dtype = memory.dtype.name
        running = current()
        self._epoch = running.epoch
        self._members = group_of(running, options.group)
        self._own = running.process.rank
        self._name = options.name or "~uneven_all_gather"
        told = np.frombuffer(self._text(shape[0]), np.uint8)
        self._told = np.zeros((self._members.size, _SIZE.size), np.uint8)
        self._half: Any = start.all_gather(told, self._told, options._replace(name=f"{self._name}, sizes"))
        self._begun: list[Any] = []  # of the parts, in their order
        self._whole: Any = None  # the result, once its memory is there
        self._has_parts = False  # all of them have begun
        if of_thread.begun is not None:
            of_thread.begun.append(self)
        if not options.awaited:
            current().part(Progress).add(self)

    def _text(self, rows: int) -> bytes:
        return _SIZE.pack(rows, self._dtype.encode(), str(self._rest).encode())

    def wait(self) -> Any:
        """Blocks until the operation is over, and returns its array. Raises what became of it."""
        try:
            return super().wait()
        except BaseException:
            if self._options.awaited:  # nobody can wait for the other parts
                give_up(self._begun)
            raise

    def give_up(self) -> None:
        """Leaves the caller's memory alone from now on."""
        with self._turn:  # the thread of Progress may have begun the parts
            if not self._over:
                self._error = UnknownHandleError("this all_gather was given up", "gather once more")
                self._over = True
            for handle in (self._half, *self._begun):  # once more where a signal handler has ended this halfway
                give_up_one(handle)

    def blocker(self) -> Blocker:
        """What has to end before done() can change."""
        return blocker_of(self._half)

    def _advance(self, *, waits: bool) -> bool:
        while not self._over:
            if not waits and not self._half.done():
                return False
            try:
                if not self._half.taken:
                    self._half.wait()
                if self._has_parts:
                    self._result, self._over = self._whole, True
                else:
                    outer, of_thread.begun = of_thread.begun, self._begun
                    try:
                        self._half = self._begin_parts()
                    finally:
                        of_thread.begun = outer
                    self._has_parts = True
            except Exception as error:
                self._error, self._over = error, True
        return True

    def _begin_parts(self) -> Any:
        """Begins them. What a signal handler raises may leave this at any point: it then goes on with those left."""
        if current().epoch != self._epoch:
            raise RoundAbortedError("the view has ended in which this all_gather began", "repeat the step")
        rows = [self._rows_of(place) for place in range(self._members.size)]
        if self._whole is None:
            self._whole = self._memory_of(sum(rows))
        flat, width = arrays.flat(self._whole), math.prod(self._rest)
        place = self._members.ranks.index(self._own)
        if len(set(rows)) == 1:
            if not self._begun:
                name = f"{self._name}, {rows[0]} * {width} {self._dtype}"
                start.all_gather(arrays.flat(self._array), flat, self._options._replace(name=name))
            return self._begun[0]
        begin = begun = 0
        for other, count in enumerate(rows):
            part = flat[begin * width : (begin + count) * width]
            begin += count
            if count * width == 0:
                continue
            if len(self._begun) == begun:
                if other == place:
                    self._copy(part, self._array)
                root = self._members.ranks[other]
                name = f"{self._name}, {count} * {width} {self._dtype} of rank {root}"
                start.broadcast(part, root, self._options._replace(name=name))
            begun += 1
        return Together(list(self._begun), lambda: None)

    def _rows_of(self, place: int) -> int:
        told = self._told[place].tobytes()
        rows, dtype, rest = _SIZE.unpack(told)
        if told == self._text(rows):
            return int(rows)
        theirs = f"{dtype.rstrip(bytes(1)).decode()} rows of shape {rest.rstrip(bytes(1)).decode()}"
        raise MismatchError(
            f"{self._name}: rank {self._own} has {self._dtype} rows of shape {self._rest}, and rank "
            f"{self._members.ranks[place]} has {theirs}",
            "pass arrays that differ in their first dimension only",
        )

    def _memory_of(self, rows: int) -> Any:
        if self._out is None:
            return arrays.empty_flat(self._array, (rows, *self._rest))
        found = self._describe(self._out, True)
        wanted = rows * math.prod(self._rest)
        if found.elements != wanted or found.dtype.name != self._dtype:
            raise InvalidTensorError(
                f"`out` has {found.elements} elements of {found.dtype.name}, and the parts together {wanted} of "
                f"{self._dtype}",
                "leave out=None where sizes are not known",
            )
        return self._out
