# SPDX-License-Identifier: Apache-2.0
"""From one view to the next: which job a call belongs to, and what goes on after the loss of a server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

from bps_rdma import _core, presence, stacks
from bps_rdma.errors import BpsError, NotInitializedError, RoundAbortedError
from bps_rdma.group import Group
from bps_rdma.kept_errors import keeping
from bps_rdma.presence import Change, Stage, note_view_end
from bps_rdma.running_job import Job

T = TypeVar("T")
_REPEAT = "repeat the step"


def _note_raised() -> None:
    """Called for each RoundAbortedError of the core. One that is kept tells the caller nothing yet."""
    if not keeping:
        note_view_end()


def current() -> Job:
    """The job of this process. After the end of a view it may have to wait until all other ranks are in the next one.

    Raises:
        NotInitializedError: this process is in no job.
        RoundAbortedError: a thread of the library was in the next view before the caller knew; or this is one, and must
            not go there.
    """
    job = presence.inside
    return _renewed() if job is None else job


def go_on() -> None:
    """Takes this process into its next view, if the caller knows that it goes there, and if it is not on its way.

    Raises:
        The errors of current(). In no job it does nothing.
    """
    if presence.inside is None and presence.now().job is not None and not keeping and not presence.is_changing():
        current()


def _renewed() -> Job:
    stage, job = presence.now()
    if job is None:
        raise presence.outside()
    if stage is Stage.INSIDE or (stage is Stage.AHEAD and keeping):
        return job
    if stage is Stage.AHEAD:
        presence.tell(job)
        raise RoundAbortedError("a member was lost or has entered, and the view has ended", _REPEAT)
    if keeping and not job.process.survives_servers:
        raise RoundAbortedError("the view has ended", _REPEAT)
    change = presence.begin_change(ends_init=False)
    if change is None:
        raise NotInitializedError(
            "a signal handler has interrupted the change to the next view", "use bps_rdma when the handler has returned"
        )
    try:
        stage, job = presence.now()
        if job is not None and stage in (Stage.TOLD, Stage.UNTOLD):  # otherwise another thread was faster
            _go_on(job, change)
    finally:
        presence.end_change(change)
    return current()


def _go_on(before: Job, change: Change) -> None:
    """Takes this process into its next view."""
    try:
        job = settled(_next_view(before, change), change)
    except BaseException as error:  # it is in no job any more, and shutdown() has nothing to do
        presence.leave(error)
        stacks.hide()
        raise
    presence.arrive(job)


def settled(job: Job, change: Change) -> Job:
    """Returns the job, or that of a later view, once all its ranks know how they go on."""
    while True:
        try:
            job.go_on()
            return job
        except RoundAbortedError:  # another member was lost meanwhile
            job = _next_view(job, change)
        except BaseException:  # nobody can use it, and what it has begun must not write any more
            with contextlib.suppress(BpsError):
                job.process.shutdown(0.0)
            raise


def _next_view(before: Job, change: Change) -> Job:
    """Returns the job in the view that follows one that has ended; go_on() must follow."""
    kept = before.take_lasting_parts()
    goes_on = False
    try:
        process = _core.Process.renew(before.process, change.stop)
        interrupted = before.take_interrupted()
        # Other views may have begun and ended meanwhile, without this process.
        old_ranks = {identity: rank for rank, identity in enumerate(before.identities)}
        ranks = {old_ranks[identity]: new for new, identity in enumerate(process.identities) if identity in old_ranks}
        has_same_workers = process.workers == len(ranks) == before.world.size
        goes_on = has_same_workers and process.survives_servers and before.process.can_go_on
        if goes_on:
            kept.update(before._parts)
            before._parts = {}
    finally:
        before.close()
        _core.release_orphans(all=before.process.is_down and not goes_on)
    job = Job(process, before.config, Group(0, tuple(range(process.workers))))
    job._parts.update(kept)
    was_compressed = {before.numbering.name_of(one): one.compression for one in before.tensors.values()}
    job.compressed = before.compressed | {name: text for name, text in was_compressed.items() if text}
    for key, group, members in before.all_groups():
        job.lost_groups.append((key, group, tuple(ranks[rank] for rank in members if rank in ranks)))
    if goes_on:
        job.goes_on = True
        job.epoch = before.epoch
        job.interrupted, job.failed = interrupted, before.failed
        job.views = before.views | job.views
        job.numbering.next = before.next_rounds()
    else:
        for each in interrupted:
            each.operation.abort()
    return job


def resume() -> bool:
    """Goes into the next view after the end of one. Returns False if operations under way cannot go on there."""
    job = presence.now().job
    if job is None or not job.process.survives_servers:
        _note_raised()
        return False
    note_view_end()
    return current().goes_on


def asked(call: Callable[[_core.Process], T]) -> T:
    """Returns what `call` reads from this process, in the view that the process is in by then."""
    while True:
        process = current().process
        try:
            return call(process)
        except RoundAbortedError:  # another thread goes into the next view
            note_view_end()


def rebound(process: _core.Process, tensor: _core.Tensor) -> tuple[_core.Process, _core.Tensor] | None:
    """Finds what a prepared operation works on in the next view. None: the job has ended, or has other workers.

    Raises:
        NotInitializedError: the caller knew that the view had ended. This call takes it into the next one, as any does.
    """
    if not process.survives_servers:
        if presence.now().stage is not Stage.TOLD or keeping:
            return None
        current()
        raise NotInitializedError("the view has ended in which this operation was prepared", "prepare it again")
    note_view_end()
    if presence.now().job is None:
        return None
    job = current()
    keys = job.views.get(id(process))
    if keys is None or job.process is process:
        return None
    number = job.numbering.number_of(keys[tensor.group])
    found = job.tensors.get((number, tensor.name))
    if found is None:
        declared = (number, tensor.name, tensor.dtype, tensor.elements, tensor.shape, tensor.compression)
        found = job.declare([declared])[0]
    return job.process, found


_core.register_view_hooks(note_view_end=_note_raised, resume=resume, rebound=rebound)


def surviving(call: Callable[[], T]) -> T:
    """Repeats a call if only servers were lost. The call must have no effect when it raises RoundAbortedError."""
    while True:
        try:
            return call()
        except RoundAbortedError:
            if not resume():
                raise
