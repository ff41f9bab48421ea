# SPDX-License-Identifier: Apache-2.0
"""Messages among all ranks of a group: gather, scatter and all_to_all. Each pair of ranks has a message of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from bps_rdma import _core, argument_types, arrays
from bps_rdma.agreement import group_of
from bps_rdma.errors import InvalidArgumentError, InvalidTensorError
from bps_rdma.group import Group
from bps_rdma.handle import PythonHandle
from bps_rdma.job import current
from bps_rdma.operations.begun import give_up, of_thread, start_all, whole
from bps_rdma.operations.lanes import ANYTHING, Content, Lanes, Part, part_of
from bps_rdma.operations.messages import How, Message, Together, completed, mismatch
from bps_rdma.operations.point_to_point import Subject, started
from bps_rdma.operations.start import check_apart, overlaps

A = TypeVar("A")  # an array; one that is replaced in place keeps its type


def exchange(
    kind: str,
    outs: Mapping[int, Part],
    intos: Mapping[int, Part | Content],
    subject: Subject,
    how: How,
    finish: Callable[[dict[int, Message]], Any],
) -> Together:
    """Starts one message with each rank that is named.

    Args:
        kind: of the operation.
        outs: what each rank is sent.
        intos: where what comes from each rank belongs; ANYTHING: what comes is of any size.
        subject, how: as for messages from one rank to another one.
        finish: makes the result of all messages, by rank, once they are complete.
    """

    def begin(all_lanes: Lanes, members: Group) -> Together:
        own = all_lanes.process.rank
        place = members.ranks.index(own)
        begun: list[Message] = [] if how.begun is None else how.begun
        first = len(begun)
        each = How(how.priority, how.timeout, how.awaited, begun)
        ranks = [*members.ranks[place + 1 :], *members.ranks[:place]]  # not all begin with the same one
        lanes = []
        for rank in ranks:
            if rank in outs or rank in intos:
                name = subject.lane_name(f"{kind} {min(own, rank)}~{max(own, rank)}", members)
                lanes.append(all_lanes.lane(rank, name))
        try:
            start_all(
                [partial(Message, lane, outs.get(lane.peer), intos.get(lane.peer), each) for lane in lanes],
                begun,
                lambda message: message.has_begun,
            )
        except BaseException:  # nobody gets a handle
            give_up(begun)
            raise
        messages = {message.lane.peer: message for message in begun[first:]}
        return Together(list(messages.values()), lambda: finish(messages))

    return started(begin, subject, how)


def gather(
    array: A,
    name: str | None = None,
    *,
    root: int = 0,
    uneven: bool = False,
    priority: int = 0,
    group: Group | None = None,
    out: Any = None,
    timeout: float | None = None,
) -> A | None:
    """Gathers one part of every rank on worker rank `root`, which gets them as one array; the others get None.

    Args:
        array: this rank's part, contiguous, on the CPU; dtypes as for push_pull_inplace().
        root: worker rank that gets all parts, in the order of ranks.
        uneven: the first dimensions of the parts differ. The same on all ranks.
        out: on the root: receives all parts. Default: a new array, whose first dimension is the sum of theirs.
        name, priority, group, timeout: as for push_pull_inplace().

    Raises:
        InvalidArgumentError: `root` is not in the group. MismatchError: another rank has another root, or a part that
            does not fit. Otherwise as push_pull_inplace().
    """
    start = partial(_gather, array, out, root, uneven, Subject(name, 0, group))
    found: A | None = completed(start, How(priority, timeout))
    return found


@whole
def gather_async(
    array: A,
    name: str | None = None,
    *,
    root: int = 0,
    uneven: bool = False,
    priority: int = 0,
    group: Group | None = None,
    out: Any = None,
    timeout: float | None = None,
) -> PythonHandle[A | None]:
    """Starts gather(); the handle gives the whole, or None. No array may be changed until then."""
    return _gather(array, out, root, uneven, Subject(name, 0, group), How(priority, timeout, False, of_thread.begun))


def scatter(
    array: Any,
    name: str | None = None,
    *,
    root: int = 0,
    sizes: Sequence[int] | None = None,
    priority: int = 0,
    group: Group | None = None,
    out: A,
    timeout: float | None = None,
) -> A:
    """Gives every rank a part of the `array` of worker rank `root`, in `out`, which it returns.

    Args:
        array: on the root: all parts, one after the other, in the order of ranks; contiguous, on the CPU. Ignored on
            the other ranks, where it may be None.
        root: worker rank whose array is taken.
        sizes: on the root: the first dimension of every rank's part. Default: all are equal.
        out: receives this rank's part. On the root it may be that part of `array`, but not overlap it elsewhere.
        name, priority, group, timeout: as for push_pull_inplace().

    Raises:
        As gather().
    """
    completed(partial(_scatter, array, out, root, sizes, Subject(name, 0, group)), How(priority, timeout))
    return out


@whole
def scatter_async(
    array: Any,
    name: str | None = None,
    *,
    root: int = 0,
    sizes: Sequence[int] | None = None,
    priority: int = 0,
    group: Group | None = None,
    out: A,
    timeout: float | None = None,
) -> PythonHandle[A]:
    """Starts scatter(); the handle gives `out`. No array may be changed until then."""
    return _scatter(array, out, root, sizes, Subject(name, 0, group), How(priority, timeout, False, of_thread.begun))


def all_to_all(
    array: A,
    name: str | None = None,
    *,
    sizes: Sequence[int] | None = None,
    out_sizes: Sequence[int] | None = None,
    priority: int = 0,
    group: Group | None = None,
    out: Any = None,
    timeout: float | None = None,
) -> A:
    """Every rank gives a part of its array to every rank, and returns what it has got, in the order of ranks.

    Args:
        array: the parts for all ranks, one after the other, in the order of ranks; contiguous, on the CPU.
        sizes: the first dimension of the part for each rank. Default: all are equal.
        out_sizes: the first dimension of the part that each rank gives this one. Default: as `sizes` is by default;
            with `sizes`, the others say it, which costs a copy of parts over 952 bytes.
        out: receives all parts; may not overlap `array`. Default: a new array.
        name, priority, group, timeout: as for push_pull_inplace().

    Raises:
        MismatchError: a rank gives a part of another size or dtype; raised on both. Otherwise as push_pull_inplace().
    """
    start = partial(_all_to_all, array, out, sizes, out_sizes, Subject(name, 0, group))
    found: A = completed(start, How(priority, timeout))
    return found


@whole
def all_to_all_async(
    array: A,
    name: str | None = None,
    *,
    sizes: Sequence[int] | None = None,
    out_sizes: Sequence[int] | None = None,
    priority: int = 0,
    group: Group | None = None,
    out: Any = None,
    timeout: float | None = None,
) -> PythonHandle[A]:
    """Starts all_to_all(); the handle gives the result. No array may be changed until then."""
    return _all_to_all(
        array, out, sizes, out_sizes, Subject(name, 0, group), How(priority, timeout, False, of_thread.begun)
    )


# ---- How they are made of messages


class _Rows:
    """An array as rows, which are cut into one part for each rank."""

    def __init__(self, array: Any, members: Group, sizes: Sequence[int] | None, what: str, *, writable: bool) -> None:
        self.memory = part_of(array, writable).memory  # or an error in the words of the caller
        self.flat = arrays.flat(array)
        self.shape = arrays.shape_of(array)
        self.width = math.prod(self.shape[1:])
        if sizes is None:
            if self.shape[0] % members.size:
                raise InvalidTensorError(
                    f"{what} has {self.shape[0]} rows, which cannot be divided among {members.size} ranks",
                    "pass the sizes of the parts",
                )
            sizes = [self.shape[0] // members.size] * members.size
        self.sizes = argument_types.whole_numbers("sizes" if what == "array" else "out_sizes", sizes)
        if len(self.sizes) != members.size or sum(self.sizes) != self.shape[0] or min(self.sizes) < 0:
            raise InvalidArgumentError(
                f"sizes {self.sizes} are not those of {members.size} parts of the {self.shape[0]} rows of {what}",
                "pass one whole number for each rank of the group, whose sum is the first dimension",
            )
        self._writable = writable
        self._ranks = members.ranks

    def part(self, rank: int) -> Part:
        place = self._ranks.index(rank)
        begin = sum(self.sizes[:place]) * self.width
        return part_of(self.flat[begin : begin + self.sizes[place] * self.width], self._writable)


def _copy(name: str, own: int, target: Part, source: Part) -> None:
    if target.content != source.content:
        raise mismatch(name, own, source.content, own, target.content)
    if source.content.nbytes > 0:
        _core.copy_bytes(target.memory.address, source.memory.address, source.content.nbytes)


def _check_rows(array: Any, instead: str) -> None:
    """Refuses rows without elements where they are counted by what comes."""
    rows, *rest = arrays.shape_of(array)
    if rows > 0 and math.prod(rest) == 0:
        raise InvalidTensorError("the rows of the array have no elements, so nobody can tell how many come", instead)


def _gather(array: Any, out: Any, root: int, uneven: bool, subject: Subject, how: How) -> PythonHandle[Any]:
    members, own = _members(subject), current().process.rank
    root = argument_types.check_root(root, members.ranks)
    part = part_of(array, False)
    uneven = argument_types.truth("uneven", uneven)
    if own != root:
        return exchange("gather", {root: part}, {}, subject, how, lambda _: None)
    others = [rank for rank in members.ranks if rank != own]
    if uneven:
        _check_rows(array, "leave them out")
        return exchange(
            "gather",
            {},
            dict.fromkeys(others, ANYTHING),
            subject,
            how,
            lambda got: _joined(array, out, members, part, got),
        )
    shape = arrays.shape_of(array)
    whole = arrays.empty_flat(array, (members.size * shape[0], *shape[1:])) if out is None else out
    rows = _Rows(whole, members, None, "out", writable=True)
    _copy("gather", own, rows.part(own), part)
    arrays.note_change(out)
    return exchange("gather", {}, {rank: rows.part(rank) for rank in others}, subject, how, lambda _: whole)


def _scatter(
    array: Any, out: Any, root: int, sizes: Sequence[int] | None, subject: Subject, how: How
) -> PythonHandle[Any]:
    members, own = _members(subject), current().process.rank
    root = argument_types.check_root(root, members.ranks)
    target = part_of(out, True)
    arrays.note_change(out)
    if own != root:
        return exchange("scatter", {}, {root: target}, subject, how, lambda _: out)
    rows = _Rows(array, members, sizes, "array", writable=False)
    part = rows.part(own)
    check_apart(target.memory, rows.memory, part.memory.address)
    _copy("scatter", own, target, part)
    outs = {rank: rows.part(rank) for rank in members.ranks if rank != own}
    return exchange("scatter", outs, {}, subject, how, lambda _: out)


def _all_to_all(
    array: Any,
    out: Any,
    sizes: Sequence[int] | None,
    out_sizes: Sequence[int] | None,
    subject: Subject,
    how: How,
) -> PythonHandle[Any]:
    members, own = _members(subject), current().process.rank
    rows = _Rows(array, members, sizes, "array", writable=False)
    if out is not None and overlaps(part_of(out, True).memory, rows.memory):
        raise InvalidTensorError("`out` overlaps the array, whose parts are to be sent", "pass an array of its own")
    others = [rank for rank in members.ranks if rank != own]
    outs = {rank: rows.part(rank) for rank in others}
    if sizes is not None and out_sizes is None:
        _check_rows(array, "pass out_sizes")
        own_part = rows.part(own)
        return exchange(
            "all_to_all",
            outs,
            dict.fromkeys(others, ANYTHING),
            subject,
            how,
            lambda got: _joined(array, out, members, own_part, got),
        )
    if out is None:
        first = rows.shape[0] if out_sizes is None else sum(argument_types.whole_numbers("out_sizes", out_sizes))
        out = arrays.empty_flat(array, (first, *rows.shape[1:]))
    else:
        arrays.note_change(out)
    targets = _Rows(out, members, out_sizes, "out", writable=True)
    _copy("all_to_all", own, targets.part(own), rows.part(own))
    intos = {rank: targets.part(rank) for rank in others}
    return exchange("all_to_all", outs, intos, subject, how, lambda _: out)


def _joined(array: Any, out: Any, members: Group, own_part: Part, got: dict[int, Message]) -> Any:
    """All parts as one array, where their sizes were not known."""
    own = current().process.rank
    contents = {rank: own_part.content if rank == own else got[rank].content for rank in members.ranks}
    shape = arrays.shape_of(array)
    width = math.prod(shape[1:])
    for rank, content in contents.items():
        if content.dtype != own_part.content.dtype or content.elements % max(width, 1):
            in_rows = Content(width, 0, f"{own_part.content.dtype} in each row")
            raise mismatch(got[rank].lane.name, rank, content, own, in_rows)
    rows = sum(content.elements for content in contents.values()) // max(width, 1)
    whole = arrays.empty_flat(array, (rows, *shape[1:])) if out is None else out
    target = part_of(whole, True)
    if out is not None:
        arrays.note_change(out)
        if target.content != Content(
            rows * width, sum(one.nbytes for one in contents.values()), own_part.content.dtype
        ):
            raise InvalidTensorError(
                f"`out` has {target.content}, but {rows * width} have come", "leave out=None where sizes are not known"
            )
    address, kept = target.memory.address, own_part.memory
    if overlaps(target.memory, kept):  # what is written for the ranks before this one would replace it
        kept = arrays.describe(arrays.empty_bytes(kept.nbytes), True)
        _core.copy_bytes(kept.address, own_part.memory.address, kept.nbytes)
    for rank, content in contents.items():
        if content.nbytes > 0:
            source = kept.address if rank == own else got[rank].received.ctypes.data
            _core.copy_bytes(address, source, content.nbytes)
        address += content.nbytes
    return whole


def _members(subject: Subject) -> Group:
    job = current()
    return job.world if subject.group is None else group_of(job, subject.group)
