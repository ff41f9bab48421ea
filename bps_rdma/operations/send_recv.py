# SPDX-License-Identifier: Apache-2.0
"""Messages from one rank to another one."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

from bps_rdma import arrays
from bps_rdma.group import Group
from bps_rdma.handle import PythonHandle
from bps_rdma.operations import point_to_point
from bps_rdma.operations.begun import of_thread, whole
from bps_rdma.operations.lanes import part_of
from bps_rdma.operations.messages import How, completed
from bps_rdma.operations.point_to_point import Subject

A = TypeVar("A")  # an array; one that is replaced in place keeps its type


def send(
    array: Any,
    name: str | None = None,
    *,
    dst: int,
    tag: int = 0,
    priority: int = 0,
    group: Group | None = None,
    timeout: float | None = None,
) -> None:
    """Sends `array` to worker rank `dst`, which receives it with recv(). No other rank takes part.

    Two ranks match the messages of one name, tag, direction and group by their order. It returns when the other rank
    has begun to receive and `array` may be changed again. Any number of messages may be under way: start them with
    send_async() and recv_async(), in any order, and wait() for all of them.

    Args:
        array: any shape, contiguous, on the CPU; dtypes as for push_pull_inplace().
        name: None: messages without a name.
        dst: worker rank that receives; of a group, its rank in the job.
        tag: a whole number; messages of other tags are others.
        priority, group, timeout: as for push_pull_inplace().

    Raises:
        InvalidArgumentError: `dst` is this rank, or is not in the group.
        MismatchError: the other rank expects another size or dtype; raised on both.
        PeerLostError, DeadlineError: as push_pull_inplace(). RoundAbortedError: a member was lost, also a server with
            BPS_SERVER_FAILOVER.
    """
    start = partial(point_to_point.send, part_of(array, False), None, dst, Subject(name, tag, group))
    completed(start, How(priority, timeout))


@whole
def send_async(
    array: A,
    name: str | None = None,
    *,
    dst: int,
    tag: int = 0,
    priority: int = 0,
    group: Group | None = None,
    timeout: float | None = None,
) -> PythonHandle[A]:
    """Starts send(), without waiting for the other rank; the handle gives `array`, which must not change until then."""
    part = part_of(array, False)
    return point_to_point.send(
        part, array, dst, Subject(name, tag, group), How(priority, timeout, False, of_thread.begun)
    )


def recv(
    array: A,
    name: str | None = None,
    *,
    src: int,
    tag: int = 0,
    priority: int = 0,
    group: Group | None = None,
    timeout: float | None = None,
) -> A:
    """Fills `array` with what worker rank `src` sends with send(), and returns it.

    Args:
        array: of the size and dtype that is sent; contiguous, writable, on the CPU.
        src: worker rank that sends.
        name, tag, priority, group, timeout: as for send().

    Raises:
        As send().
    """
    part = part_of(array, True)
    completed(partial(point_to_point.receive, part, array, src, Subject(name, tag, group)), How(priority, timeout))
    arrays.note_change(array)
    return array


@whole
def recv_async(
    array: A,
    name: str | None = None,
    *,
    src: int,
    tag: int = 0,
    priority: int = 0,
    group: Group | None = None,
    timeout: float | None = None,
) -> PythonHandle[A]:
    """Starts recv(); `array` must neither be read nor written until the handle is done."""
    part = part_of(array, True)
    arrays.note_change(array)
    return point_to_point.receive(
        part, array, src, Subject(name, tag, group), How(priority, timeout, False, of_thread.begun)
    )


def recv_any(
    array: Any,
    name: str | None = None,
    *,
    tag: int = 0,
    priority: int = 0,
    group: Group | None = None,
    timeout: float | None = None,
) -> int:
    """Fills `array` with what the first rank sends that sends something to this one, and returns that rank.

    Messages of each rank still come in their order, and recv() takes those that are left. What comes goes through
    memory of its own, and has been sent when it is found not to fit: MismatchError is then raised on this rank only.

    Args:
        array, name, tag, priority, group, timeout: as for recv().

    Raises:
        PeerLostError: no rank of the group is there any more, or one has given its message up. Otherwise as recv().
    """
    part = part_of(array, True)
    src = completed(partial(point_to_point.receive_from_any, part, Subject(name, tag, group)), How(priority, timeout))
    arrays.note_change(array)
    return int(src)
