# SPDX-License-Identifier: Apache-2.0
"""What is under way when a server is lost goes on in the next view (BPS_SERVER_FAILOVER).

In such a job an answer lands beside the caller's memory and counts once every member has its own, see kTwoPhase in
csrc/tensor/push_header.h. So when a view ends, each partition of an operation is in one of two states: every member has
the result in its hands, or every member still has its input. Which one it is, the members tell each other at the
beginning of the next view. Rounds are counted from init() here; each view counts its own from zero.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bps_rdma import _core, arrays

Name = tuple[str, str]  # the key of a group, and the name of a tensor in it


@dataclass(frozen=True)
class Interrupted:
    """An operation whose view has ended."""

    name: Name
    round: int
    operation: _core.Suspended


@dataclass(frozen=True)
class Report:
    """What one rank tells the others.

    Attributes:
        next: the first round of each name that it has not begun.
        missing: (name, round) of each interrupted operation: the partitions whose result it does not have.
        groups: the ranks of the groups that it is in, by their keys.
    """

    next: Mapping[Name, int] = field(default_factory=dict)
    missing: Mapping[tuple[Name, int], frozenset[int]] = field(default_factory=dict)
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def encode(self) -> bytes:
        """As bytes."""
        return json.dumps(
            [
                [[*name, number] for name, number in self.next.items()],
                [[*name, number, sorted(left)] for (name, number), left in self.missing.items()],
                [[key, ranks] for key, ranks in self.groups.items()],
            ]
        ).encode()

    @staticmethod
    def decode(data: bytes) -> Report:
        """The report that encode() has made these bytes of."""
        following, missing, groups = json.loads(data)
        return Report(
            {(key, name): number for key, name, number in following},
            {((key, name), number): frozenset(left) for key, name, number, left in missing},
            {key: tuple(ranks) for key, ranks in groups},
        )


@dataclass(frozen=True)
class Plan:
    """What all ranks do, which follows from the reports alone.

    Attributes:
        first: the first round of each name that some member has not begun: round 0 of the next view.
        again: (name, round) of what some member has not begun: the others start it once more, as that round.
        repeated: (name, round) of what every member has begun: the partitions that are summed again, if there are any.
        aborted: (name, round) that cannot be completed, because a member has given it up.
    """

    first: dict[Name, int]
    again: frozenset[tuple[Name, int]]
    repeated: dict[tuple[Name, int], list[int]]
    aborted: frozenset[tuple[Name, int]]


def plan(reports: Sequence[Report]) -> Plan:
    """What becomes of the interrupted operations, given the reports of all ranks in order."""
    groups = {key: ranks for report in reports for key, ranks in report.groups.items()}
    names = {name for report in reports for name in report.next}
    first = {name: min(reports[rank].next.get(name, 0) for rank in groups[name[0]]) for name in names}
    again, aborted, repeated = set(), set(), {}
    for name, number in sorted({each for report in reports for each in report.missing}):
        if number >= first[name]:
            again.add((name, number))
            continue
        ranks = groups[name[0]]
        left = [reports[rank].missing[name, number] for rank in ranks if (name, number) in reports[rank].missing]
        needed = frozenset[int]().union(*left)
        if needed and len(left) < len(ranks):
            aborted.add((name, number))
        else:
            repeated[name, number] = sorted(needed)
    return Plan(first, frozenset(again), repeated, frozenset(aborted))


def exchange(process: _core.Process, mine: bytes) -> list[bytes]:
    """What each rank passes, in order of ranks. Raises RoundAbortedError when this view ends, too."""
    sizes = np.zeros(process.workers, np.int64)
    sizes[process.rank] = len(mine)
    _gather(process, "~failover sizes", sizes)
    longest = int(sizes.max())
    texts = np.zeros((process.workers, longest), np.uint8)
    texts[process.rank, : len(mine)] = np.frombuffer(mine, np.uint8)
    _gather(process, "~failover reports", texts)
    return [texts[rank, : sizes[rank]].tobytes() for rank in range(process.workers)]


def _gather(process: _core.Process, name: str, whole: np.ndarray[Any, Any]) -> None:
    target = arrays.describe(whole, True)
    part = arrays.describe(whole.reshape(process.workers, -1)[process.rank], False)
    tensor = process.declare([(0, name, target.dtype, target.elements, str(whole.shape), "")])[0]
    kind = _core.Kind.all_gather
    sum_ = _core.ReduceOp.sum
    process.start_operation(
        tensor, kind, sum_, part, target, whole, True, True, 0, 1 << 30, True, survives=False
    ).wait()


@dataclass
class Numbering:
    """How the names and rounds of a view are called from init() on.

    Attributes:
        keys: of each group, by its number in this view; the same on all members, in every view.
        first: the round, from init() on, that is round 0 of a name in this view; 0 where there is none.
        next: the round, from init() on, that comes next, of names that are not declared in this view.
    """

    keys: dict[int, str] = field(default_factory=lambda: {0: "world"})
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
        """How many rounds this rank had begun before this view that count in it, because others had not."""
        name = self.name_of(tensor)
        return self.next.get(name, 0) - self.first[name] if name in self.first else 0

    def interrupted(self, operation: _core.Suspended) -> Interrupted:
        """An operation of this view that its end has interrupted."""
        tensor = operation.tensor
        return Interrupted(self.name_of(tensor), self.round_of(tensor, operation.round), operation)


def next_rounds(numbering: Numbering, tensors: Iterable[_core.Tensor]) -> dict[Name, int]:
    """The first round of each name, counted from init() on, that this rank has not begun."""
    return numbering.next | {
        numbering.name_of(tensor): numbering.round_of(tensor, tensor.next_round) for tensor in tensors
    }


def report(
    numbering: Numbering,
    groups: Mapping[int, tuple[int, ...]],
    following: Mapping[Name, int],
    interrupted: Iterable[Interrupted],
) -> Report:
    """This rank's report."""
    missing = {(each.name, each.round): frozenset(each.operation.missing) for each in interrupted}
    return Report(following, missing, {numbering.keys[number]: ranks for number, ranks in groups.items()})


def resume(
    process: _core.Process, made: Plan, each: Interrupted, group: int, tensor: _core.Tensor | None
) -> Interrupted | None:
    """Does what the plan says about one operation of this rank; what goes on under a name of its own is returned.

    Args:
        process: this process in the next view.
        group: the number of its group in the next view.
        tensor: with its name, in the next view, if the operation is started again.
    """
    operation, which = each.operation, (each.name, each.round)
    if which in made.aborted:
        operation.abort()
        return None
    if which in made.again:
        assert tensor is not None
        operation.continue_by(process.resume(tensor, operation, each.round - made.first[each.name], []))
        return None
    partitions = made.repeated[which]
    operation.accept(partitions)
    if not partitions:
        operation.complete()
        return None
    name = f"~repeat {each.round} of {each.name[1]}"
    by = process.resume(process.declare_like(operation.tensor, group, name), operation, 0, partitions)
    operation.continue_by(by)
    return Interrupted(each.name, each.round, by)
