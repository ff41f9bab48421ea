# SPDX-License-Identifier: Apache-2.0
"""Starts messages from one rank to another one. The public functions and the torch face call these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from bps_rdma import argument_types
from bps_rdma.agreement import group_of
from bps_rdma.errors import InvalidArgumentError, RoundAbortedError
from bps_rdma.group import Group
from bps_rdma.handle import PythonHandle
from bps_rdma.job import current, resume
from bps_rdma.operations.lanes import Lane, Lanes, Part, lanes_of
from bps_rdma.operations.messages import How, Message
from bps_rdma.operations.receivers import ReceiveFromAny

T = TypeVar("T")


class Subject(NamedTuple):
    """The messages that a call belongs to: two ranks match those of one subject by their order.

    Attributes:
        name: None: those without a name.
        tag: those of other tags are others.
        group: the ranks; None: all workers.
    """

    name: str | None = None
    tag: int = 0
    group: Group | None = None

    def lane_name(self, kind: str, members: Group) -> str:
        """The name of a lane, the same on both ranks."""
        of_group = "" if members.id == 0 else f" in group {members.id}"
        named = "" if self.name is None else f" {self.name!r}"
        return f"{kind}{named}{of_group}, tag {self.tag}" if self.tag else f"{kind}{named}{of_group}"


def send(part: Part, result: Any, dst: int, subject: Subject, how: How) -> Message:
    """Starts sending to worker rank `dst`."""

    def begin(all_lanes: Lanes, members: Group) -> Message:
        return Message(_lane(all_lanes, members, subject, dst, sends=True), part, None, how, result)

    return started(begin, subject, how, peer=("dst", dst))


def receive(part: Part, result: Any, src: int, subject: Subject, how: How) -> PythonHandle[Any]:
    """Starts receiving from worker rank `src`."""

    def begin(all_lanes: Lanes, members: Group) -> PythonHandle[Any]:
        lane = _lane(all_lanes, members, subject, src, sends=False)
        with lane.lock:
            if not lane.expected:
                return Message(lane, None, part, how, result)
        return ReceiveFromAny([lane], part, how, result)

    return started(begin, subject, how, peer=("src", src))


def receive_from_any(part: Part, subject: Subject, how: How) -> ReceiveFromAny:
    """Starts receiving from the rank of the group that sends first; its number is the result."""

    def begin(all_lanes: Lanes, members: Group) -> ReceiveFromAny:
        others = [rank for rank in members.ranks if rank != all_lanes.process.rank]
        if not others:
            raise InvalidArgumentError("no other rank is in the group", "receive from another rank")
        found = [_lane(all_lanes, members, subject, rank, sends=False) for rank in others]
        return ReceiveFromAny(found, part, how)

    return started(begin, subject, how)


def _lane(all_lanes: Lanes, members: Group, subject: Subject, peer: int, *, sends: bool) -> Lane:
    key = subject.name, subject.tag, members.id, peer, sends
    found = all_lanes.of_subject.get(key)
    if found is None:
        own = all_lanes.process.rank
        kind = f"send {own}->{peer}" if sends else f"send {peer}->{own}"
        found = all_lanes.of_subject[key] = all_lanes.lane(peer, subject.lane_name(kind, members))
    return found


def started(begin: Callable[[Lanes, Group], T], subject: Subject, how: How, peer: tuple[str, int] | None = None) -> T:
    """Begins something in the present view; once more if that view has ended before anything was sent.

    Args:
        begin: called with the lanes and the group.
        subject, how: to be checked.
        peer: the argument that says another rank, and its value.
    """
    name, tag, _ = subject
    if not (type(tag) is int and (name is None or isinstance(name, str))):  # formatted, any object would be a text
        argument_types.explain(name=name)
        if argument_types.whole(tag) is None:
            raise InvalidArgumentError(f"tag={tag!r} is not a whole number", "pass one, the same on both ranks")
    try:
        job = current()
        members = job.world if subject.group is None else group_of(job, subject.group)
        if peer is not None:
            ranks, rank = members.ranks, peer[1]
            if (type(rank) is not int and argument_types.whole(rank) is None) or (
                rank not in ranks or rank == job.process.rank
            ):
                raise InvalidArgumentError(
                    f"{peer[0]}={rank!r} is not another rank of the group {ranks}",
                    "name a worker rank of the group, and not this one",
                )
        return begin(lanes_of(job), members)
    except RoundAbortedError:
        if not resume():
            raise
        return started(begin, subject, how, peer)
    except TypeError:
        argument_types.explain(name=subject.name, priority=how.priority, timeout=how.timeout)
        raise
