# SPDX-License-Identifier: Apache-2.0
"""Calls in which the ranks agree through the scheduler: new groups, barriers, and votes on steps."""

from __future__ import annotations

from collections.abc import Iterable

from bps_rdma import argument_types
from bps_rdma.errors import InvalidArgumentError
from bps_rdma.group import Group
from bps_rdma.job import current, surviving
from bps_rdma.running_job import Job


def new_group(ranks: Iterable[int], name: str = "") -> Group:
    """Creates the group of some worker ranks, or finds it. Only the ranks of the group call this.

    Args:
        ranks: worker ranks, in any order.
        name: distinguishes groups of the same ranks.

    Raises:
        InvalidArgumentError: a rank occurs twice or is out of range, or this rank is not among them.
        DeadlineError: a member did not call it in time. PeerLostError: a member was lost.
    """
    wanted = _whole_numbers(ranks)
    argument_types.check_name(name)
    return surviving(lambda: _make_group(wanted, name))


def _make_group(members: list[int], name: str) -> Group:
    job = current()
    if not members or len(set(members)) != len(members) or members[0] < 0 or members[-1] >= job.world.size:
        raise InvalidArgumentError(
            f"{members} are not ranks of a world of {job.world.size}", "name each rank once, from 0"
        )
    if job.process.rank not in members:
        raise InvalidArgumentError(
            f"rank {job.process.rank} is not in the group {members}", "call new_group() on its members only"
        )
    number = job.process.new_group(members, name, job.process.timeout_s)
    if number not in job.groups:
        job.add_group(f"{job.process.epoch:08}.{number:08}", number, Group(number, tuple(members)))
    return job.groups[number]


def _whole_numbers(ranks: Iterable[int]) -> list[int]:
    found = [argument_types.whole(rank) for rank in ranks] if isinstance(ranks, Iterable) else [None]
    members = sorted(rank for rank in found if rank is not None)
    if len(members) < len(found):
        raise InvalidArgumentError(f"{ranks!r} are not ranks", "pass a list of whole numbers, as in [0, 1]")
    return members


def barrier(group: Group | None = None, timeout: float | None = None) -> None:
    """Waits until every rank of the group has called it.

    Args:
        group: the ranks that wait for each other; None: all workers.
        timeout: seconds; default BPS_TIMEOUT.

    Raises:
        DeadlineError: after `timeout` seconds (default: BPS_TIMEOUT); names the missing ranks.
        PeerLostError: a rank of the group was lost.
    """

    def wait() -> None:
        job = current()
        job.process.barrier(group_of(job, group).id, job.process.timeout_s if timeout is None else timeout)

    try:
        surviving(wait)
    except TypeError:
        argument_types.explain(timeout=timeout)
        raise


def commit(group: Group | None = None, timeout: float | None = None) -> None:
    """Agrees that a step is complete, in a job that may go on without lost members (BPS_MIN_WORKERS).

    Every rank of the group calls it when it has all results of a step, and before it uses them. When a member is lost
    either all ranks that are left return, or all raise RoundAbortedError and repeat the step: none uses results that
    another one lacks. New processes enter the job when all its workers have called it. Costs a round trip to the
    scheduler; in other jobs it returns at once.

    Raises:
        RoundAbortedError: a member was lost; nobody may use the results of this step.
        DeadlineError, PeerLostError: as barrier().
    """
    argument_types.explain(timeout=timeout)  # also in a job that does not vote

    def end_step() -> None:
        job = current()
        if job.may_lose_members:
            job.process.end_step(group_of(job, group).id, job.process.timeout_s if timeout is None else timeout)
        job.is_late = False
        job.has_entrants = job.has_entrants and group is not None

    surviving(end_step)


def group_of(job: Job, group: Group | None) -> Group:
    """Returns the group that a caller has passed; None means all workers."""
    if group is None:
        return job.world
    if not isinstance(group, Group) or job.groups.get(group._id) != group:
        raise InvalidArgumentError(f"{group} is not a group of this job", "make it with new_group() after init()")
    return group
