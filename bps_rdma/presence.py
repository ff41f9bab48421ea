# SPDX-License-Identifier: Apache-2.0
"""Where this process is: in no job, in a view of one, or between two views. One thread at a time changes that.

OUT --init()--> INSIDE --an error says that the view has ended--> TOLD --the next call--> INSIDE
INSIDE --a thread of the library keeps that error, and must go on--> UNTOLD --what is under way goes on--> INSIDE
UNTOLD --what is under way cannot go on--> AHEAD --the next call raises the error--> INSIDE
UNTOLD --the error is raised--> TOLD            any --shutdown()--> OUT
"""

from __future__ import annotations

import enum
import threading
from typing import NamedTuple

from bps_rdma import _core
from bps_rdma.errors import NotInitializedError, RoundAbortedError
from bps_rdma.kept_errors import keeping
from bps_rdma.running_job import Job


class Stage(enum.Enum):
    """See the diagram above."""

    OUT = enum.auto()
    INSIDE = enum.auto()
    TOLD = enum.auto()  # the view has ended, and the caller knows
    UNTOLD = enum.auto()  # the same, but only a thread of the library knows
    AHEAD = enum.auto()  # in the next view, of which the caller does not know


class Presence(NamedTuple):
    """The stage, and the job: in its present view, or in the one that has ended."""

    stage: Stage = Stage.OUT
    job: Job | None = None


_presence = Presence()
inside: Job | None = None  # the job, if calls may go on with it at once: they look here only
_lock = threading.RLock()  # for moments; a signal handler may interrupt its holder
_change: Change | None = None
_was_forked = False  # from a member of a job, and has been in none of its own
_left_because = ""  # why the last change has ended outside of any job
of_parent: list[Job] = []  # jobs of the process that this one was forked from, kept so that they are never destroyed


def now() -> Presence:
    """Where this process is."""
    return _presence


def become(stage: Stage, job: Job | None = None) -> None:
    """Goes into another stage."""
    global _presence, inside, _left_because, _was_forked
    with _lock:
        if stage is Stage.INSIDE:
            _left_because, _was_forked = "", False
        _presence = Presence(stage, job)
        inside = job if stage is Stage.INSIDE else None


def leave(why: BaseException) -> None:
    """Is in no job any more, because the next view could not be reached. One thread raises it; others may ask later."""
    global _left_because
    with _lock:
        _left_because = getattr(why, "message", type(why).__name__)
        become(Stage.OUT)


def note_view_end() -> None:
    """Notes that the view has ended, if it has. Outside of `keeping`, an error is about to tell the caller so."""
    with _lock:
        stage, job = _presence
        knows = Stage.UNTOLD if keeping else Stage.TOLD
        if stage is Stage.UNTOLD:
            become(knows, job)
        elif job is not None and stage is not Stage.TOLD and job.process.view_ended:
            become(knows, job)  # from AHEAD: the caller is told of two ends at once
        elif stage is Stage.AHEAD and not keeping:
            become(Stage.INSIDE, job)


def arrive(job: Job) -> None:
    """Is in the next view, with this job."""
    with _lock:
        become(Stage.AHEAD if _presence.stage is Stage.UNTOLD and not job.goes_on else Stage.INSIDE, job)


def tell(job: Job) -> None:
    """The caller is about to be told that `job` is in the next view. Another thread may have told it, and gone on."""
    with _lock:
        if _presence.stage is Stage.AHEAD and _presence.job is job:
            become(Stage.INSIDE, job)


def raised(error: BaseException) -> BaseException:
    """Returns an error that was kept, which the caller is about to raise: see kept_errors.py."""
    if isinstance(error, RoundAbortedError) and not keeping:
        note_view_end()
    return error


class Change:
    """An init(), a shutdown() or a step into the next view in progress: there is one at a time.

    Other threads wait for its end. A signal handler that has interrupted it cannot.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.stop = _core.Stop()
        self.over = threading.Event()


def begin_change(*, ends_init: bool) -> Change | None:
    """Waits until no other thread is at a change. None: this thread itself is, in a signal handler.

    Args:
        ends_init: an init() that is in progress ends with NotInitializedError.
    """
    global _change
    while True:
        with _lock:
            running = _change
            if running is None:
                _change = mine = Change()
                return mine
        if ends_init:
            running.stop.request()
        if running.thread == threading.get_ident():
            return None
        running.over.wait()


def is_changing() -> bool:
    """Whether this thread is at a change."""
    running = _change
    return running is not None and running.thread == threading.get_ident()


def end_change(change: Change) -> None:
    """Lets the next thread begin one."""
    global _change
    _change = None
    change.over.set()


def after_fork() -> None:
    """Forgets the job: a forked process is no member of its parent's job."""
    global _change, _lock, _was_forked
    if _presence.job is not None:
        of_parent.append(_presence.job)
        _was_forked = True
    _change, _lock = None, threading.RLock()
    become(Stage.OUT)


def outside() -> NotInitializedError:
    """The error of a call that needs a job."""
    if _was_forked:
        return NotInitializedError(
            "this process was forked from a member of a job, and is no member itself",
            "ask for rank() and size() before the fork, and hand them on",
        )
    if _left_because:
        return NotInitializedError(f"this process has left the job: {_left_because}", "call init() again")
    return NotInitializedError("bps_rdma is not initialised", "call bps_rdma.init() first")
