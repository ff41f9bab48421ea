# SPDX-License-Identifier: Apache-2.0
"""An all_gather whose parts differ in size: the ranks tell each other the sizes, then each broadcasts its part."""

from __future__ import annotations

import contextlib
import math
import struct
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from bps_rdma import _core, arrays
from bps_rdma.agreement import group_of
from bps_rdma.blockers import Blocker
from bps_rdma.errors import BpsError, InvalidTensorError, MismatchError, RoundAbortedError, UnknownHandleError
from bps_rdma.handle import blocker_of
from bps_rdma.job import current
from bps_rdma.kept_errors import keeping, runs_handlers
from bps_rdma.operations import start
from bps_rdma.operations.begun import give_up_one, of_thread, start_all
from bps_rdma.operations.messages import Together
from bps_rdma.operations.options import OperationOptions
from bps_rdma.operations.progress import Progress
from bps_rdma.operations.stepwise import StepwiseHandle, new_lock

_SIZE = struct.Struct("<q16s40s")  # rows, dtype, and the other dimensions as text


def _copy_on_cpu(part: Any, array: Any) -> None:
    source = arrays.describe(array, False)
    _core.copy_bytes(arrays.describe(part, True).address, source.address, source.nbytes)


class _Line:
    """The gathers of one name whose parts have not begun, in the order of their calls, which is that of all ranks.

    Parts of one size have one name, and ranks match operations of one name by their order. So parts begin in the order
    of the calls, whenever sizes come; and once the sizes have come, all parts begin, whatever becomes of the call here:
    they do on all other ranks.
    """

    def __init__(self) -> None:
        self.lock = new_lock()  # keeps this order and that of the sizes alike
        self._waiting: deque[UnevenGather] = deque()

    def add(self, gather: UnevenGather) -> None:
        """Adds one that begins; under the lock."""
        self._waiting.append(gather)

    def remove(self, gather: UnevenGather) -> None:
        """Removes one that has begun, or that will not."""
        with self.lock, contextlib.suppress(ValueError):
            self._waiting.remove(gather)

    def until(self, gather: UnevenGather) -> list[UnevenGather]:
        """Those before this one, and this one; none, where it is not here any more."""
        with self.lock:
            found = list(self._waiting)
        return found[: found.index(gather) + 1] if gather in found else []


class _Lines:
    """Those of all names; a part of the job."""

    def __init__(self) -> None:
        self._lines: dict[tuple[int, str], _Line] = {}

    def of(self, group: int, name: str) -> _Line:
        """That of a name in a group."""
        return self._lines.setdefault((group, name), _Line())


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
        self._sizes: list[Any] = []  # the handle of the sizes
        self._begun: list[Any] = []  # those of the parts, in their order
        self._parts: Any = None  # all of them
        self._whole: Any = None  # the result, once its memory is there
        self._has_begun = False  # the parts have, or never will
        self._beginning = new_lock()  # before the one of the line; those behind this one begin it as well
        self._line = running.part(_Lines).of(self._members.id, self._name)
        if of_thread.begun is not None:
            of_thread.begun.append(self)
        try:
            with self._line.lock:
                self._line.add(self)
                how = options._replace(name=f"{self._name}, sizes")
                self._start(self._sizes, partial(start.all_gather, told, self._told, how))
            if not options.awaited:
                current().part(Progress).add(self)
        except BaseException:
            self.give_up()
            raise

    @staticmethod
    def _start(begun: list[Any], *starts: Callable[[], Any], has_to: bool = False) -> None:
        outer, of_thread.begun = of_thread.begun, begun
        try:
            start_all(starts, begun, has_to=has_to)
        finally:
            of_thread.begun = outer

    def _text(self, rows: int) -> bytes:
        return _SIZE.pack(rows, self._dtype.encode(), str(self._rest).encode())

    def wait(self) -> Any:
        """Blocks until the operation is over, and returns its array. Raises what became of it."""
        try:
            return super().wait()
        except BaseException:
            if self._options.awaited:  # nobody can wait for it again
                self.give_up()
            raise

    def give_up(self) -> None:
        """Leaves the caller's memory alone from now on."""
        with self._turn:  # the thread of Progress may have begun the parts
            if not self._over:
                self._error = UnknownHandleError("this all_gather was given up", "gather once more")
                self._over = True
            for handle in self._sizes:  # once more where a signal handler has ended this halfway
                give_up_one(handle)
            if self._have_sizes_come():
                self._begin(waits=True)
            self._line.remove(self)
            for handle in self._begun:
                give_up_one(handle)

    def _have_sizes_come(self) -> bool:
        """Whether they have, and so the parts begin on all ranks. The sizes are over."""
        with self._beginning, keeping:
            try:
                for handle in self._sizes:
                    if not handle.taken:
                        handle.wait()
            except BpsError:
                return False  # they have come nowhere
            return bool(self._sizes)

    def blocker(self) -> Blocker:
        """What has to end before done() can change."""
        for gather in self._line.until(self):
            if not gather._has_begun:
                return blocker_of(gather._sizes[0])
        return blocker_of(self._parts or self._sizes[0])

    def _advance(self, *, waits: bool) -> bool:
        if not self._begin(waits=waits):
            return False
        if self._parts is not None:
            if not waits and not self._parts.done():
                return False
            try:
                self._result = self._parts.wait()
            except Exception as error:  # the parts give it again
                if not isinstance(error, BpsError) and runs_handlers():
                    raise
                self._error = self._error or error
        self._over = True
        return True

    def _begin(self, *, waits: bool) -> bool:
        """Begins the parts, behind those of the gathers before. Returns whether they have begun, or never will."""
        return self._has_begun or all(gather._begin_own(waits=waits) for gather in self._line.until(self))

    def _begin_own(self, *, waits: bool) -> bool:
        if not self._beginning.acquire(blocking=waits):
            return self._has_begun  # another thread is at it
        try:
            if self._has_begun:
                return True
            (sizes,) = self._sizes
            if not waits and not sizes.done():
                return False
            try:
                if not sizes.taken:
                    with keeping:
                        sizes.wait()
                self._begin_parts()
            except BpsError as error:
                self._error = self._error or error
            except Exception as error:
                if runs_handlers():
                    raise
                self._error = self._error or error
            self._has_begun = True
            self._line.remove(self)
            return True
        finally:
            self._beginning.release()

    def _begin_parts(self) -> None:
        """Begins them. What a signal handler raises may leave this at any point: it is then called once more."""
        if current().epoch != self._epoch:
            raise RoundAbortedError("the view has ended in which this all_gather began", "repeat the step")
        rows = [self._rows_of(place) for place in range(self._members.size)]
        if self._whole is None:
            self._whole = self._memory_of(sum(rows))
        if not self._begun:
            self._start(self._begun, *self._starts(rows), has_to=True)
        self._parts = Together(list(self._begun), lambda: self._whole) if self._begun else None
        self._result = self._whole

    def _starts(self, rows: list[int]) -> list[Callable[[], Any]]:
        """What starts each part; the own one is copied to its place."""
        flat, width = arrays.flat(self._whole), math.prod(self._rest)
        place = self._members.ranks.index(self._own)
        if len(set(rows)) == 1:
            how = self._options._replace(name=f"{self._name}, {rows[0]} * {width} {self._dtype}")
            return [partial(start.all_gather, arrays.flat(self._array), flat, how)]
        begin = 0
        starts: list[Callable[[], Any]] = []
        for other, count in enumerate(rows):
            part = flat[begin * width : (begin + count) * width]
            begin += count
            if count * width == 0:
                continue
            if other == place:
                self._copy(part, self._array)
            root = self._members.ranks[other]
            how = self._options._replace(name=f"{self._name}, {count} * {width} {self._dtype} of rank {root}")
            starts.append(partial(start.broadcast, part, root, how))
        return starts

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
        """`out`, or new memory; also where `out` does not fit, as the other ranks get this rank's part all the same."""
        if self._out is not None:
            found = self._describe(self._out, True)
            wanted = rows * math.prod(self._rest)
            if found.elements == wanted and found.dtype.name == self._dtype:
                return self._out
            self._error = InvalidTensorError(
                f"`out` has {found.elements} elements of {found.dtype.name}, and the parts together {wanted} of "
                f"{self._dtype}",
                "leave out=None where sizes are not known",
            )
        return arrays.empty_flat(self._array, (rows, *self._rest))
