# SPDX-License-Identifier: Apache-2.0
"""Operations that are under way when a server is lost go on in the next view (BPS_SERVER_FAILOVER).

In such a job an answer counts once every member has its own, see kTwoPhase in csrc/tensor/push_header.h. So when a view
ends, for each byte of an operation that is not complete one of two things is true: some member has the result in its
hands, or every member still has its input. Which one it is, the members tell each other at the beginning of the next
view. Rounds are counted from init() here; each view counts its own from zero.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bps_rdma import _core, arrays

WORLD = "world"  # the key of the group of all workers
Name = tuple[str, str]  # the key of a group, and the name of a tensor in it
Which = tuple[Name, int]  # an operation: its name and round


@dataclass(frozen=True)
class InterruptedOperation:
    """An operation whose view has ended."""

    name: Name
    round: int
    operation: _core.Suspended

    @property
    def which(self) -> Which:
        """Its name and round."""
        return self.name, self.round


@dataclass(frozen=True)
class RankReport:
    """A rank's account of its operations, which it tells all others.

    Attributes:
        since: the first view from which on it can go on with everything. One that has entered in this view, or lacks a
            worker of its view before, can do so from this view on.
        next: the first round of each name that it has not begun.
        missing: of each interrupted operation, the partitions whose result it does not have, and how many bytes of that
            it has; these have come over its input.
        whole: of each interrupted operation, the partitions whose result it has, although nobody may have used it yet.
        late: those of them whose deadline has passed here, and why that is a failure.
        failed: operations whose deadline has passed on all ranks, as this one has been told.
        groups: the ranks of the groups that it is in, by their keys.
    """

    since: int
    next: Mapping[Name, int] = field(default_factory=dict)
    missing: Mapping[Which, Mapping[int, int]] = field(default_factory=dict)
    whole: Mapping[Which, frozenset[int]] = field(default_factory=dict)
    late: Mapping[Which, str] = field(default_factory=dict)
    failed: Mapping[Which, str] = field(default_factory=dict)
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Returns the report as bytes."""
        return json.dumps(
            [
                self.since,
                [[*name, number] for name, number in self.next.items()],
                [[*name, number, sorted(left.items())] for (name, number), left in self.missing.items()],
                [[*name, number, sorted(some)] for (name, number), some in self.whole.items()],
                [[*name, number, why] for (name, number), why in self.late.items()],
                [[*name, number, why] for (name, number), why in self.failed.items()],
                [[key, ranks] for key, ranks in self.groups.items()],
            ]
        ).encode()

    @staticmethod
    def decode(data: bytes) -> RankReport:
        """Returns the report that encode() has made these bytes of."""
        since, following, missing, whole, late, failed, groups = json.loads(data)
        return RankReport(
            since,
            {(key, name): number for key, name, number in following},
            {((key, name), number): dict(left) for key, name, number, left in missing},
            {((key, name), number): frozenset(some) for key, name, number, some in whole},
            {((key, name), number): why for key, name, number, why in late},
            {((key, name), number): why for key, name, number, why in failed},
            {key: tuple(ranks) for key, ranks in groups},
        )


@dataclass(frozen=True)
class Gift:
    """The part of a partition's result that one rank gives the others.

    Attributes:
        rank: who has it.
        size: its first bytes; None: all of it.
    """

    rank: int
    size: int | None


@dataclass(frozen=True)
class Continuation:
    """The steps of all ranks, which follow from the reports alone.

    Attributes:
        first: the first round of each name that some member has not begun: round 0 of the next view.
        again: operations that some member has not begun: the others start them once more, as that round.
        given: the parts of results that some members lack and another one has. These are given first of all.
        repeated: what every member has begun: the partitions that are summed again, if there are any; of their first
            bytes, which were given, the result is known, and stays.
        failed: operations that fail on all ranks, because a deadline has passed on one, with the reason.
        aborted: operations that cannot be completed, because the caller of a member was interrupted.
    """

    first: dict[Name, int]
    again: frozenset[Which]
    given: dict[Which, dict[int, Gift]]
    repeated: dict[Which, list[int]]
    failed: dict[Which, str]
    aborted: frozenset[Which]


def can_go_on(reports: Sequence[RankReport], epoch: int) -> bool:
    """Returns whether operations that were under way go on in this view. No rank can tell by itself.

    A scheduler may have died when it had welcomed some ranks to a view and not others; these have seen other views end
    than those.
    """
    return reports[0].since < epoch and all(report.since == reports[0].since for report in reports)


def plan(reports: Sequence[RankReport]) -> Continuation:
    """Decides what becomes of the interrupted operations, given the reports of all ranks in order."""
    groups = {key: ranks for report in reports for key, ranks in report.groups.items()}
    names = {name for report in reports for name in report.next}
    first = {name: min(reports[rank].next.get(name, 0) for rank in groups[name[0]]) for name in names}
    failed = {which: why for report in reports for which, why in report.failed.items()}
    late = {which: why for report in reports for which, why in report.late.items()}
    again, aborted = set[Which](), set[Which]()
    given: dict[Which, dict[int, Gift]] = {}
    repeated: dict[Which, list[int]] = {}
    for which in sorted({each for report in reports for each in report.missing} - failed.keys()):
        name, number = which
        ranks = groups[name[0]]
        left = {rank: reports[rank].missing[which] for rank in ranks if which in reports[rank].missing}
        needed = frozenset[int]().union(*left.values())
        begun_by_all = number < first[name]
        if begun_by_all and not needed:
            repeated[which] = []
        elif which in late:  # nobody can have completed it, and one rank no longer waits for it
            failed[which] = late[which]
        elif not begun_by_all:
            again.add(which)
        elif len(left) < len(ranks):
            aborted.add(which)
        else:
            whole = {rank: reports[rank].whole.get(which, frozenset()) for rank in ranks}
            gifts = {partition: _gift(partition, left, whole) for partition in sorted(needed)}
            repeated[which] = [partition for partition, gift in gifts.items() if gift is None or gift.size is not None]
            if any(gifts.values()):
                given[which] = {partition: gift for partition, gift in gifts.items() if gift is not None}
    return Continuation(first, frozenset(again), given, repeated, failed, frozenset(aborted))


def _gift(partition: int, left: Mapping[int, Mapping[int, int]], whole: Mapping[int, frozenset[int]]) -> Gift | None:
    """Returns the part of a result that must be given before the partition is summed, or instead; None: nothing."""
    for rank, some in whole.items():
        if partition in some:
            return Gift(rank, None)
    have = {rank: missing[partition] for rank, missing in left.items() if partition in missing}
    most = max(have.values())
    if min(have.values()) == most:
        return None
    return Gift(next(rank for rank, size in have.items() if size == most), most)


def exchange(process: _core.Process, mine: bytes) -> list[bytes]:
    """Gathers the bytes of every rank, in order of ranks. Raises RoundAbortedError when this view ends, too."""
    sizes = np.zeros(process.workers, np.int64)
    sizes[process.rank] = len(mine)
    _gather(process, "~failover sizes", sizes)
    longest = int(sizes.max())
    texts = np.zeros((process.workers, longest), np.uint8)
    texts[process.rank, : len(mine)] = np.frombuffer(mine, np.uint8)
    _gather(process, "~failover reports", texts)
    return [texts[rank, : sizes[rank]].tobytes() for rank in range(process.workers)]


def _gather(process: _core.Process, name: str, whole: np.ndarray[Any, Any]) -> None:
    part = arrays.describe(whole.reshape(process.workers, -1)[process.rank], False)
    _run(process, _core.Kind.all_gather, 0, name, part, whole)


def _run(
    process: _core.Process, kind: _core.Kind, group: int, name: str, source: arrays.Memory | None, array: Any
) -> None:
    """One operation, with its result in `array`, which is also what is pushed where there is no source."""
    target = arrays.describe(array, True)
    tensor = process.declare([(group, name, target.dtype, target.elements, str(array.shape), "")])[0]
    sum_ = _core.ReduceOp.sum
    _core.start_operation(
        process, tensor, kind, sum_, source or target, target, array, True, True, 0, 1 << 30, True, survives=False
    ).wait()


def give(
    process: _core.Process, made: Continuation, interrupted: Iterable[InterruptedOperation], numbers: Mapping[str, int]
) -> None:
    """Gives parts of results to the members that lack them. From the return on every member has them.

    Args:
        process: this process in the next view.
        interrupted: the operations of this rank.
        numbers: of the groups that it is in, in the next view, by their keys.

    Raises:
        RoundAbortedError: this view ends, too; the next report says what has been given until then.
    """
    if not made.given:
        return
    for each in sorted(interrupted, key=lambda one: one.which):
        gifts = made.given.get(each.which)
        if not gifts:
            continue
        operation = each.operation
        lengths = {partition: operation.length(partition) for partition in gifts}
        parts = {partition: lengths[partition] if gift.size is None else gift.size for partition, gift in gifts.items()}
        given = np.zeros(sum(parts.values()), np.uint8)
        places = dict(zip(parts, np.split(given, np.cumsum(list(parts.values()))[:-1]), strict=True))
        for partition, gift in gifts.items():
            if gift.rank == process.rank:
                operation.read(partition, arrays.describe(places[partition], True))
        name = f"~given {each.round} of {each.name[1]}"
        _run(process, _core.Kind.push_pull, numbers[each.name[0]], name, None, given)
        for partition in gifts:
            operation.write(partition, arrays.describe(places[partition], False))
    # Nobody goes on, and perhaps lets go of what it has, before all have what they lacked.
    _gather(process, "~failover given", np.zeros(process.workers, np.int64))


@dataclass
class Numbering:
    """Translates the names and rounds of a view to those that hold from init() on.

    Attributes:
        keys: of each group, by its number in this view; the same on all members, in every view.
        first: the round, from init() on, that is round 0 of a name in this view; 0 where there is none.
        next: the round, from init() on, that comes next, of names that are not declared in this view.
    """

    keys: dict[int, str] = field(default_factory=lambda: {0: WORLD})
    first: dict[Name, int] = field(default_factory=dict)
    next: dict[Name, int] = field(default_factory=dict)

    def number_of(self, key: str) -> int:
        """The number of a group in this view."""
        return next(number for number, known in self.keys.items() if known == key)

    def name_of(self, tensor: _core.Tensor) -> Name:
        """The name of a declared tensor."""
        return self.keys[tensor.group], tensor.name

    def round_of(self, tensor: _core.Tensor, number: int) -> int:
        """The round, from init() on, that has this number in the view of the tensor."""
        return self.first.get(self.name_of(tensor), 0) + number

    def begun(self, tensor: _core.Tensor) -> int:
        """Counts the rounds that this rank began before this view and that count in it, because others had not."""
        name = self.name_of(tensor)
        return self.next.get(name, 0) - self.first[name] if name in self.first else 0

    def interrupted(self, operation: _core.Suspended) -> InterruptedOperation:
        """An operation of this view that its end has interrupted."""
        tensor = operation.tensor
        return InterruptedOperation(self.name_of(tensor), self.round_of(tensor, operation.round), operation)


def next_rounds(numbering: Numbering, tensors: Iterable[_core.Tensor]) -> dict[Name, int]:
    """The first round of each name, counted from init() on, that this rank has not begun."""
    return numbering.next | {
        numbering.name_of(tensor): numbering.round_of(tensor, tensor.next_round) for tensor in tensors
    }


def report(
    since: int,
    numbering: Numbering,
    groups: Mapping[int, tuple[int, ...]],
    following: Mapping[Name, int],
    interrupted: Iterable[InterruptedOperation],
    failed: Mapping[Which, _core.Suspended],
) -> RankReport:
    """This rank's report."""
    interrupted = list(interrupted)
    missing = {each.which: each.operation.missing for each in interrupted}
    whole = {each.which: frozenset(each.operation.whole) for each in interrupted}
    late = {each.which: each.operation.lateness for each in interrupted if each.operation.lateness}
    named = {numbering.keys[number]: ranks for number, ranks in groups.items()}
    return RankReport(
        since, following, missing, whole, late, {which: one.lateness for which, one in failed.items()}, named
    )


def resume(
    process: _core.Process, made: Continuation, each: InterruptedOperation, group: int, tensor: _core.Tensor | None
) -> InterruptedOperation | None:
    """Does what the plan says about one operation of this rank; what goes on under a name of its own is returned.

    Args:
        process: this process in the next view.
        group: the number of its group in the next view.
        tensor: with its name, in the next view, if the operation is started again.
    """
    operation, which = each.operation, each.which
    if which in made.aborted:
        operation.abort()
        return None
    if which in made.failed:
        operation.fail(made.failed[which])
        return None
    if which in made.again:
        assert tensor is not None
        process.resume(tensor, operation, each.round - made.first[each.name], [])
        return None
    partitions = made.repeated[which]
    operation.take_landed()
    if not partitions:
        operation.complete()
        return None
    name = f"~repeat {each.round} of {each.name[1]}"
    by = process.resume(process.declare_like(operation.tensor, group, name), operation, 0, partitions)
    return InterruptedOperation(each.name, each.round, by)
