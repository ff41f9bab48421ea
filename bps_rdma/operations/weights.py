# SPDX-License-Identifier: Apache-2.0
"""Weights that the servers keep, for asynchronous training; see docs/async.md."""

from __future__ import annotations

from typing import Any, TypeVar

from bps_rdma import argument_types, arrays
from bps_rdma._core import Handle
from bps_rdma.agreement import group_of
from bps_rdma.errors import InvalidArgumentError
from bps_rdma.group import Group
from bps_rdma.job import current
from bps_rdma.operations import start
from bps_rdma.operations.begun import give_up, of_thread, whole
from bps_rdma.operations.options import NONE, Moving, OperationOptions, moving
from bps_rdma.positions import Unpack, keywords_of, keywords_since

A = TypeVar("A")  # an array; one that is replaced in place keeps its type

_MOST_AHEAD = (1 << 16) - 2


@keywords_since("root", "name", "priority", "group", "timeout")
def store(
    array: A,
    name: str,
    *,
    root: int = 0,
    priority: int = 0,
    group: Group | None = None,
    timeout: float | None = None,
) -> A:
    """Makes the servers keep the `array` of worker rank `root`, replaces it by that on every rank, and returns it.

    A collective call: every rank of the group must make it. From then on each rank can accumulate() by itself. Calling
    it again replaces what the servers keep; unstore() gives their memory back. If it fails, they keep what they kept,
    or, where a name has several partitions, perhaps the new array in some of them: call it again.

    Args:
        array: as for push_pull_inplace().
        root: the rank whose array is kept.
        name: of the weights, as accumulate() calls them.
        priority, group, timeout: as for push_pull_inplace().

    Raises:
        InvalidArgumentError: `root` is not in the group; or the ranks of a host sum first: set BPS_ASYNC=1 in
            the whole job. Otherwise as push_pull_inplace().
        BpsError: the servers have no memory for it. They keep at most three quarters of what they have.
    """
    start.store(array, root, _of_weights(moving(name, True, priority=priority, group=group, timeout=timeout))).wait()
    arrays.note_change(array)
    return array


@keywords_since("name", "priority", "group", "timeout")
def unstore(
    array: A,
    name: str,
    *,
    priority: int = 0,
    group: Group | None = None,
    timeout: float | None = None,
) -> A:
    """Replaces `array` on every rank by what the servers keep, which they keep no more, and returns it.

    A collective call, as store(): it ends what that began, with the same array on all ranks.

    Args:
        array: of the same size and dtype as the array that was given to store().
        name: of the weights.
        priority, group, timeout: as for push_pull_inplace().

    Raises:
        InvalidArgumentError: the servers keep nothing of this name. Otherwise as push_pull_inplace().
    """
    start.unstore(array, _of_weights(moving(name, True, priority=priority, group=group, timeout=timeout))).wait()
    arrays.note_change(array)
    return array


@keywords_since("name", "out", "staleness", "priority", "group", "timeout", "again")
def accumulate(
    delta: Any,
    name: str,
    *,
    out: Any = None,
    staleness: int | None = None,
    priority: int = 0,
    group: Group | None = None,
    timeout: float | None = None,
    again: bool = False,
) -> Any:
    """Adds `delta` to the weights that the servers keep, and returns them, without waiting for other ranks.

    What is returned contains all that this rank has added, and what others have added so far. The ranks that are on
    the way change it in parts: partitions of BPS_PARTITION_BYTES, each consistent in itself. The order in which
    ranks come decides the last bits.

    Args:
        delta: of the same size and dtype as the array that was given to store().
        name: of the weights.
        out: receives the weights; may be `delta` itself. Default: a new array.
        staleness: how many additions this rank may be ahead of the slowest rank of the group: if it is more, the call
            waits for that rank. Ranks that have ended or are lost are not waited for. Default: any number.
        priority, group, timeout: as for push_pull_inplace().
        again: the latest call of this name has failed, and `delta` is the same: what the servers have not added of it
            is added now, and nothing twice. For that `delta` must not have been `out`.

    Raises:
        InvalidArgumentError: the servers keep nothing of this name; or `staleness` is negative, or 65,535 or more.
        DeadlineError: other ranks have not caught up; names them. What the servers have added stays; partitions that
            had not been sent are not added. `again=True` completes it.
        PeerLostError: a server is lost, and with it the weights. Otherwise as push_pull_inplace().
    """
    return _start(
        delta, out, staleness, again, _of_weights(moving(name, True, priority=priority, group=group, timeout=timeout))
    ).wait()


@whole
@keywords_since("name", "out", "staleness", "priority", "group", "timeout", "again")
@keywords_of(accumulate)
def accumulate_async(
    delta: Any,
    name: str,
    *,
    out: Any = None,
    staleness: int | None = None,
    again: bool = False,
    **options: Unpack[Moving],
) -> Handle[Any]:
    """Starts accumulate(); the handle gives the weights. Neither array may be used until then."""
    return _start(delta, out, staleness, again, _of_weights(moving(name, False, **options)))


class _Latest:
    """The latest additions to each group's weights of a name, those made again apart; a part of the job.

    An addition that was refused or interrupted before it began is one that the core does not know of: made again, it is
    a new one. The core would compare it with the one before, and not add it.
    """

    def __init__(self) -> None:
        self.begun: dict[tuple[int, str | None], list[Any]] = {}  # empty, or with an entry if it has begun


def _start(delta: Any, out: Any, staleness: int | None, again: bool, options: OperationOptions) -> Handle[Any]:
    job = current()
    all_latest, key = job.part(_Latest).begun, (group_of(job, options.group).id, options.name)
    begun: list[Any] = [] if key not in all_latest or not again else all_latest[key]
    if not again:
        all_latest[key] = begun
    again = again and (bool(begun) or key not in all_latest)
    outer = of_thread.begun
    try:
        of_thread.begun = begun  # gets the handle in one step
        handle = _begin(delta, out, staleness, again, options)
        if outer is not None:
            outer.append(handle)
    except BaseException:
        give_up([each for each in begun if each is not None])
        raise
    finally:
        of_thread.begun = outer
        begun[:] = [None] if begun else []  # lets go of the handle
    arrays.note_change(out)
    return handle


def _begin(delta: Any, out: Any, staleness: int | None, again: bool, options: OperationOptions) -> Handle[Any]:
    ahead = -1 if staleness is None else argument_types.whole(staleness)
    if ahead is None or not (staleness is None or 0 <= ahead <= _MOST_AHEAD):
        raise InvalidArgumentError(f"staleness={staleness!r}", f"pass a whole number from 0 to {_MOST_AHEAD}, or None")
    return start.accumulate(delta, out, ahead + 1, again, options)


def _of_weights(options: OperationOptions) -> OperationOptions:
    if options.name is None:
        raise InvalidArgumentError("weights need a name", "pass the same name=... to store() and accumulate()")
    return options._replace(compression=NONE)
